"""
A site that differs
===================

Six clinics share a model, and one of them treats children. Scores show, without a look at any row,
whom the common model does not serve. That clinic then adapts the model to its own rows, at home:
nothing more is sent.
"""

import matplotlib.pyplot as plt
import numpy as np

import emfed

# %%
# Six measurements in standard units, with something in common. Clinic f has only thirty patients.
rng = np.random.default_rng(0)
child = np.array([-1.3, -1.1, 1.2, -0.9, -0.6, 0.4])


def patients(count, shift=0.0):
    return shift + 0.5 * rng.normal(size=(count, 1)) + 0.85 * rng.normal(size=(count, 6))


tables = {name: patients(200) for name in "abcde"} | {"f": patients(30, child)}
others = patients(3000, child)  # children whom nobody has seen

# %%
# Scores say how well the model serves every clinic: the mean log-likelihood of its rows beside what
# the model expects. They are one clinic's numbers and no sum: here all rows are in one process, and
# between machines each clinic works out its own with the common model, and tells nobody.
model = emfed.gaussian_mixture(1, "full")
result = emfed.fit(model, tables, scores=True)
table = result.workers()
assert dict(zip(table["worker"], table["badly_served"], strict=True)) == {
    name: name == "f" for name in tables
}

# %%
# Clinic f adapts the model to its own rows, at home; the common model counts as five rows. Children
# whom nobody has seen tell that this beats both the common model and one from thirty rows alone.
judged = {
    "common": result.log_likelihood(others),
    "alone": emfed.fit(model, tables["f"]).log_likelihood(others),
    "adapted": result.adapt(tables["f"], worth=5).log_likelihood(others),
}
print(judged)
assert max(judged, key=judged.get) == "adapted"
_, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.bar(table["worker"], np.array(table["expected"]) - np.array(table["log_likelihood"]))
left.set(xlabel="clinic", ylabel="nats below expectation", title="who is not served")
right.plot(list(judged), list(judged.values()), "o", ms=12)
right.set(ylabel="log-likelihood per row (more is better)", title="other children")
right.margins(0.2)
plt.show()
