"""README's first example, in one process or with the rows at three sites elsewhere.

As it is, all rows are in this process. Put the commented line in the place of the one above it, and
the script waits for three sites (`emfed join`; docs/deployment.md says how to make ``keys`` and
each site's ``roster``). Both come to the same model; between machines sums are masked, which takes
more bytes and hides every site's part.
"""

from sklearn.datasets import load_iris

from emfed import FederatedGaussianMixture
from emfed.network import RemoteFederation, listen  # noqa: F401 (for the second line)

iris = load_iris(as_frame=True).frame.sample(frac=1, random_state=0)
hospital = ["north", "south", "west"] * 50
mixture = FederatedGaussianMixture("1:4").fit(iris.iloc[:, :4], groups=hospital)
# mixture = FederatedGaussianMixture("1:4").fit(RemoteFederation(listen(keys="keys", expected=3)))
print(mixture.n_components_, mixture.bytes_, mixture.predict(iris.iloc[:, :4])[:10])
