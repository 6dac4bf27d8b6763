"""
Handwritten digits by writer
============================

Thirteen people wrote the digits that come with scikit-learn, one after the other. Each keeps their
own images, and together they find ten shapes. With ``EMFED_DATA`` set to a folder that has
``mnist.npz`` and ``mnist_writers.npz``, the images are MNIST's, of sixty writers.
"""

import os

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score

import emfed
from paper.digits import load_mnist

# %%
# Images of 8 x 8 pixels, and who wrote each. (scikit-learn's come in the order of the writers.)
if os.environ.get("EMFED_DATA"):
    mnist = load_mnist()
    some = mnist.writers < np.unique(mnist.writers)[60]
    pixels = mnist.rows[some].reshape(-1, 28, 28)[:, 2:26, 2:26].reshape(-1, 8, 3, 8, 3)
    images, labels, writers = pixels.mean((2, 4)) / 16, mnist.labels[some], mnist.writers[some]
else:
    images, labels = load_digits().images, load_digits().target
    writers = np.arange(len(images)) * 13 // len(images)
rows = images.reshape(-1, 64)

# %%
# First, principal components without pooling: the opening exchange tells all that they need.
pca = emfed.FederatedFactorAnalysis(20, isotropic=True).fit(rows, groups=writers)
scores = pca.transform(rows)

# %%
# Then a mixture of ten shapes with a common covariance, as in the paper's experiment with MNIST.
# EM on all rows in one table, begun where the writers ended, finds nothing more to gain.
mixture = emfed.FederatedGaussianMixture(10, covariance_type="tied", n_init=3, random_state=0)
found = mixture.fit(scores, groups=writers).predict(scores)
print(mixture.result_)
model = emfed.gaussian_mixture(10, "tied")
pooled = emfed.fit(model, scores, "em", start=mixture.result_.params)
assert pooled.log_likelihood(scores) - mixture.score(scores) < 1e-3
assert adjusted_rand_score(labels, found) > 0.4  # labels had no part in the fit

# %%
# The ten shapes, back in pixels, each with the digit that most of its images are.
shapes = (mixture.means_ @ pca.components_ + pca.mean_).reshape(-1, 8, 8)
_, axes = plt.subplots(2, 5, figsize=(8, 3.8), layout="constrained")
for k, ax in enumerate(axes.flat):
    counts = np.bincount(labels[found == k], minlength=10)
    ax.imshow(shapes[k], cmap="gray_r")
    ax.set_title(f"{counts.argmax()} ({counts.max() / counts.sum():.0%} of {counts.sum()})")
    ax.axis("off")
plt.show()
