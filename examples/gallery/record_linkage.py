"""
Weights for record linkage
==========================

Which records of two registers are the same person? Fellegi and Sunter (1969) compare pairs column
by column; agreement says much where matches agree (m) and others seldom do (u). That is a mixture
of two classes over agreement patterns, and EM finds it without a labelled pair, nor a pooled one.
"""

import itertools

import matplotlib.pyplot as plt
import numpy as np

import emfed
from emfed.network import LocalSites

# %%
# The example with which Splink tests itself (``tests/test_correctness_of_convergence.py`` of
# github.com/moj-analytical-services/splink): three columns, 2,000 matches and 2,000 others, with
# the m and u below. The counts of the eight patterns follow, and are those of Splink's own file.
names = ["first name", "date of birth", "postcode"]
m, u = np.array([0.7, 0.9, 0.95]), np.array([0.1, 0.025, 0.2])
patterns = np.array(list(itertools.product([0, 1], repeat=3)))
matches, others = (np.rint(2000 * np.where(patterns, p, 1 - p).prod(axis=1)) for p in (m, u))
assert (matches + others).tolist() == [1407, 408, 63, 522, 163, 172, 67, 1198]
pairs = np.repeat(patterns, (matches + others).astype(int), axis=0).astype(float)

# %%
# Three bodies hold the pairs. They fit a mixture of two classes, over sites that mask their sums.
np.random.default_rng(0).shuffle(pairs)
tables = dict(zip(["health", "tax", "schools"], np.split(pairs, [1500, 3000]), strict=True))
model = emfed.mixed_mixture(2, [emfed.models.Categorical(2)] * 3)
result = emfed.fit(model, LocalSites(tables), tol=1e-9)
print(result)

# %%
# Splink asks its own estimates to be within 0.01 of m and u, and the probability that a pair
# matches within 1% of the true one. The federated fit holds the same.
by_column = result.model.by_column(result.params).values()
agree = np.array([column["probabilities"][:, 1] for column in by_column])  # column x class
match = int(agree.sum(axis=0).argmax())
found_m, found_u = agree[:, match], agree[:, 1 - match]
np.testing.assert_allclose(found_m, m, atol=0.01)
np.testing.assert_allclose(found_u, u, atol=0.01)
found = result.predict_proba(patterns.astype(float))[:, match]
np.testing.assert_allclose(found, matches / (matches + others), rtol=0.01)

# %%
# The weights, as Splink draws them: what agreement and disagreement add to the log odds of a match.
plt.figure(figsize=(7, 3), layout="constrained")
plt.barh(names, np.log2(found_m / found_u), 0.6, label="agrees")
plt.barh(names, np.log2((1 - found_m) / (1 - found_u)), 0.6, label="disagrees")
published = np.log2([m / u, (1 - m) / (1 - u)]).ravel()
plt.plot(published, names * 2, "k|", ms=20, label="Splink's example")
plt.xlabel("match weight, bits")
plt.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
plt.show()
