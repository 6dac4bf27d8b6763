"""
Counts of birds: a trend and a map
==================================

Volunteers of six societies count birds at sixty ponds, and most pond-years have no count. A table
of low rank fills the gaps, with bounds, while every society keeps its records. A cell of the table
is few records, so here the server does learn counts.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
import polars as pl

import emfed
from emfed.imputation import Structure, read_records

# %%
# Birds grow rarer in the south and more frequent in the north. A society knows its own region, and
# 40% of all pond-years were counted.
rng = np.random.default_rng(0)
years, ponds = np.arange(2005, 2020), 60
east, north = rng.random((2, ponds))
level = 3 + east + 0.4 * rng.normal(size=ponds)
rate = np.exp(level[:, None] + 0.16 * (north - 0.65)[:, None] * (years - 2012))
pond, year = np.nonzero(rng.random(rate.shape) < 0.4)
names = np.array([f"pond {number:02}" for number in range(ponds)])
society = np.array([f"society {number}" for number in np.floor(3 * east) + 3 * (north > 0.5)])
columns = {"site": names[pond], "date": years[year].astype(str), "observer": society[pond]}
records = pl.DataFrame(columns | {"count": rng.poisson(rate[pond, year])})
table = read_records(records, family="poisson", bins="year")

# %%
# Every society sends the sums of its cells once, and the table is that of all records in one place.
result = emfed.impute(table, structure=Structure(rank=1), draws=100)
print(result)
with warnings.catch_warnings(action="ignore"):  # that nothing is federated
    pooled = emfed.impute(table.regroup(1), structure=Structure(rank=1), draws=0)
cells = np.indices(rate.shape).reshape(2, -1)
np.testing.assert_allclose(result.theta(*cells), pooled.theta(*cells), rtol=1e-9)

# %%
# The bounds of the trend hold the truth, and the map shows who gains and who loses.
trend, total = result.trend(level=0.95), rate.sum(axis=0)
assert np.mean((trend["lower"] <= total) & (total <= trend["upper"])) >= 0.8
found = result.predict(*cells).reshape(rate.shape)
change = np.log(found[:, -1] / found[:, 0])
assert np.corrcoef(change, north)[0, 1] > 0.8
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
left.fill_between(years, trend["lower"], trend["upper"], alpha=0.3, label="95% bounds")
left.plot(years, trend["estimate"], label="all ponds, estimated")
left.plot(years, total, "k--", label="truth")
left.set(ylabel="birds", ylim=(0, None))
left.legend(loc="lower right")
dots = right.scatter(east, north, c=change, cmap="RdBu", vmin=-1, vmax=1, s=80)
right.set(xlabel="east", ylabel="north", title="change from 2005 to 2019")
plt.colorbar(dots, label="log ratio")
plt.show()
