"""
How many components?
====================

The wines of three growers, thirteen measurements each, at four laboratories. All numbers of
components are fitted in the same rounds, and BIC is computed from sums over laboratories. It is
exactly the BIC of all rows in one table, so it can be compared with scikit-learn's.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_wine
from sklearn.mixture import GaussianMixture

import emfed

# %%
# The rows are spread over four laboratories. Three starts for each number run side by side.
wine = load_wine()
rows = (wine.data - wine.data.mean(axis=0)) / wine.data.std(axis=0)
laboratory = np.random.default_rng(0).integers(4, size=len(rows))
mixture = emfed.FederatedGaussianMixture("1:6", covariance_type="diag", n_init=3, random_state=0)
found = mixture.fit(rows, groups=laboratory).predict(rows)
print(mixture.result_)

# %%
# scikit-learn, with all rows in one table and ten starts: the same figures, and the same choice.
# (Four, where there are three growers: a part of the second's wines and a few of the first's are
# much alike.)
numbers = np.arange(1, 7)
peers = [GaussianMixture(k, covariance_type="diag", n_init=10, random_state=0) for k in numbers]
pooled = np.array([peer.fit(rows).bic(rows) for peer in peers])
bic = np.array([row["bic"] for row in mixture.selection_.table])
assert mixture.n_components_ == numbers[pooled.argmin()]
np.testing.assert_allclose(bic[:4], pooled[:4], rtol=1e-3)
assert np.all(bic < pooled + 5)  # for more components starts decide, and no end is much worse

# %%
# The curve of BIC, and how the components share the wines of each grower.
_, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.plot(numbers, pooled, "s--", color="grey", label="scikit-learn, pooled")
left.plot(numbers, bic, "o-", label="four laboratories")
left.plot(mixture.n_components_, bic.min(), "*", ms=18, color="C1", label="chosen")
left.set(xlabel="components", ylabel="BIC")
left.legend()
counts = np.zeros((3, mixture.n_components_))
np.add.at(counts, (wine.target, found), 1)
right.imshow(counts, cmap="Blues")
for grower, component in np.ndindex(counts.shape):
    wines = int(counts[grower, component])
    right.text(component, grower, wines, ha="center", color="w" if wines > 25 else "k")
right.set(xlabel="component", ylabel="grower", title="wines", xticks=range(4), yticks=range(3))
plt.show()
