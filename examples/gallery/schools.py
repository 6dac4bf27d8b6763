"""
Factors behind questionnaires at eight schools
==============================================

Eight schools ask pupils twelve questions. Which few traits stand behind the answers? Factor
analysis needs only the covariance of all answers, which the first exchange tells in a sum over
schools: there are no rounds, and the loadings are those of all answers in one table.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.linalg import orthogonal_procrustes
from sklearn.decomposition import FactorAnalysis

import emfed
from emfed.network import LocalSites

# %%
# Three traits, four questions each; some questions touch a second trait. Schools differ in level.
rng = np.random.default_rng(0)
traits = ["curiosity", "calm", "company"]
target = np.kron(np.eye(3), np.ones((4, 1)))  # which question is meant for which trait
loadings = 0.8 * target + 0.3 * (rng.random(target.shape) < 0.2)
tables = {}
for school in range(8):
    pupils = rng.normal(0.2 * rng.normal(size=3), 1, size=(rng.integers(60, 140), 3))
    answers = 3 + pupils @ loadings.T + 0.6 * rng.normal(size=(len(pupils), 12))
    tables[f"school-{school}"] = answers.round(1)

# %%
# Schools are sites that mask what they tell.
result = emfed.fit(emfed.factor_analysis(3), LocalSites(tables))
print(result)

# %%
# scikit-learn with all answers in one table comes to the same covariance.
pooled = FactorAnalysis(3, tol=1e-10, max_iter=10000, svd_method="lapack")
pooled.fit(np.concatenate(list(tables.values())))
np.testing.assert_allclose(result.params.covariances()[0], pooled.get_covariance(), atol=1e-4)

# %%
# Loadings are known up to a rotation. Turned towards what the questions were meant for, they show
# the traits, and which questions touch a second one.
turn, _ = orthogonal_procrustes(result.params.loadings[0], target)
found = result.params.loadings[0] @ turn
assert np.abs(found - loadings).max() < 0.25
figure, axes = plt.subplots(1, 2, figsize=(6, 4.5), layout="constrained", sharey=True)
for ax, values, title in zip(axes, (found, loadings), ("found", "true"), strict=True):
    image = ax.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    ax.set_xticks(range(3), traits, rotation=30)
    ax.set_title(title)
axes[0].set(ylabel="question", yticks=range(12), yticklabels=range(1, 13))
figure.colorbar(image, ax=axes, label="loading")
plt.show()
