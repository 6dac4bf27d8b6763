"""Federated low-rank imputation: fill a sites x time table without pooling its records."""

from fedem.imputation.choice import Choice, choose
from fedem.imputation.ebird import read_ebird
from fedem.imputation.families import FAMILIES, Family, Gaussian
from fedem.imputation.fit import impute
from fedem.imputation.intake import Columns, read_records
from fedem.imputation.lowrank import Cells, Structure, TableParameters
from fedem.imputation.result import Imputation
from fedem.imputation.simulate import simulate_table
from fedem.imputation.table import FieldTable, Intake

__all__ = [
    "FAMILIES",
    "Cells",
    "Choice",
    "Columns",
    "Family",
    "FieldTable",
    "Gaussian",
    "Imputation",
    "Intake",
    "Structure",
    "TableParameters",
    "choose",
    "impute",
    "read_ebird",
    "read_records",
    "simulate_table",
]
