"""
Records of mixed types, with categories
=======================================

Visits to the emergency rooms of five hospitals: age, how the patient came, the number of earlier
visits, whether the patient was admitted, hours of waiting. One mixture describes all columns, each
by a family of its own, and finds the kinds of visits. Words stay words, and gaps stay gaps.
"""

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from sklearn.metrics import adjusted_rand_score

import emfed

# %%
# Three kinds of visits: injuries of the young, chronic illness, and falls at home.
rng = np.random.default_rng(0)
kind = rng.choice(3, 1500, p=[0.5, 0.3, 0.2])
coming = np.array(["on foot", "by car", "ambulance"])
arrival = np.array([[0.5, 0.45, 0.05], [0.1, 0.6, 0.3], [0.02, 0.18, 0.8]])
frame = pl.DataFrame(
    {
        "age": rng.normal(np.array([28, 57, 81])[kind], 9).clip(0).round(),
        "came": coming[(rng.random((1500, 1)) > arrival.cumsum(axis=1)[kind]).sum(axis=1)],
        "earlier": rng.poisson(np.array([0.3, 4, 1.5])[kind]).astype(float),
        "admitted": rng.random(1500) < np.array([0.1, 0.5, 0.8])[kind],
        "hours": rng.gamma(2, np.array([1.2, 1.8, 0.9])[kind]),
        "hospital": rng.choice(["A", "B", "C", "D", "E"], 1500, p=[0.1, 0.15, 0.2, 0.25, 0.3]),
    }
)
frame = frame.with_columns(
    pl.when(pl.Series(rng.random(1500) > 0.1)).then(pl.col(name))
    for name in ("age", "came", "hours")
)

# %%
# Columns that are not Gaussian are named. The number of kinds is chosen by BIC, in shared rounds.
families = {"came": "categorical", "earlier": "poisson", "admitted": "bernoulli", "hours": "gamma"}
mixture = emfed.FederatedMixture("2:4", families=families, random_state=0)
found = mixture.fit(frame, groups="hospital").predict(frame)
print(mixture.result_)
assert mixture.n_components_ == 3
assert adjusted_rand_score(kind, found) > 0.6
everything = frame.drop("hospital")
pooled = emfed.FederatedMixture(3, families=families, random_state=0).fit(everything)
assert abs(pooled.score(everything) - mixture.score(frame)) < 1e-3

# %%
# Every column in its own words: how each kind of visit came, and how long it waited by age.
_, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for k, chances in enumerate(mixture.parameters_["came"]["probabilities"]):
    left.bar(np.arange(3) + 0.25 * (k - 1), chances, 0.25, color=f"C{k}", label=f"kind {k}")
left.set_xticks(range(3), mixture.categories_["came"])
left.legend(title="share of visits")
right.scatter(frame["age"], frame["hours"], c=[f"C{k}" for k in found], s=6)
right.set(xlabel="age", ylabel="hours of waiting")
plt.show()
