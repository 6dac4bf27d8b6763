"""The paper's experiments on mixtures, and ablations of what it argues in words.

They are run from a clone of the repository (``python -m paper --list``) and are not installed.

One folder an experiment: ``config.toml`` says what is run, ``expected.json`` what must come out,
``README.md`` why; ``analyse`` in its ``__init__.py`` turns records into measures and figures.
"""

from paper.config import (
    ABLATIONS,
    NAMES,
    PAPER,
    Experiment,
    Job,
    load_experiment,
)
from paper.reproduce import JOBS, Reproduction, reproduce

__all__ = [
    "ABLATIONS",
    "JOBS",
    "NAMES",
    "PAPER",
    "Experiment",
    "Job",
    "Reproduction",
    "load_experiment",
    "reproduce",
]
