"""Data of many workers: intake, files, streams, generators and partitions."""

from emfed.data.faults import FaultReport, FaultyTable, TableFault
from emfed.data.files import TextForm
from emfed.data.reader import DataTable, read
from emfed.data.schema import Column, Schema
from emfed.data.sequences import pad_sequences
from emfed.data.sources import LazyRows, ParquetRows, Source, Stream
from emfed.data.synthetic import sample_mixture, synthetic_federation
from emfed.data.tables import Workers, WorkerTables
from emfed.data.workers import WorkerData, as_workers, with_columns

__all__ = [
    "Column",
    "DataTable",
    "FaultReport",
    "FaultyTable",
    "LazyRows",
    "ParquetRows",
    "Schema",
    "Source",
    "Stream",
    "TableFault",
    "TextForm",
    "WorkerData",
    "WorkerTables",
    "Workers",
    "as_workers",
    "pad_sequences",
    "read",
    "sample_mixture",
    "synthetic_federation",
    "with_columns",
]
