"""
A malicious network
===================

Between relay and sites somebody loses messages, repeats them, holds them back and replays old ones.
What is old is refused, and what is lost is said again, so the answer is the undisturbed one.
"""

import matplotlib.pyplot as plt
import numpy as np

import emfed
from emfed.network import LocalSites

# %%
# What becomes of each message: this network harms every third one. (Between machines TLS is in
# front, so bytes that are changed are lost.) Seconds are those of the network's own clock.
rng, old = np.random.default_rng(1), {}
done = dict.fromkeys(["passed", "lost", "repeated", "late", "replayed"], 0)


def malicious(sender, receiver, message):
    before = old.setdefault((sender, receiver), [])
    before.append(message)
    kind = rng.choice(list(done), p=[0.68, 0.08, 0.08, 0.08, 0.08])
    done[kind] += 1
    again = [(0.01, message), (0.01, before[rng.integers(len(before))])]  # any that went this way
    harm = {"lost": [], "repeated": again[:1] * 2, "late": [(8.0, message)], "replayed": again}
    return harm.get(kind, again[:1])


# %%
# The same fit of four masked sites, over a quiet network and over this one. Sites draw masks and
# the seed anew each time, so paths differ a little, and both end at the answer.
draw = np.random.default_rng(0)
tables = {name: draw.normal(draw.choice([-4, 0, 4], (150, 1)), 1, (150, 2)) for name in "abcd"}
model, everything = emfed.gaussian_mixture(3, "full"), np.concatenate([*tables.values()])
quiet = emfed.fit(model, LocalSites(tables))
result = emfed.fit(model, LocalSites(tables, fate=malicious))
best, found = (one.log_likelihood(everything) for one in (quiet, result))
assert abs(best - found) < 1e-5
_, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.bar(list(done), list(done.values()))
left.set_title("messages, and what the network did")
right.semilogy(quiet.records.column("squared_H"), label="quiet")
right.semilogy(result.records.column("squared_H"), "o", label="malicious")
right.set(xlabel="round", title="|H|²: how far from converged")
right.legend()
plt.show()
