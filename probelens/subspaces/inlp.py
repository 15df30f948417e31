"""INLP: refit a linear probe and project out what it reads, until it is at chance on held-out sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError
from probelens.numerics.linalg import orthonormal_rows
from probelens.numerics.tensors import flat_rows, tensor_of
from probelens.probing.refit import chance_margin
from probelens.probing.solvers.factor import Factorised
from probelens.probing.solvers.logistic import LogisticFit, fit_path
from probelens.probing.splits import split_by_group
from probelens.subspaces.subspace import Subspace

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["Inlp", "inlp"]

CS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


@dataclass(frozen=True, repr=False)
class Inlp(Subspace):
    """The subspace that INLP removed, and whether it reached chance.

    Args:
        basis: Orthonormal rows in the order of their removal. (rank, d)
        mean: Mean of the training rows. (d,)
        label: Name.
        stopped: Why it ended: "at chance", "max_rank" or "nothing left to remove".
        accuracy: Held-out accuracy of the last refitted probe.
        baseline: Accuracy that it was compared with.
        margin: At chance means accuracy ≤ baseline + margin; the margin is smaller for a baseline near 1.
        history: One row per fit: step, rank removed before it, held-out accuracy, baseline, C, n_iter.
    """

    stopped: str = ""
    accuracy: float = float("nan")
    baseline: float = float("nan")
    margin: float = 0.02
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def at_chance(self) -> bool:
        """Whether the last refitted probe was within ``margin`` of the baseline."""
        return self.stopped == "at chance"

    def to_dataframe(self) -> pd.DataFrame:
        """One row per refitted probe."""
        import pandas as pd

        return pd.DataFrame(self.history).assign(label=self.label, stopped=self.stopped)

    def plot(self) -> go.Figure:
        """Held-out accuracy of the refitted probe against the rank removed."""
        import plotly.express as px

        figure = px.line(self.to_dataframe(), x="rank", y="accuracy", markers=True, title=f"INLP: {self.stopped}")
        figure.add_hline(y=self.baseline, line_dash="dot", annotation_text="baseline")
        return figure


def inlp(
    X: Tensor,
    y: Tensor,
    groups: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    baseline: float | None = None,
    margin: float = 0.02,
    max_rank: int | None = None,
    Cs: float | Sequence[float] = CS,
    tol: float = 1e-4,
    seed: int = 0,
    label: str = "inlp",
) -> Inlp:
    """Remove probe directions, refitting after each, until nothing linear is left to read.

    Sequences are split 60/20/20. Each step fits a multinomial logistic probe on the training rows without the
    directions found so far, scores it on the last fifth, and adds its rows. C is chosen on the second fifth at the
    first step and kept; before the loop may stop at chance, all C are tried again, so that an unsuitable penalty isn't
    taken for an erasure. A probe on activations without Q is a probe whose weights are orthogonal to Q, so no step
    copies the features.

    Args:
        X: Activations. (..., d)
        y: Class ids. (...)
        groups: Sequence of each row, which a split keeps together. Default: the first axis of ``X`` where it has more
            than two, otherwise every row is its own. (...)
        mask: True for the rows to use. (...)
        baseline: Accuracy of a guess. Default: the training majority class, on the held-out rows. Give the position-only
            one where the label depends on the position.
        margin: Largest distance above the baseline that counts as chance; at most a quarter of that from it to 1.
        max_rank: Budget of directions; default: d.
        Cs: Inverse penalties to choose from, or one to use.
        tol: Relative gap in the objective at which a fit stops; a looser one's errors add up over the steps.
        seed: Seeds the split.
        label: Name.

    Returns:
        The removed subspace. ``at_chance`` says whether it was enough; ``accuracy`` is where it ended.

    Raises:
        ShapeError: Labels, groups or mask that don't fit.
        InputError: One class in the training rows, or too few sequences to split.

    Units:
        Memory: two float32 copies of the training rows. Time: O(n d²) and, per step, a few dozen O(n d classes).

    Source:
        Ravfogel et al. 2020, arXiv 2004.07667, algorithm 1.

    Examples:
        >>> gen = torch.Generator().manual_seed(0)
        >>> y = torch.randint(2, (500,), generator=gen)
        >>> X = torch.randn(500, 10, generator=gen) + 2 * y[:, None] * torch.eye(10)[0]
        >>> found = inlp(X, y)
        >>> found.stopped, found.rank < 10
        ('at chance', True)
    """
    rows = _Rows.of(X, y, groups, mask, seed)
    shared, C = Factorised.of(rows.parts["train"][0], standardize=True, dtype=torch.float32), None
    d = shared.d
    budget = d if max_rank is None else max_rank
    if not 0 <= budget <= d:
        raise InputError(f"max_rank must be between 0 and the width {d}, got {max_rank}")
    choices = tuple(sorted(float(C) for C in (Cs if isinstance(Cs, Sequence) else (Cs,))))
    chance = rows.majority() if baseline is None else float(baseline)
    removed = torch.zeros(0, d, dtype=torch.float64, device=shared.x.device)
    history: list[dict[str, Any]] = []
    while True:
        fit = rows.fit(shared, choices if C is None else (C,), tol)
        accuracy = rows.accuracy(fit, "test")
        if accuracy <= chance + chance_margin(chance, margin):
            fit = rows.fit(shared, choices, min(tol, 1e-3))
            accuracy = rows.accuracy(fit, "test")
        C = fit.C
        step = {"step": len(history), "rank": len(removed), "accuracy": accuracy}
        history.append({**step, "baseline": chance, "C": C, "n_iter": fit.n_iter})
        found = _new_directions(fit.softmax()[0], removed)[: budget - len(removed)]
        if accuracy <= chance + chance_margin(chance, margin):
            stopped = "at chance"
        elif len(removed) >= budget:
            stopped = "max_rank"
        elif not len(found):
            stopped = "nothing left to remove"
        else:
            removed = torch.cat([removed, found])
            # Knowing a few removed directions costs a fit less than a factorisation without them.
            many = rows.n_classes * len(removed) ** 2 > 2 * d**2
            shared = shared.project_out(found, refactor=many)
            continue
        return Inlp(removed, shared.mean, label, stopped, accuracy, chance, margin, history)


def _new_directions(weights: Tensor, removed: Tensor) -> Tensor:
    """Orthonormal rows of what the weights read beyond the removed directions."""
    rows = weights - weights.mean(0)
    size = rows.norm()
    for _ in range(2):  # twice, as one pass of Gram-Schmidt leaves rounding behind
        rows = rows - (rows @ removed.mT) @ removed
    return orthonormal_rows(rows) if float(rows.norm()) > 1e-9 * float(size) else rows[:0]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows and class numbers of the three parts."""

    parts: dict[str, tuple[Tensor, Tensor]]
    n_classes: int

    @classmethod
    def of(cls, X: Any, y: Any, groups: Any, mask: Any, seed: int) -> _Rows:
        x = tensor_of("activations", X)
        lead = x.shape[:-1]
        if not lead:
            raise ShapeError(f"activations must be (..., d), got shape {tuple(x.shape)}")
        if groups is None:
            first = torch.arange(lead[0] if len(lead) > 1 else lead.numel())
            groups = first.view(-1, *(1,) * (len(lead) - 1)).expand(lead)
        x, labels, ids = flat_rows(x, y, groups, mask=mask)
        if labels.ndim != 1 or labels.is_floating_point():
            raise InputError("class ids must be integers, one per row")
        classes, labels = labels.to(x.device).unique(return_inverse=True)
        parts = {
            name: (x[rows].float(), labels[rows])
            for name, rows in vars(split_by_group(ids.to(x.device), seed=seed)).items()
        }
        if len(parts["train"][1].unique()) < 2:
            raise InputError("the training rows hold one class only: there is nothing to remove")
        return cls(parts, len(classes))

    def fit(self, shared: Factorised, Cs: tuple[float, ...], tol: float) -> LogisticFit:
        """The probe whose C does best on the validation rows."""
        (path,) = fit_path(shared, self.parts["train"][1], Cs, n_classes=self.n_classes, tol=tol)
        return max(path, key=lambda fit: (self.accuracy(fit, "val"), -fit.C)) if len(path) > 1 else path[0]

    def accuracy(self, fit: LogisticFit, part: str) -> float:
        x, labels = self.parts[part]
        return float((fit.predict(x) == labels).double().mean())

    def majority(self) -> float:
        """Held-out accuracy of always guessing the training majority."""
        guess = self.parts["train"][1].mode().values
        return float((self.parts["test"][1] == guess).double().mean())
