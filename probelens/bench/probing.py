"""Rows about probes: many labels and penalties, and INLP, against scikit-learn."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

import probelens as pl
from probelens.bench import shapes
from probelens.bench.harness import OURS, Work
from probelens.bench.rows import SKLEARN

GAP = 1e-3  # of the objective: where both stop
TOLERANCES = (1e-4, 1e-5, 1e-6, 1e-7)
CS = tuple(10.0**k for k in range(-4, 4))


def probes(size: str, device: str) -> Work:
    from sklearn.linear_model import LogisticRegression

    from probelens.probing.solvers.logistic import fit_path

    rows, width, layers, classes, Cs = {
        "quick": (2000, 128, 1, (11, 3), CS[::2]),
        "medium": (6000, 384, 1, (11, 3, 64), CS),
        "full": (20000, 768, 12, (11, 3, 256), CS),
    }[size]
    held = rows
    # Layers are fitted one after the other, each in its own time, so a few stand for all.
    run = min(layers, 2)
    data = [shapes.spectrum(rows + held, width, seed) for seed in range(run)]
    labels = [[shapes.readable(x, k, 0.5, seed=k) for k in classes] for x in data]
    # scikit-learn fits the first layer; its tolerance for each fit is found on the run that is compared.
    jobs = [(data[0], y, C) for y in labels[0] for C in Cs]
    tolerances: list[float] = []

    def ours() -> list[Any]:
        found = []
        for x, ys in zip(data, labels):
            paths = fit_path(x[:rows].to(device), [y[:rows].to(device) for y in ys], Cs, n_classes=classes, tol=GAP)
            for path, y in zip(paths, ys):
                right = [float((fit.predict(x[rows:].to(device)).cpu() == y[rows:]).double().mean()) for fit in path]
                found += [(fit.coef.cpu(), fit.intercept.cpu(), r) for fit, r in zip(path, right)]
        return found

    def refit(x: Tensor, y: Tensor, C: float, tol: float) -> tuple[Tensor, Tensor, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = LogisticRegression(C=C, max_iter=5000, tol=tol).fit(x[:rows].numpy(), y[:rows].numpy())
        right = float(fit.score(x[rows:].numpy(), y[rows:].numpy()))
        return torch.as_tensor(fit.coef_), torch.as_tensor(fit.intercept_), right

    def least(x: Tensor, y: Tensor, C: float, k: int) -> float:
        ((fit,),) = fit_path(x[:rows], y[:rows], C, n_classes=k, tol=1e-8)
        return objective(x[:rows], y[:rows], C, fit.coef, fit.intercept)

    def loop() -> list[Any]:
        if tolerances:
            return [refit(*job, tol) for job, tol in zip(jobs, tolerances)]
        found = []
        for (x, y, C), low in zip(jobs, minima):
            for tol in TOLERANCES:
                fit = refit(x, y, C, tol)
                if gap(x, y, C, fit, low) <= GAP:
                    break
            tolerances.append(tol)
            found.append(fit)
        return found

    def gap(x: Tensor, y: Tensor, C: float, found: tuple[Tensor, Tensor, float], low: float) -> float:
        return objective(x[:rows], y[:rows], C, *found[:2]) / low - 1

    minima = [least(*job, k) for job, k in zip(jobs, [k for k in classes for _ in Cs])]

    def compare(results: dict[str, Any]) -> dict[str, float]:
        both = list(zip(results[OURS], results[SKLEARN]))
        points = [100 * abs(mine[2] - theirs[2]) for mine, theirs in both]
        mine, theirs = (max(gap(*job, fit[i], low) for job, low, fit in zip(jobs, minima, both)) for i in (0, 1))
        return {
            "objective above its minimum, relative": mine,
            "scikit-learn's above it": theirs,
            "accuracy, points (largest)": max(points),
            "accuracy, points (mean)": float(np.mean(points)),
        }

    def describe(results: dict[str, Any]) -> dict[str, float | str]:
        counts = ", ".join(f"{tol:g} for {n}" for tol in TOLERANCES if (n := tolerances.count(tol)))
        return {f"scikit-learn's tol, the loosest that comes within {GAP:g} of the minimum": f"{counts} of its fits"}

    note = f"{layers} layers × {len(classes)} label sets {classes} × {len(Cs)} C, {rows} × {width}, both within {GAP:g} of the minimum"
    if layers > 1:
        note += f"; probelens fits {run} of the {layers} layers, scikit-learn 1, scaled up"
    return Work(
        {OURS: ours, SKLEARN: loop},
        compare,
        {"objective above its minimum, relative": GAP, "scikit-learn's above it": GAP, "accuracy, points (mean)": max(0.2, 101 / held)},
        {OURS: run / layers, SKLEARN: 1 / layers},
        note,
        describe=describe,
    )  # fmt: skip


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

    def ours() -> list[dict[str, Any]]:
        return pl.subspaces.inlp(x.to(device), y.to(device), max_rank=rank, Cs=1.0).history

    def refits() -> list[float]:
        parts = vars(split_by_group(torch.arange(rows), seed=0))
        scaler = StandardScaler().fit(x[parts["train"]].numpy())
        train, test = (scaler.transform(x[parts[p]].numpy()) for p in ("train", "test"))
        basis = np.zeros((0, width), dtype=train.dtype)
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

    def passes(results: dict[str, Any]) -> float:
        # The gradient at the start is the same at every step.
        return 1.0 + 2 * sum(row["n_iter"] for row in results[OURS])

    def least(results: dict[str, Any]) -> tuple[float, float, str]:
        trained = len(split_by_group(torch.arange(rows), seed=0).train)
        half = trained * width**2 / 1e9  # the Gram matrix is symmetric
        read = passes(results) * trained * width * 4 / 1e9
        return half, read, "the Gram matrix once, and the features read in each product"

    def compare(results: dict[str, Any]) -> dict[str, float]:
        a, b = [row["accuracy"] for row in results[OURS]], results[SKLEARN]
        n = min(len(a), len(b))
        return {
            "accuracy of the first probe": abs(a[0] - b[0]),
            "accuracy after the last common step": abs(a[n - 1] - b[n - 1]),
            "steps fewer than scikit-learn's": len(b) - len(a),
        }

    return Work(
        {OURS: ours, SKLEARN: refits},
        compare,
        {"accuracy of the first probe": 0.01, "accuracy after the last common step": max(0.01, 60 / rows), "steps fewer than scikit-learn's": 0},
        note=f"{rank} directions, {rows} × {width}, both at C = 1",
        describe=lambda results: {"products with the features": passes(results), "fits": float(len(results[OURS]))},
        least=least,
    )  # fmt: skip
