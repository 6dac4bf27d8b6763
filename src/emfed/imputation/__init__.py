"""Federated low-rank imputation: fill a sites x time table without pooling its records."""

from emfed.imputation.choice import Choice, Search
from emfed.imputation.ebird import read_ebird
from emfed.imputation.families import FAMILIES, Family, Gaussian
from emfed.imputation.fit import ImputeSettings, from_result, impute
from emfed.imputation.intake import Columns, ReadSettings, read_records
from emfed.imputation.lowrank import Cells, Structure, TableParameters
from emfed.imputation.result import Imputation
from emfed.imputation.simulate import simulate_table
from emfed.imputation.table import FieldTable, Grid, Intake

__all__ = [
    "FAMILIES",
    "Cells",
    "Choice",
    "Columns",
    "Family",
    "FieldTable",
    "Gaussian",
    "Grid",
    "ImputeSettings",
    "Imputation",
    "Intake",
    "ReadSettings",
    "Search",
    "Structure",
    "TableParameters",
    "from_result",
    "impute",
    "read_ebird",
    "read_records",
    "simulate_table",
]
