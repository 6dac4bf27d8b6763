"""README's first example, in one process or with the rows at three sites elsewhere.

As it is, all rows are in this process. Put the commented line in the place of the one above it, and
the script waits for three sites (`emfed join`; docs/deployment.md says how to make ``keys`` and
each site's ``roster``). Both come to the same model; between machines sums are masked, which takes
more bytes and hides every site's part.
"""

from sklearn.datasets import load_breast_cancer

from emfed import FederatedGaussianMixture
from emfed.network import listen  # noqa: F401 (for the second line)

patients = load_breast_cancer()
rows = patients.data[:, [20, 21, 24, 27]]  # size, texture, smoothness and dents of cell nuclei
hospital = ["oslo", "bergen", "tromso"] * 189 + ["oslo", "bergen"]  # who holds which row
mixture = FederatedGaussianMixture(2).fit(rows, groups=hospital)
# mixture = FederatedGaussianMixture(2).fit(listen(keys="keys", expected=3, columns=4))
print(mixture.result_)
agree = (mixture.predict(rows) == patients.target).mean()  # which group is called 0 is chance
print(f"found without the diagnosis, agrees with it: {max(agree, 1 - agree):.0%} of patients")
