"""Data of many workers: intake, files, streams, generators and partitions."""

from fedem.datasets.sequences import pad_sequences
from fedem.datasets.sources import ParquetRows, Source, Stream
from fedem.datasets.synthetic import sample_mixture, synthetic_federation
from fedem.datasets.tables import Workers, WorkerTables
from fedem.datasets.workers import WorkerData, as_workers

__all__ = [
    "ParquetRows",
    "Source",
    "Stream",
    "WorkerData",
    "WorkerTables",
    "Workers",
    "as_workers",
    "pad_sequences",
    "sample_mixture",
    "synthetic_federation",
]
