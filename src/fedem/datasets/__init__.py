"""Data of many workers: intake, generators and partitions."""

from fedem.datasets.synthetic import sample_mixture, synthetic_federation
from fedem.datasets.workers import WorkerData, as_workers

__all__ = ["WorkerData", "as_workers", "sample_mixture", "synthetic_federation"]
