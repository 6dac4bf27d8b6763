"""
A private run, and what epsilon costs
=====================================

A private run adds noise, so that nobody can tell from all its answers whether any one person was in
the data. How little they tell is epsilon. Noise is the same for few rows and for many: here is what
it costs with 10,000 rows and with 40,000.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.mixture import GaussianMixture

import emfed


# %%
# Three groups of customers at four shops; fresh rows judge every fit. These fits are to be
# repeatable, so their noise has a seed, and they say that they are not private.
def shops(count, seed):
    rng = np.random.default_rng(seed)
    centres = np.array([[0, 0], [6, 3], [-5, 8]])[rng.integers(3, size=count)]
    return rng.normal(centres, 1)


fresh, epsilons, loss = shops(10_000, seed=99), [0.5, 1, 4], {}
for count in (10_000, 40_000):
    rows = shops(count, seed=1)
    plain = GaussianMixture(3, random_state=0).fit(rows).score(fresh)
    for epsilon in epsilons:
        mixture = emfed.FederatedGaussianMixture(3, epsilon=epsilon, delta=1e-6, noise_seed=0)
        mixture.fit(rows, groups=np.arange(count) % 4)
        loss[count, epsilon] = plain - mixture.score(fresh)
print(mixture.result_.privacy["words"])

# %%
# A private fit draws its noise from a key that nobody sees: other noise each time.
private = emfed.FederatedGaussianMixture(3, epsilon=4, delta=1e-6)
private.fit(rows, groups=np.arange(len(rows)) % 4)
print(private.result_.privacy["words"])

# %%
# More privacy costs more, and four times as many rows make it cheap.
print({case: round(value, 4) for case, value in loss.items()})
assert loss[10_000, 0.5] > loss[10_000, 4]
assert loss[10_000, 0.5] > loss[40_000, 0.5]
assert loss[40_000, 4] < 0.01
plt.figure(figsize=(7, 3.5), layout="constrained")
for count in (10_000, 40_000):
    cost = [loss[count, epsilon] for epsilon in epsilons]
    plt.semilogx(epsilons, cost, "o-", label=f"{count:,} rows")
plt.gca().set(xlabel="epsilon", ylabel="log-likelihood lost, nats per row", ylim=(0, None))
plt.xticks(epsilons, epsilons)
plt.minorticks_off()
plt.legend()
plt.show()
