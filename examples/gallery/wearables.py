"""
Sleep from wearables at three clinics
=====================================

Three clinics have nights of heart rate and movement from wristbands. A hidden Markov model finds
the stages of sleep and how they follow each other. Here clinics call over sockets of this machine.
"""

import threading
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np

import emfed
from emfed.network import join, listen

# %%
# Nights in steps of five minutes. A tenth of the heart rates is lost when the wristband slips.
rng = np.random.default_rng(0)
chain = np.array([[0.93, 0.07, 0.0], [0.05, 0.91, 0.04], [0.0, 0.25, 0.75]])
stage = np.ones((3, 40, 90), dtype=int)  # 0 deep, 1 light, 2 awake
for step in range(1, 90):
    stage[:, :, step] = (rng.random((3, 40, 1)) > chain.cumsum(1)[stage[:, :, step - 1]]).sum(2)
nights = np.stack([rng.normal(52 + 9 * stage, 3), rng.poisson(4.5**stage)], axis=-1)
nights[rng.random(stage.shape) < 0.1, 0] = np.nan

# %%
# Every clinic joins, and all follow the fit. Nothing but masked sums crosses the sockets.
model, stop, clinics = emfed.hidden_markov(3, ["gaussian", "poisson"]), threading.Event(), []
with TemporaryDirectory() as folder, listen("127.0.0.1:0", columns=2, insecure=True) as sites:
    for name, rows in zip(["rome", "oslo", "york"], nights, strict=True):
        site = (f"127.0.0.1:{sites.port}", rows, f"{folder}/{name}")
        clinics.append(threading.Thread(target=join, args=site, kwargs={"stop": stop}))
        clinics[-1].start()
    sites.wait_for(3, 60)
    result = emfed.fit(model, sites)
    _ = stop.set(), [clinic.join() for clinic in clinics]
print(result)

# %%
# The fit is that of all nights in one place, and the chain is the one that was drawn from.
everything = np.concatenate(nights)
pooled = emfed.fit(model, everything, tol=1e-6)
assert pooled.log_likelihood(everything) - result.log_likelihood(everything) < 1e-3
order = np.argsort(result.model.by_column(result.params)["0"]["mean"])  # by heart rate
np.testing.assert_allclose(result.params.transitions[np.ix_(order, order)], chain, atol=0.05)

# %%
# One night at Rome: what the wristband told, and the stages that follow from it.
found = np.argsort(order)[result.predict(nights[0])]
assert np.mean(found == stage[0]) > 0.9
_, (above, below) = plt.subplots(2, 1, figsize=(8, 4), sharex=True, layout="constrained")
above.plot(np.arange(90) / 12, nights[0, 0], ".-", label=["heart rate", "movements"])
below.step(np.arange(90) / 12, stage[0, 0], lw=5, alpha=0.4, label="true")
below.step(np.arange(90) / 12, found[0], label="found")
below.set(yticks=range(3), yticklabels=["deep", "light", "awake"], xlabel="hours")
_ = above.legend(), below.legend()
plt.show()
