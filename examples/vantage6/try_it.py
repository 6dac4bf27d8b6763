"""Run the algorithm in vantage6's own mock client, and compare it with the fit in one process."""

import os
import tempfile

import emfed_vantage6
import numpy as np
import pandas as pd
from vantage6.algorithm.tools.mock_client import MockAlgorithmClient

import emfed

rng = np.random.default_rng(0)
tables = [
    pd.DataFrame(rng.normal(rng.choice([-4, 4], (120, 1)), 1, (120, 2)), columns=["x", "y"])
    for _ in range(3)
]
model = {"kind": "gaussian-mixture", "n_components": 2, "covariance_type": "full"}
with tempfile.TemporaryDirectory() as folder:
    os.environ["TEMPORARY_FOLDER"] = folder
    nodes = [[{"database": table}] for table in tables]
    client = MockAlgorithmClient(nodes, emfed_vantage6.__name__)
    asked = {"method": "fit", "kwargs": {"model": model, "seed": 0}}
    task = client.task.create(input_=asked, organizations=[0])
    (found,) = client.wait_for_results(task["id"])
here = emfed.fit(emfed.models.make_model(**model), dict(zip("012", tables, strict=True)), seed=0)
np.testing.assert_allclose(found["params"]["means"], here.params.means, rtol=0, atol=1e-6)
assert (found["rounds"], found["bytes_up"]) == (here.rounds, here.bytes_up)
print(f"the same model in {found['rounds']} rounds, {found['bytes_up']} bytes up")
