"""Encoded sizes of messages from real runs, beside their own entropy.

For every operator, messages are taken from full-pass FedEM runs on the synthetic mixture, on MNIST
(20 principal components, K=10 tied and K=5 full, where ``EMFED_DATA`` has it) and on a generated
mixture with full covariances. "Entropy" is the order-0 empirical entropy of each message's own
symbols; the size includes everything the decoder needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import emfed
from emfed.core.protocols import Compressed
from emfed.core.wire import decode_payload, encode_payload, payload_sizes
from emfed.data.synthetic import START, TRUTH

OPERATORS: dict[str, Any] = {
    "1 level": emfed.Dithering(1),
    "4 levels": emfed.Dithering(4),
    "16 levels": emfed.Dithering(16),
    "subtractive, 0.25": emfed.SubtractiveDithering(0.25),
    "subtractive, 1.0": emfed.SubtractiveDithering(1.0),
    "rand-k (1/4)": emfed.RandomSparsification(0.25, emfed.Identity("float32")),
    "rand-k, 4 levels": emfed.RandomSparsification(0.25, emfed.Dithering(4)),
}


def mnist_rows(rows: int = 70_000) -> np.ndarray | None:
    """The first 20 principal components of MNIST, shuffled; None without the data."""
    path = Path(os.environ.get("EMFED_DATA", "")) / "mnist.npz"
    if "EMFED_DATA" not in os.environ or not path.exists():
        return None
    from sklearn.decomposition import PCA

    images = np.load(path)["images"] / 255.0
    scores = PCA(20, svd_solver="covariance_eigh").fit_transform(images[:, images.any(axis=0)])
    return np.random.default_rng(0).permutation(scores)[:rows]


def even(rows: np.ndarray, workers: int) -> emfed.data.WorkerData:
    size = len(rows) // workers
    return emfed.data.WorkerData(rows[: size * workers], np.arange(0, size * workers + 1, size))


def settings() -> Iterator[tuple[str, Any, emfed.data.WorkerData, int, Any]]:
    """Name, model, data, rounds and start."""
    known = emfed.gaussian_mixture(2, "known", known_covariance=TRUTH.covariances)
    yield "synthetic, q=6", known, emfed.data.synthetic_federation(0), 50, START
    rng = np.random.default_rng(0)
    rows = 3 * rng.normal(size=(4, 6))[rng.integers(4, size=20_000)] + rng.normal(size=(20_000, 6))
    yield "generated full, q=112", emfed.gaussian_mixture(4, "full"), even(rows, 50), 30, None
    digits = mnist_rows()
    if digits is not None:
        yield "MNIST tied, q=210", emfed.gaussian_mixture(10, "tied"), even(digits, 100), 40, None
        full = emfed.gaussian_mixture(5, "full")
        yield "MNIST full, q=1155", full, even(digits[:35_000], 50), 10, None


def collect(model: Any, data: Any, operator: Any, rounds: int, start: Any) -> Any:
    """Messages of a run, with the dither that both ends know."""
    messages: list[Compressed] = []
    dithers: list[Any] = []
    algorithm = emfed.FedEM(operator, step_size=0.5, in_metric=True)
    run = emfed.fitting.open_run(model, data, algorithm, start=start, tol=0)
    q, cls = run.model.layout.size, type(operator)
    compress = cls.compress

    def watch(self: Any, vectors: Any, u: Any) -> Any:
        message = compress(self, vectors, u)
        messages.append(message)
        dithers.append(self.dither(u, q))
        return message

    cls.compress = watch
    try:
        for _ in range(rounds):
            run.step()
    finally:
        cls.compress = compress
    stack = Compressed(
        np.concatenate([m.reals for m in messages]), np.concatenate([m.symbols for m in messages])
    )
    dither = None if dithers[0] is None else np.concatenate(dithers)
    return stack, operator.form(q), dither, q


def entropy_bytes(symbols: np.ndarray) -> np.ndarray:
    """Order-0 empirical entropy of each message."""
    out = np.zeros(len(symbols))
    for i, row in enumerate(symbols):
        _, counts = np.unique(row, return_counts=True)
        out[i] = -(counts * np.log2(counts / len(row))).sum() / 8 if len(row) else 0.0
    return out


def bench_messages(sample: int = 100) -> list[dict[str, Any]]:
    """One row per run and operator; speeds from encoding and decoding a sample."""
    rows = []
    for name, model, data, rounds, start in settings():
        for label, operator in OPERATORS.items():
            stack, form, dither, q = collect(model, data, operator, rounds, start)
            sizes = payload_sizes(stack, form, dither)
            scales = 4.0 * form.reals
            entropy = float(entropy_bytes(stack.symbols).mean())
            picks = np.random.default_rng(0).choice(len(sizes), sample, replace=False)
            encode = decode = 0.0
            for i in picks:
                mine = None if dither is None else dither[i]
                began = time.perf_counter()
                payload = encode_payload(stack.take(i), form, mine)
                middle = time.perf_counter()
                back = decode_payload(payload, form, mine)
                decode += time.perf_counter() - middle
                encode += middle - began
                assert len(payload) == sizes[i]
                assert np.array_equal(back.symbols, stack.symbols[i])
            limit = 1.05 * (entropy + scales) + 4
            rows.append(
                {
                    "run": name,
                    "operator": label,
                    "messages": len(sizes),
                    "entropy": entropy,
                    "scales": scales,
                    "encoded": float(sizes.mean()),
                    "limit": limit,
                    "holds": bool(sizes.mean() <= limit),
                    "raw_float32": 4 * q,
                    "encode_per_second": sample / encode,
                    "decode_per_second": sample / decode,
                    "encode_MB_per_second": 8e-6 * q * sample / encode,
                    "decode_MB_per_second": 8e-6 * q * sample / decode,
                }
            )
    return rows
