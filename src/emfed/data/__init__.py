"""Data of many workers: intake, files, streams, generators and partitions."""

from emfed.data.sequences import pad_sequences
from emfed.data.sources import LazyRows, ParquetRows, Source, Stream
from emfed.data.synthetic import sample_mixture, synthetic_federation
from emfed.data.tables import Workers, WorkerTables
from emfed.data.workers import WorkerData, as_workers, with_columns

__all__ = [
    "LazyRows",
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
    "with_columns",
]
