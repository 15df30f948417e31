"""A small MLP probe, which finds information that no linear probe reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from probelens.errors import InputError, ShapeError
from probelens.numerics.modes import differentiable, exact
from probelens.numerics.tensors import class_numbers, tensor_of
from probelens.probing.solvers.factor import as_features

__all__ = ["MLPProbe", "mlp_accuracy"]

Rows = tuple[Tensor, Tensor]


@dataclass(eq=False)
class MLPProbe:
    """An MLP with one hidden layer, trained with AdamW until the validation loss no longer falls.

    Deterministic: everything random comes from ``seed``, and the global random state isn't touched. Features are
    standardised on the training rows.

    Args:
        hidden: Width of the hidden layer.
        lr: Learning rate.
        batch_size: Rows per step.
        max_epochs: Most passes over the training rows.
        patience: Epochs without a lower validation loss after which training stops.
        patience_steps: Steps without one that it takes as well: an epoch of few rows is a few steps, and the loss of a code
            that isn't linear stays flat for the first hundred or more.
        weight_decay: Decoupled weight decay.
        enough: Validation loss in nats at which training stops early; by default it goes on as long as it falls.
        seed: Of the initial weights and the order of the rows.

    Attributes:
        val_loss_: Validation loss in nats at the weights kept.
        n_epochs_: Epochs run.

    Source:
        As the check for non-linear residue after a linear erasure: Ravfogel et al. 2020, arXiv 2004.07667, section 5.

    Examples:
        >>> x = torch.randn(600, 2, generator=torch.Generator().manual_seed(0))
        >>> y = ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long()
        >>> MLPProbe().fit(x[:400], y[:400], x[400:500], y[400:500]).score(x[500:], y[500:]) > 0.9
        True
    """

    hidden: int = 64
    lr: float = 1e-2
    batch_size: int = 128
    max_epochs: int = 100
    patience: int = 5
    patience_steps: int = 250
    weight_decay: float = 1e-3
    enough: float = -math.inf
    seed: int = 0

    @exact
    def fit(self, X: Any, y: Any, X_val: Any, y_val: Any) -> MLPProbe:
        """Train on some rows and stop early by others.

        Args:
            X: Features. (n, d)
            y: Class ids, any integers. (n,)
            X_val: Validation features. (n_val, d)
            y_val: Their class ids. (n_val,)

        Returns:
            The probe itself.

        Raises:
            InputError: One class only, no rows, or NaN.
            ShapeError: Labels or widths that don't fit.
        """
        x, x_val = as_features(X).float(), as_features(X_val).float()
        labels, labels_val = _ids(y, x, "y"), _ids(y_val, x_val, "y_val")
        if x.shape[1] != x_val.shape[1]:
            raise ShapeError(f"X has {x.shape[1]} features and X_val {x_val.shape[1]}; they must agree")
        if len(labels.unique()) < 2:
            raise InputError(f"y has one class only, {int(labels[0])}; a probe needs at least two")
        places, self.classes_ = class_numbers(torch.cat([labels, labels_val]))
        labels, labels_val = places.split([len(labels), len(labels_val)])
        self.mean_ = x.mean(0)
        self.scale_ = x.std(0, correction=0)
        self.scale_ = torch.where(self.scale_ > 1e-12 * (1 + self.mean_.abs()), self.scale_, 1.0)
        with differentiable():
            x, x_val = (x - self.mean_) / self.scale_, (x_val - self.mean_) / self.scale_

            rng = torch.Generator().manual_seed(self.seed)
            weights = [w.to(x.device).requires_grad_() for w in self._initial(x.shape[1], rng)]
            fused = x.device.type in ("cpu", "cuda")  # a step of one call: the weights are few
            optimiser = torch.optim.AdamW(weights, lr=self.lr, weight_decay=self.weight_decay, fused=fused)
            best, kept, waited = math.inf, [w.detach().clone() for w in weights], 0
            patience = max(self.patience, self.patience_steps / math.ceil(len(x) / self.batch_size))
            for epoch in range(self.max_epochs):
                order = torch.randperm(len(x), generator=rng).to(x.device)
                for rows in order.split(self.batch_size):
                    loss = F.cross_entropy(_forward(x[rows], weights), labels[rows])
                    optimiser.zero_grad(set_to_none=True)
                    loss.backward()
                    optimiser.step()
                with torch.no_grad():
                    now = float(F.cross_entropy(_forward(x_val, weights), labels_val))
                self.n_epochs_ = epoch + 1
                if now < best - 1e-4:
                    best, kept, waited = now, [w.detach().clone() for w in weights], 0
                elif (waited := waited + 1) >= patience:
                    break
                if best <= self.enough:
                    break
        self.weights_, self.val_loss_ = kept, best
        return self

    @exact
    def logits(self, X: Any) -> Tensor:
        """Logits of every class.

        Args:
            X: Features. (n, d)

        Returns:
            Logits, float32, a column for each of ``classes_``. (n, class)

        Raises:
            ShapeError: Another width than in ``fit``.
        """
        x = as_features(X).float()
        if x.shape[1] != len(self.mean_):
            raise ShapeError(f"X has {x.shape[1]} features; the probe was fitted on {len(self.mean_)}")
        with torch.no_grad():
            return _forward((x - self.mean_) / self.scale_, self.weights_)

    def predict(self, X: Any) -> Tensor:
        """The most likely class of each row.

        Args:
            X: Features. (n, d)

        Returns:
            Class ids. (n,) int64
        """
        return self.classes_[self.logits(X).argmax(1)]

    def score(self, X: Any, y: Any) -> float:
        """Accuracy on rows that the probe may not have seen.

        Args:
            X: Features. (n, d)
            y: Class ids. (n,)

        Returns:
            Share of the rows that are right, 0 to 1.
        """
        guess = self.predict(X)
        return float((guess == _ids(y, guess, "y")).float().mean())

    def _initial(self, d: int, rng: torch.Generator) -> list[Tensor]:
        hidden = torch.randn(self.hidden, d, generator=rng) * math.sqrt(2 / d)
        k = len(self.classes_)
        out = torch.randn(k, self.hidden, generator=rng) * math.sqrt(1 / self.hidden)
        return [hidden, torch.zeros(self.hidden), out, torch.zeros(k)]


def mlp_accuracy(train: Rows, val: Rows, test: Rows, *, seed: int = 0) -> float:
    """Test accuracy of an MLP probe; each part has features (n, d) and class ids (n,), ``val`` for early stopping."""
    return MLPProbe(seed=seed).fit(*train, *val).score(*test)


def _forward(x: Tensor, weights: list[Tensor]) -> Tensor:
    hidden, bias, out, out_bias = weights
    return F.linear(F.gelu(F.linear(x, hidden, bias)), out, out_bias)


def _ids(y: Any, x: Tensor, name: str) -> Tensor:
    ids = tensor_of(name, y).to(x.device)
    if ids.shape != x.shape[:1]:
        raise ShapeError(f"{name} has shape {tuple(ids.shape)}; it must be ({len(x)},), one per row")
    if ids.is_floating_point():
        raise InputError(f"{name} has dtype {ids.dtype}; class ids must be integers. Use .long().")
    return ids.long()
