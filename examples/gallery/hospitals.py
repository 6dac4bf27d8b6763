"""
Phenotypes of patients of four hospitals
========================================

Four hospitals look for groups of patients who are alike, and no record leaves its hospital. Values
are missing here and there, and one hospital never measures HbA1c. The fit runs over the protocol
between sites, with masks: whoever carries the messages sees no number of any hospital.
"""

import matplotlib.pyplot as plt
import numpy as np
import polars as pl

import emfed
from emfed.network import LocalSites

# %%
# Three phenotypes, mixed differently at each hospital. A tenth of all values is missing.
rng = np.random.default_rng(0)
columns = ["age", "BMI", "systolic", "HbA1c", "LDL", "eGFR"]
healthy, diabetic = [45, 24, 122, 5.3, 2.9, 95], [58, 33, 138, 7.8, 3.4, 82]
means = np.array([healthy, diabetic, [74, 27, 152, 6.0, 2.6, 48]])  # the last: a renal phenotype
spread = np.array([9, 3, 10, 0.5, 0.6, 10])
shares = {"north": (5, 3, 2), "south": (2, 3, 5), "east": (7, 2, 1), "west": (3, 5, 2)}
truth = {name: rng.choice(3, 300, p=np.array(mix) / 10) for name, mix in shares.items()}
whole = {name: rng.normal(means[group], spread) for name, group in truth.items()}
tables = {name: np.where(rng.random(t.shape) < 0.1, np.nan, t) for name, t in whole.items()}
tables["south"][:, columns.index("HbA1c")] = np.nan
tables = {name: pl.DataFrame(table, schema=columns) for name, table in tables.items()}

# %%
# One site for each hospital, here in this process. Between machines, ``listen(...)`` stands in the
# place of ``LocalSites(...)``, and nothing else changes.
model = emfed.gaussian_mixture(3, "diag", missing=True)
result = emfed.fit(model, LocalSites(tables))
print(result)

# %%
# The answer is that of all rows in one table, which nobody ever had.
everything = pl.concat(tables.values())
pooled = emfed.fit(model, everything, tol=1e-6)
assert pooled.log_likelihood(everything) - result.log_likelihood(everything) < 1e-4

# %%
# What south never measured, the others know: its HbA1c is filled in from the common model.
filled = result.impute(tables["south"])[:, 3]
error = np.sqrt(np.mean((filled - whole["south"][:, 3]) ** 2))
assert error < 0.75 * whole["south"][:, 3].std()
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
left.scatter(whole["south"][:, 3], filled, s=8, c=truth["south"], cmap="viridis")
left.axline((6, 6), slope=1, color="grey", lw=0.8)
left.set(xlabel="HbA1c, never told to anybody", ylabel="HbA1c, filled in", title="at south")
for number, (name, table) in enumerate(tables.items()):
    share = np.bincount(result.predict(table), minlength=3) / len(table)
    right.bar(np.arange(3) + 0.2 * number - 0.3, share, 0.2, label=name)
right.set(xticks=range(3), xlabel="phenotype", title="share of patients", ylim=(0, 0.8))
right.legend(ncols=4, loc="upper center")
plt.show()
