"""
Your own model in sixty lines
=============================

Some machines were still running when the study of their lives ended: of these only a lower bound
is known. The package has no such model, so this script brings it: what its statistics are, how
parameters follow from them, and a likelihood. Compression, networks and masks come by themselves.
"""

import dataclasses

import matplotlib.pyplot as plt
import numpy as np

import emfed
from emfed.core.protocols import Layout, Model, Parameters
from emfed.models.rows import check_rows
from emfed.network import LocalSites
from emfed.network.owner_rules import SiteRules


@dataclasses.dataclass(frozen=True)
class Life(Parameters):
    mean: np.ndarray


# %%
# A row is (time, whether it ended). A life z is exponential with mean m, and the statistic is z.
# It has no memory, so E[z | z > time] = time + m; T(s) = s minimises log m + s / m.
@emfed.models.register_model("machine-lifetimes")
@dataclasses.dataclass(frozen=True)
class Lifetimes(Model):
    typical: float = 1.0
    layout = Layout((("life", (1,)),))

    def check(self, data, where, columns=None, first=0):
        check_rows(data, where, columns, 2, first)

    def summary(self, data, weights=None):
        return {"time": _mean(data[..., :1], weights)}

    def bind(self, summaries, counts, weights):
        return dataclasses.replace(self, typical=float(weights @ summaries["time"][:, 0]))

    def expected_statistics(self, data, params, weights=None):
        return _mean(data[..., :1] + (1 - data[..., 1:]) * params.mean[..., None, :], weights)

    def maximize(self, statistics):
        return Life(np.asarray(statistics, dtype=float))

    def surrogate(self, statistics, params):
        return (np.log(params.mean) + statistics / params.mean)[..., 0]

    def log_likelihood(self, data, params, weights=None):
        m = params.mean[..., None, :]  # parameters may have leading axes too: one m for each worker
        log_density = -data[..., 1:] * np.log(m) - data[..., :1] / m
        return _mean(log_density, weights)[..., 0]

    def inside(self, statistics):
        return bool(np.all(np.isfinite(statistics)) and np.all(statistics > 0))

    def start(self, seed):
        return Life(np.array([self.typical * (1.0 + seed % 7)]))

    def statistics_of(self, params):
        return params.mean

    def describe(self):
        return {"model": "machine-lifetimes"}


def _mean(values, weights):
    w = np.ones(values.shape[:-1]) if weights is None else weights
    return (w[..., None] * values).sum(axis=-2) / w.sum(axis=-1)[..., None]


# %%
# Does it keep its promises? Then fit it at four factories, masked. (An owner must name a model that
# is not the package's own.) The textbook has the answer: all hours over the number of failures.
rng = np.random.default_rng(0)
lives = {f"factory-{i}": rng.exponential(7.0, size=150) for i in range(4)}
tables = {name: np.column_stack([z.clip(max=6), z < 6]) for name, z in lives.items()}
print(emfed.testing.check_model(Lifetimes(), list(tables.values())))
sites = LocalSites(tables, rules=SiteRules(models=["machine-lifetimes"]))
result = emfed.fit(Lifetimes(), sites, tol=1e-9)
hours, failures = np.concatenate(list(tables.values())).sum(axis=0)
np.testing.assert_allclose(result.params.mean[0], hours / failures, rtol=1e-3)

# %%
# The fitted curve goes through all lives, also those that the study did not see to their end.
z, at = np.sort(np.concatenate(list(lives.values()))), np.linspace(0, 30, 200)
plt.figure(figsize=(7, 3.5), layout="constrained")
plt.step(z, 1 - np.arange(len(z)) / len(z), color="grey", label="all lives, as only we know them")
plt.plot(at, np.exp(-at / result.params.mean[0]), label="fitted to the first six months")
plt.axvline(6, color="k", ls=":", label="the study ends")
plt.gca().set(xlabel="months", ylabel="share still running", xlim=(0, 30))
plt.legend()
plt.show()
