"""
Air quality at twelve stations
==============================

Twelve stations measure the air, each with gaps of its own, and look for the kinds of air of a year.
With ``EMFED_DATA`` set to a folder that has ``beijing_air_quality.parquet`` (UCI 501) the rows are
those of Beijing in 2015, means of six hours; otherwise they are simulated.
"""

import os

import matplotlib.pyplot as plt
import numpy as np
import polars as pl

import emfed

# %%
# Twelve stations under one sky: season and haze are common, levels and gaps their own. Dust,
# nitrogen dioxide and ozone are on a logarithmic scale.
columns = ["PM2.5", "NO2", "O3", "TEMP", "WSPM"]
if folder := os.environ.get("EMFED_DATA"):
    year = pl.read_parquet(f"{folder}/beijing_air_quality.parquet").filter(pl.col("year") == 2015)
    quarters = year.group_by("station", "month", "day", pl.col("hour") // 6, maintain_order=True)
    frame = quarters.agg(pl.col(columns[:3]).mean().log1p(), pl.col(columns[3:]).mean())
else:
    rng, hour, tables = np.random.default_rng(0), np.arange(0, 8760, 6), []
    haze = np.convolve(rng.normal(size=len(hour) + 15), np.ones(16) / 4, "valid") > 0.5
    season = -np.cos(2 * np.pi * hour / 8760)
    for station in range(12):
        dust, nitrogen = 3 + 1.4 * haze + 0.08 * station, 3.3 + 0.7 * haze - 0.2 * season
        ozone, warmth, wind = 3.7 + 0.9 * season - 0.4 * haze, 13 + 14 * season, 2.5 - haze
        rows = np.stack([dust, nitrogen, ozone, warmth, wind], axis=1)
        rows += rng.normal(size=rows.shape) * [0.4, 0.3, 0.5, 4, 0.5]
        rows[np.convolve(rng.random(len(hour)) < 0.005, np.ones(12), "same") > 0, :3] = np.nan
        named = {"station": pl.lit(f"{station + 1:02}"), "month": 1 + hour // 731}
        tables.append(pl.DataFrame(rows, schema=columns).with_columns(**named))
    frame = pl.concat(tables)

# %%
# A column names the worker of each row. The fit is that of all rows in one table.
rows = frame.select(*columns, "station")
mixture = emfed.FederatedGaussianMixture(4, missing=True).fit(rows, groups="station")
print(mixture.result_)
pooled = emfed.FederatedGaussianMixture(4, missing=True).fit(rows.drop("station"))
assert abs(mixture.score(rows) - pooled.score(rows.drop("station"))) < 1e-3

# %%
# From the cleanest kind of air to the dirtiest: when it comes, and where.
kind = np.argsort(np.argsort(mixture.means_[:, 0]))[mixture.predict(rows)]
_, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained", sharey=True)
for ax, by in zip(axes, ("month", "station"), strict=True):
    names, place = np.unique(frame[by].to_numpy(), return_inverse=True)
    share = np.array([np.bincount(place, kind == k) for k in range(4)]) / np.bincount(place)
    for k, top in enumerate(share.cumsum(axis=0)):
        ax.bar(names, share[k], bottom=top - share[k], color=plt.cm.YlOrBr(0.1 + k / 4))
    ax.tick_params("x", rotation=60)
    ax.set(xlabel=by, ylabel="share of hours, cleanest below")
plt.show()
