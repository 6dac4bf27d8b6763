from contextlib import contextmanager


@contextmanager
def real_sites(data, folder):
    import pytest

    pytest.skip("processes come with the transport")
    yield None
