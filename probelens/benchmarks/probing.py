# ruff: noqa: RUF001 - × is meant
"""Rows about probes: many labels and penalties, and INLP, against scikit-learn."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

import probelens as pl
from probelens.benchmarks import shapes
from probelens.benchmarks.harness import OURS, Case, Work

SKLEARN = "scikit-learn"
CLASSES = (11, 3, 256)
CS = tuple(10.0**k for k in range(-4, 4))


def probes(size: str, device: str) -> Work:
    from sklearn.linear_model import LogisticRegression

    from probelens.probing.solver import fit_path

    rows, width, layers, classes, Cs = {
        "quick": (2000, 128, 1, (11, 3), CS[::2]),
        "medium": (6000, 384, 1, (11, 3, 64), CS),
        "full": (20000, 768, 12, CLASSES, CS),
    }[size]
    held = rows // 4
    data = [shapes.spectrum(rows + held, width, seed) for seed in range(layers)]
    labels = [[shapes.readable(x, k, 0.5, seed=k) for k in classes] for x in data]

    def ours() -> list[Any]:
        found = []
        for x, ys in zip(data, labels):
            paths = fit_path(
                x[:rows].to(device), [y[:rows].to(device) for y in ys], Cs, n_classes=classes, tol=1e-3
            )
            for path, y in zip(paths, ys):
                right = [
                    float((fit.predict(x[rows:].to(device)).cpu() == y[rows:]).double().mean())
                    for fit in path
                ]
                found += [(fit.coef.cpu(), fit.intercept.cpu(), r) for fit, r in zip(path, right)]
        return found

    def loop() -> list[Any]:
        found = []
        for x, ys in zip(data, labels):
            for y in ys:
                for C in Cs:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        fit = LogisticRegression(C=C, max_iter=2000, tol=1e-4).fit(
                            x[:rows].numpy(), y[:rows].numpy()
                        )
                    right = float(fit.score(x[rows:].numpy(), y[rows:].numpy()))
                    found.append((torch.as_tensor(fit.coef_), torch.as_tensor(fit.intercept_), right))
        return found

    def compare(results: dict[str, Any]) -> dict[str, float]:
        jobs = [(x, y, C) for x, ys in zip(data, labels) for y in ys for C in Cs]
        gap, points = [], []
        for (x, y, C), mine, theirs in zip(jobs, results[OURS], results[SKLEARN]):
            a, b = (objective(x[:rows], y[:rows], C, *r[:2]) for r in (mine, theirs))
            gap.append((a - b) / b)
            points.append(100 * abs(mine[2] - theirs[2]))
        return {
            "objective above scikit-learn's, relative": max(gap),
            "accuracy, points (largest)": max(points),
            "accuracy, points (mean)": float(np.mean(points)),
        }

    return Work(
        {OURS: ours, SKLEARN: loop},
        compare,
        {"objective above scikit-learn's, relative": 1e-3, "accuracy, points (mean)": max(0.2, 101 / held)},
        note=f"{layers} layers × {len(classes)} label sets {classes} × {len(Cs)} C, {rows} × {width}",
    )


def objective(x: Tensor, y: Tensor, C: float, coef: Tensor, intercept: Tensor) -> float:
    """scikit-learn's: C · sum of log-losses + ½‖W‖²."""
    logits = x.double() @ coef.double().T + intercept.double()
    loss = torch.nn.functional.cross_entropy(logits, y, reduction="sum")
    return float(C * loss + 0.5 * coef.double().square().sum())


def inlp(size: str, device: str) -> Work:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    from probelens.probing.splits import split_by_group

    rows, width, rank = {"quick": (3000, 96, 6), "medium": (8000, 384, 16), "full": (20000, 768, 16)}[size]
    x = shapes.spectrum(rows, width)
    y = shapes.readable(x, 2, 1.0)

    def ours() -> list[float]:
        found = pl.subspaces.inlp(x.to(device), y.to(device), max_rank=rank, Cs=1.0)
        return [row["accuracy"] for row in found.history]

    def refits() -> list[float]:
        parts = vars(split_by_group(torch.arange(rows), seed=0))
        scaler = StandardScaler().fit(x[parts["train"]].numpy())
        train, test = (scaler.transform(x[parts[p]].numpy()) for p in ("train", "test"))
        basis = np.zeros((0, width))
        scores = []
        for _ in range(rank + 1):
            a, b = (part - part @ basis.T @ basis for part in (train, test))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit = LogisticRegression(C=1.0, max_iter=2000).fit(a, y[parts["train"]].numpy())
            scores.append(float(fit.score(b, y[parts["test"]].numpy())))
            new = fit.coef_[0] - fit.coef_[0] @ basis.T @ basis
            basis = np.vstack([basis, new / np.linalg.norm(new)])
        return scores

    def compare(results: dict[str, Any]) -> dict[str, float]:
        a, b = results[OURS], results[SKLEARN]
        n = min(len(a), len(b))
        return {
            "accuracy of the first probe": abs(a[0] - b[0]),
            "accuracy after the last common step": abs(a[n - 1] - b[n - 1]),
            "steps fewer than scikit-learn's": len(b) - len(a),
        }

    return Work(
        {OURS: ours, SKLEARN: refits},
        compare,
        {"accuracy of the first probe": 0.01, "accuracy after the last common step": 0.03, "steps fewer than scikit-learn's": 0},
        note=f"{rank} directions, {rows} × {width}, both at C = 1",
    )  # fmt: skip


CASES = [
    Case("probes", "layerwise probes, label sets × C, power-law features", probes, {SKLEARN: 5.0}),
    Case("inlp", "INLP, one direction a step, refitted each time", inlp, {SKLEARN: 8.0}),
]
