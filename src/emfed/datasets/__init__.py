"""Data of many workers: intake, files, streams, generators and partitions."""

from emfed.datasets.sequences import pad_sequences
from emfed.datasets.sources import ParquetRows, Source, Stream
from emfed.datasets.synthetic import sample_mixture, synthetic_federation
from emfed.datasets.tables import Workers, WorkerTables
from emfed.datasets.workers import WorkerData, as_workers

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
