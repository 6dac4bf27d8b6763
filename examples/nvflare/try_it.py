"""Run the recipe in NVFlare's simulator, and compare it with the fit in one process."""

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
from emfed_nvflare import EmfedRecipe
from nvflare.recipe.sim_env import SimEnv

import emfed
from emfed.network.keys import make_site_key

if __name__ == "__main__":
    rng, where = np.random.default_rng(0), Path(tempfile.mkdtemp(prefix="emfed-nvflare-"))
    names, tables = ["oslo", "rome", "york"], {}
    for name in names:
        rows = rng.normal(rng.choice([-4, 4], (120, 1)), 1, (120, 2))
        tables[name] = pl.DataFrame(rows, schema=["x", "y"])
        tables[name].write_csv(where / f"{name}.csv")
        make_site_key(where / "keys", name)
    model = {"kind": "gaussian-mixture", "n_components": 2, "covariance_type": "full"}
    settings = {
        "seed": 0,
        "start": "moments",
        "rounds": 6,
        "tol": 0,
    }  # an exchange takes two seconds
    recipe = EmfedRecipe(
        clients=3,
        model=model,
        data=f"{where}/SITE.csv",
        directory=f"{where}/state-SITE",
        result=f"{where}/fit.emfed",
        keys=f"{where}/keys",
        **settings,
    )
    began = time.monotonic()
    recipe.execute(SimEnv(clients=names, workspace_root=str(where / "workspace")))
    found = emfed.load(where / "fit.emfed")
    here = emfed.fit(emfed.models.make_model(**model), tables, masks=True, **settings)
    np.testing.assert_allclose(found.params.means, here.params.means, rtol=0, atol=1e-6)
    assert (found.rounds, found.bytes_up) == (here.rounds, here.bytes_up)
    print(f"the same masked fit in {found.rounds} rounds, {time.monotonic() - began:.0f} s")
    shutil.rmtree(where)
