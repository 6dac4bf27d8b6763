"""What estimators say of the parameters and attributes that they share, written once."""

from __future__ import annotations

from typing import TypeVar

from emfed.core.settings.declaring import Declared, declared, fill
from emfed.core.settings.fit import FitFields

Kind = TypeVar("Kind", bound=type)
PARAMETERS = {
    **declared(FitFields),
    "n_components": Declared(
        help='The number of components, or several to choose from: a range or "2:8". They are '
        "fitted in the same rounds and the best by ``criterion`` is kept.",
        takes="int, str or iterable of int",
    ),
    "criterion": Declared(
        help="What chooses among several numbers.", takes='{"bic", "icl", "aic"}'
    ),
    "max_iter": Declared(help="The largest number of rounds.", takes="int"),
    "warm_start": Declared(help="Whether a second fit goes on from the first.", takes="bool"),
    "random_state": Declared(
        help="The seed; None is 0 for the fit, and other rows for each `sample`.",
        takes="int, random state or None",
    ),
    "device": Declared(
        help='"cuda" puts the rows on a GPU; rows that are CUDA tensors are taken as they are.',
        takes="str or None",
    ),
    "precision": Declared(
        help='The precision of passes on a device; "fast" is six digits.',
        takes='{"double", "fast"}',
    ),
    "verbose": Declared(
        help="Whether a bar on stderr shows rounds, bytes and time left, also of sites elsewhere.",
        takes="bool",
    ),
}
ATTRIBUTES = {
    "n_components_": Declared(help="The number of components, chosen or given.", takes="int"),
    "selection_": Declared(
        help="The table that the number was chosen from.", takes="Selection or None"
    ),
    "labels_": Declared(
        help="The component of each row of X; a list where X is one table for each worker, None "
        "where the rows are elsewhere.",
        takes="array or list of arrays",
    ),
    "converged_": Declared(
        help="Whether the fit ended because little was left to gain.", takes="bool"
    ),
    "n_iter_, n_rounds_": Declared(help="The number of rounds.", takes="int"),
    "lower_bound_": Declared(help="The mean log-likelihood of the rows of the fit.", takes="float"),
    "bytes_, raw_bytes_": Declared(
        help="The bytes that were sent, both ways, and the size of the rows themselves as doubles.",
        takes="int",
    ),
    "records_": Declared(help="What each round did.", takes="Records"),
    "guard_hits_": Declared(
        help="How often a step was halved to stay inside the model's domain.", takes="int"
    ),
    "result_": Declared(help="The result of the fit.", takes="Result"),
}


def documented(estimator: Kind) -> Kind:
    """Decorate an estimator: a name in braces in its docstring becomes the entry of that name."""
    known = {**PARAMETERS, **ATTRIBUTES}
    return fill(estimator, {name: entry.docstring(name) for name, entry in known.items()})
