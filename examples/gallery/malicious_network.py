"""
A malicious network
===================

Between server and sites somebody loses messages, repeats them, changes bytes and replays old ones.
What is damaged or old is refused and asked for again, so the answer is the undisturbed one.
"""

import matplotlib.pyplot as plt
import numpy as np

import emfed
from emfed.network import LocalTransport, RemoteFederation, Transport


# %%
# A transport carries bytes. This one harms every third message. (Between machines TLS is in front.)
class Malicious(Transport):
    between_machines = True

    def __init__(self, inner):
        self.inner, self.rng, self.old = inner, np.random.default_rng(1), {}
        self.done = dict.fromkeys(["passed", "lost", "repeated", "changed", "replayed"], 0)

    def workers(self):
        return self.inner.workers()

    def harmed(self, message, way):
        old = self.old[way] = [*self.old.get(way, []), message]
        kind = self.rng.choice(list(self.done), p=[0.68, 0.08, 0.08, 0.08, 0.08])
        self.done[kind], at = self.done[kind] + 1, self.rng.integers(len(message))
        changed = message[:at] + bytes([message[at] ^ 255]) + message[at + 1 :]
        replayed = [message, old[self.rng.integers(len(old))]]  # any that ever went this way
        harm = {"lost": [], "repeated": [message] * 2, "changed": [changed], "replayed": replayed}
        return harm.get(kind, [message])

    def deliver(self, messages, deadline):
        for site, message in messages.items():
            for request in self.harmed(message, f"to {site}"):
                for _, answer in self.inner.deliver({site: request}, deadline):
                    yield from ((site, a) for a in self.harmed(answer, f"from {site}"))


# %%
# The same fit of four masked sites, over a quiet network and over this one. All statistics agree.
rng = np.random.default_rng(0)
tables = {name: rng.normal(rng.choice([-4, 0, 4], (150, 1)), 1, (150, 2)) for name in "abcd"}
model, network = emfed.gaussian_mixture(3, "full"), Malicious(LocalTransport.of(tables))
quiet = emfed.fit(model, RemoteFederation(LocalTransport.of(tables)))
result = emfed.fit(model, RemoteFederation(network, attempts=100, pause=0))
np.testing.assert_allclose(result.statistics, quiet.statistics, rtol=0, atol=1e-9)
_, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.bar(list(network.done), list(network.done.values()))
left.set_title("messages, and what the network did")
right.semilogy(quiet.records.column("squared_H"), label="quiet")
right.semilogy(result.records.column("squared_H"), "o", label="malicious")
right.set(xlabel="round", title="|H|²: how far from converged")
right.legend()
plt.show()
