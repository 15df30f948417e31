"""Labels that go together: what is erased given another label, and the warning where none was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from probelens.ablation.controls import label_of
from probelens.errors import InputError
from probelens.numerics.association import ASSOCIATED, association, strata_of
from probelens.results.sentences import percent
from probelens.tasks.examples import label_mask, spread_labels, spread_mask

Given = str | Sequence[str] | None


def names_given(given: Given, label: str) -> list[str]:
    """The labels that are given, without repetition; InputError where the label itself is one of them."""
    names = [given] if isinstance(given, str) else list(dict.fromkeys(given or ()))
    if label in names:
        raise InputError(
            f"given={given!r}: {label!r} is what is erased, so it can't be given. Give the labels it goes with."
        )
    return names


def strata_given(batch: Any, given: Given, label: str) -> Tensor | None:
    """Strata of a batch by the labels that are given, (example, pos); None where none is."""
    names = names_given(given, label)
    for name in names:
        values = batch.labels[label_of(batch, name, "given")]
        if values.is_floating_point():
            raise InputError(f"given={name!r} holds numbers, which have no strata. Give it in classes: bin it first.")
        if len(known := values_of(batch, name)) < 2:
            raise InputError(
                f"given={name!r} is {known[0]} wherever labels count, so nothing is given. Leave it out, or give a label that "
                "varies."
            )
    return strata_of(_alike(*(batch.labels[name] for name in names))) if names else None


def values_of(batch: Any, name: str) -> list[int]:
    """The values of a label where labels count."""
    values = batch.labels[name]
    return values[label_mask(batch.mask, values)].unique().tolist()


def need_known(fit: Any, held: Any, given: Given, label: str) -> None:
    """Refuse (InputError) held-out sequences with a value of a given label that the eraser was not fitted on."""
    for name in names_given(given, label):
        if new := sorted(set(values_of(held, name)) - set(values_of(fit, name))):
            raise InputError(
                f"given={name!r} is {new[0]} in held_batch, and never in fit_batch: nothing was erased within that. Fit on "
                "sequences with every value, or leave these out of held_batch."
            )


def goes_with(batch: Any, label: str, target: str, seed: int = 0) -> float | None:
    """The association of a label with the one that the model answers with; None for one and the same, or numbers."""
    ours, theirs = batch.labels[label], batch.labels[target]
    if label == target or ours.is_floating_point() or theirs.is_floating_point():
        return None
    ours, theirs = _alike(ours, theirs)
    if ours.ndim == 1:
        ours, theirs = ours[:, None], theirs[:, None]
        mask = batch.mask.reshape(len(batch), -1).any(1, keepdim=True)
    else:
        mask = spread_mask(batch.mask, ours.shape[1])
    return association(ours, theirs, mask, seed=seed)


def _alike(*labels: Tensor) -> list[Tensor]:
    """Labels of positions and of examples in one shape."""
    wide = [one.shape[1] for one in labels if one.ndim == 2]
    return [spread_labels("given", one, wide[0]) for one in labels] if wide else list(labels)


def warning(row: Mapping[str, Any], label: str, target: str) -> str:
    """A sentence for a label that goes with the target, where it wasn't erased given the target; "" otherwise."""
    found = row.get("association")
    if found is None or found < ASSOCIATED or target in (row.get("given") or "").split(", "):
        return ""
    return (
        f"{label!r} goes with {target!r}, which the model answers with: they share {percent(found)} of the smaller entropy. "
        f"So this cost may be that of removing {target!r}, and says little about {label!r}. "
        f"Erase it given the other: pl.erase(..., label={label!r}, target={target!r}, given={target!r})."
    )
