"""Federated low-rank imputation: fill a sites x time table without pooling its records."""

from emfed.imputation.choice import Choice, Search
from emfed.imputation.ebird import Checklists, read_ebird
from emfed.imputation.effort import Effort
from emfed.imputation.families import FAMILIES, CellFamily, GaussianCells
from emfed.imputation.fit import ImputeSettings, from_result, impute
from emfed.imputation.index import Index
from emfed.imputation.intake import ColumnNames, ReadSettings, observer_rows, read_records
from emfed.imputation.lowrank import Cells, Structure, TableParameters
from emfed.imputation.posterior import Posterior
from emfed.imputation.program import load_table
from emfed.imputation.result import Imputation
from emfed.imputation.simulate import simulate_table
from emfed.imputation.skill import ObserverSkill
from emfed.imputation.table import FieldTable, Grid, IntakeReport

__all__ = [
    "FAMILIES",
    "Cells",
    "Checklists",
    "Choice",
    "ColumnNames",
    "Effort",
    "CellFamily",
    "FieldTable",
    "GaussianCells",
    "Grid",
    "ImputeSettings",
    "Imputation",
    "Index",
    "ObserverSkill",
    "IntakeReport",
    "Posterior",
    "ReadSettings",
    "Search",
    "Structure",
    "TableParameters",
    "from_result",
    "impute",
    "load_table",
    "observer_rows",
    "read_ebird",
    "read_records",
    "simulate_table",
]
