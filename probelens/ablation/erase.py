"""``erase``: remove a variable at every layer until no linear probe reads it, and measure the cost.

Removing one probe's directions leaves the variable readable from others. Here the eraser is fitted
on one set of sequences; a fresh probe on other sequences tests whether it worked, and the model's answers
there give the cost, beside random subspaces that remove as much variance.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from probelens.ablation.ablate import MARGIN, ablate
from probelens.ablation.answers import Metric, reader
from probelens.ablation.columns import ABLATION
from probelens.ablation.controls import CONTROLS, Control, check_activations, label_of
from probelens.ablation.given import Given, need_known, strata_given
from probelens.ablation.result import AblationResult
from probelens.errors import InputError
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped, resolve
from probelens.hooks.shorthand import LAYER_AXIS, Names
from probelens.numerics.tensors import class_numbers
from probelens.probing.refit import balanced, chance_margin, guess_accuracy
from probelens.probing.splits import groups_of, real_tokens, split_by_group
from probelens.results.columns import Column
from probelens.results.progress import progress_bar
from probelens.results.rows import Rows
from probelens.results.sentences import count, place, share
from probelens.running.collect import collect
from probelens.running.workers import Executor, takes_executor
from probelens.subspaces.inlp import Inlp, inlp
from probelens.subspaces.leace import ConditionalLeaceFitter, LeaceFitter
from probelens.subspaces.oracle import QuadraticFitter, oracle_of
from probelens.tasks.examples import label_mask, spread_labels, spread_mask

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["ErasureResult", "erase", "require_disjoint"]

Method = Literal["leace", "inlp", "oracle", "quadratic"]


@dataclass(frozen=True, eq=False)
class ErasureResult(Rows):
    """What erasing a variable at each site achieved, and what it cost.

    Args:
        rows: One per site; ``columns`` says what each holds.
        subspaces: What was erased at each site, to use again: an Eraser, an Inlp, an OracleEraser or a QuadraticEraser.
        ablation: The behavioural cost with its controls, row by row.
        method: "leace", "inlp", "oracle" or "quadratic".
        label: The variable.
        margin: At chance means accuracy ≤ baseline + margin; the margin is smaller for a baseline near 1.
        extra: The caller's own notes, saved and loaded with the result.
    """

    columns = (
        *(dataclasses.replace(column, on="") for column in ABLATION),
        Column("method", str, '"leace", "inlp", "oracle" or "quadratic".'),
        Column("n_fit", int, "Sequences that the eraser was fitted on.", "sequences"),
        Column("at_chance", bool, "Whether the fresh linear probe is within ``margin`` of its baseline."),
        Column("reached", str, "The same in words."),
        Column("stopped", str, "Why INLP stopped.", on="sites of INLP"),
        Column(
            "fit_accuracy", float, "Accuracy of the last probe of INLP's own loop.", "fraction of 1", "sites of INLP"
        ),
        Column("fit_baseline", float, "The baseline of that probe.", "fraction of 1", "sites of INLP"),
    )

    rows: list[dict[str, Any]]
    subspaces: dict[str, Any]
    ablation: AblationResult
    method: str
    label: str
    margin: float = MARGIN
    extra: dict[str, Any] = field(default_factory=dict)

    def at_chance(self) -> bool:
        """Whether the fresh linear probe is at chance at every site."""
        return all(row["at_chance"] for row in self.rows)

    def findings(self) -> list[str]:
        """Whether a fresh probe is at chance, and then what the ablation says."""
        far = max(self.rows, key=lambda row: row["refit_accuracy"] - row["baseline"])
        done = sum(row["at_chance"] for row in self.rows)
        ranks = sorted({row["rank"] for row in self.rows})
        said = f"A fresh linear probe is at chance at {share(done, len(self.rows), 'site')}"
        said += "." if done == len(self.rows) else f"; furthest above it at {place(far)}: {far['reached']}."
        return [
            f"{self.label!r} erased by {self.method.upper()}{_given(self.rows[0])}, rank {'–'.join(map(str, dict.fromkeys([ranks[0], ranks[-1]])))}, "
            f"fitted on {count(self.rows[0]['n_fit'], 'sequence')}.",
            said,
            *self.ablation.findings(),
        ]

    def plot(self, title: str | None = None) -> go.Figure:
        """Drop by layer beside its controls, and the refitted probes in a panel below.

        Args:
            title: Shown above the figure.
        """
        from probelens.results import plots

        table = self.ablation.to_dataframe()
        table["condition"] = table["condition"].replace("target", self.method)
        percent = self.ablation.metric == "accuracy"
        return plots.ablation(table, metric=self.ablation.metric, percent=percent, title=title)


@takes_executor
def erase(
    model: HookedModel,
    fit_batch: Any,
    held_batch: Any,
    *,
    label: str | None = None,
    target: str | None = None,
    given: Given = None,
    method: Method = "leace",
    sites: Names = LAYER_AXIS,
    metric: Metric = "accuracy",
    controls: int = 20,
    kinds: Sequence[Control] = CONTROLS,
    margin: float = MARGIN,
    max_rank: int | None = None,
    mlp: bool = True,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
    executor: Executor = None,
) -> ErasureResult:
    """Erase a variable at each site in turn, check that no probe reads it, and measure the cost.

    LEACE is exact on the rows it was fitted on. What is left on new ones shrinks with the width
    divided by the number of *sequences* fitted, since positions of one sequence are much alike: a
    width of 128 wants thousands of them. They are streamed, so memory doesn't grow. INLP removes
    probe rows until its own probe, on held-out sequences of ``fit_batch``, is at chance; on
    correlated activations it may take most of the space, and ``rank`` says so.

    A fresh probe on ``held_batch`` then tests whether the variable is gone, and ``reached`` is its
    answer. A few hundred sequences there are needed to tell a margin of 0.02 from chance.

    Both guard against linear probes only. ``refit_mlp_accuracy`` and ``refit_position_accuracy``
    say what is still there in another form, and then the verdict is "inconclusive".

    A label that the model doesn't use, but that goes with one that it does, costs answers when it is erased, because
    the other one goes with it. ``given="other"`` erases only what the label tells beyond the other: covariances are
    those within strata, the rows of one value of the other label, pooled. The check is conditional too. A fresh probe
    can still read the label through the other one, which stays; so it reads rows in which the other tells as little of
    the label as can be (of two classes in a stratum equally many), and ``baseline`` counts what it does tell. "erased" then
    means: nothing is read beyond what is given. INLP is fitted on such rows, but the rows of its probes that it takes away may
    hold some of the given label: LEACE is the method for this.

    Args:
        model, target, metric, controls, kinds, mlp, batch_size, memory, seed, progress, executor: As for ``ablate``.
        fit_batch: Sequences that erasers are fitted on. tokens (example, pos).
        held_batch: Other sequences: fresh probes are trained and tested on them, split by sequence,
            and the model is measured on all of them.
        label: The variable to erase; needed unless the batch has one label.
        given: A label, or several, that ``label`` goes with and that are to stay; ``association`` and the findings say
            where one is needed.
        method: "leace"; "inlp" (Ravfogel et al. 2020); or with the labels of ``held_batch`` known to the eraser, which then
            moves activations least: "oracle", after which all classes have one mean, and "quadratic" (QLEACE), after which
            they have one covariance too. It moves every direction, so there are no subspaces to compare its cost with.
        sites: Hook points; the layer axis by default.
        margin: Largest distance from its baseline at which a probe is at chance.
        max_rank: Budget of directions for INLP; None for the width.

    Returns:
        Rows by site, the erasers, and the ablation with its controls.

    Raises:
        UnknownHookError: A site that the model doesn't have.
        ShapeError: Batches of different lengths are fine, but a site must give (batch, pos, d).
        InputError: An unknown method or label, ``given`` with "quadratic", a class with no more rows than the width for
            "quadratic", a given label of one value, or with values that ``fit_batch`` lacks, a label that what is given tells wholly,
            one class only, NaN at a site, or more than 5 % of the held-out
            sequences are in ``fit_batch`` too.

    Units:
        Five sites of a 4-layer model of width 128, 2,000 sequences of 40 tokens to fit on, 200 to
        measure on, 20 draws of each control: 11 to 21 s on two cores, 15 to 38 s on one, depending on the
        architecture.

    Source:
        Belrose et al. 2023, arXiv 2306.03819; Ravfogel et al. 2020, arXiv 2004.07667; the question is
        that of arXiv 2606.00926 v2.
    """
    need_wrapped(model)
    if method not in get_args(Method):
        raise InputError(f"method {method!r} is not known. Allowed: {', '.join(map(repr, get_args(Method)))}")
    if method == "quadratic" and given:
        raise InputError(
            f"given={given!r} with method 'quadratic': no quadratic eraser within strata is known. Use 'leace' or 'oracle'."
        )
    label = label_of(fit_batch, label, "label")
    target = label_of(held_batch, label_of(held_batch, label, "label") if target is None else target, "target")
    require_disjoint(fit_batch, held_batch)
    strata = strata_given(fit_batch, given, label)
    need_known(fit_batch, held_batch, given, label)
    names = [point.name for point in resolve(model, sites)]
    if method in ("oracle", "quadratic") and (states := [name for name in names if model.point(name).step]):
        raise InputError(
            f"method {method!r} at {states[0]!r}: this eraser takes the labels of all positions at once, and a recurrent state "
            "is edited step by step. Use 'leace' there."
        )
    if not 0 <= margin < 1:  # also NaN
        raise InputError(f"margin={margin}: an accuracy so far above its baseline counts as chance; give 0 to below 1")
    reader(model, held_batch, metric, target)  # what can't be measured is refused before anything long runs
    spaces: dict[str, Any]
    with _faster_backend(model):
        if method != "inlp":
            spaces = _streamed(model, fit_batch, names, label, method, strata, batch_size, progress)
        else:
            spaces = _inlp(model, fit_batch, names, label, strata, margin, max_rank, batch_size, seed, progress)
        ablation = ablate(
            model, held_batch, spaces, metric, True, controls, label=label, target=target, given=given,
            kinds=kinds, mlp=mlp, margin=margin, batch_size=batch_size, memory=memory, seed=seed, progress=progress,
        )  # fmt: skip
    rows = [_row(row, spaces[row["site"]], method, len(fit_batch), margin) for row in ablation.targets()]
    return ErasureResult(rows, dict(spaces), ablation, method, label, margin)


def _faster_backend(model: HookedModel) -> contextlib.AbstractContextManager[Any]:
    """The reference backend for Mamba on a CPU, where transformers' own forward takes 5 to 20 times as long."""
    slow = model.cfg.device.type == "cpu" and any(name.endswith("mixer.hook_conv") for name in model.hook_dict)
    return model.backend("reference") if slow else contextlib.nullcontext()


def _row(row: dict[str, Any], space: Any, method: str, n_fit: int, margin: float) -> dict[str, Any]:
    over = row["refit_accuracy"] - row["baseline"]
    out = {**row, "method": method, "n_fit": n_fit, "at_chance": over <= chance_margin(row["baseline"], margin)}
    out["reached"] = "chance" if out["at_chance"] else f"{over:.3f} above baseline"
    if isinstance(space, Inlp):
        out.update(stopped=space.stopped, fit_accuracy=space.accuracy, fit_baseline=space.baseline)
    return out


def _given(row: dict[str, Any]) -> str:
    return f" given {row['given']}" if row.get("given") else ""


def _streamed(
    model: HookedModel, batch: Any, names: list[str], label: str, method: Method, strata: Tensor | None,
    batch_size: int, progress: bool,
) -> dict[str, Any]:  # fmt: skip
    new = QuadraticFitter if method == "quadratic" else LeaceFitter if strata is None else ConditionalLeaceFitter
    fitters = {name: new() for name in names}
    numbers = batch.labels[label]
    # Erasers that know the label keep the ids of its classes.
    if not numbers.is_floating_point() and method == "leace":
        numbers, _ = class_numbers(numbers, label_mask(batch.mask, numbers))
    chunks = torch.arange(len(batch)).split(max(batch_size, 1))
    with progress_bar(len(chunks), f"fitting {method}", progress) as bar:
        for rows in chunks:
            part = batch[rows]
            acts = _activations(model, part, names, batch_size)
            for name, fitter in fitters.items():
                n = acts[name].shape[1]
                y, mask = spread_labels(label, numbers[rows], n), spread_mask(part.mask, n)
                if isinstance(fitter, ConditionalLeaceFitter):
                    assert strata is not None
                    fitter.update(acts[name], y, spread_labels("given", strata[rows], n), mask)
                else:
                    fitter.update(acts[name], y, mask)
            bar.update(1)
    return {name: _eraser(fitter, method) for name, fitter in fitters.items()}


def _eraser(fitter: Any, method: Method) -> Any:
    return oracle_of(fitter) if method == "oracle" else fitter.eraser


def _inlp(
    model: HookedModel, batch: Any, names: list[str], label: str, strata: Tensor | None, margin: float,
    max_rank: int | None, batch_size: int, seed: int, progress: bool,
) -> dict[str, Any]:  # fmt: skip
    acts = _activations(model, batch, names, batch_size)
    kept, known = groups_of(batch), batch.labels[label]
    if known.is_floating_point():
        raise InputError(f"method='inlp' is for classes, and label {label!r} holds values. Give method='leace'")
    known, _ = class_numbers(known, label_mask(batch.mask, known))
    out: dict[str, Any] = {}
    with progress_bar(len(names), "running INLP", progress) as bar:
        for name in names:
            n = acts[name].shape[1]
            labels, mask = spread_labels(label, known, n), spread_mask(batch.mask, n)
            within = None if strata is None else spread_labels("given", strata, n)
            mask = mask if within is None else balanced(labels, mask, within, seed)
            groups = kept[:, None].expand(labels.shape)
            # INLP splits in the same way, so this is what can be guessed on its test rows.
            baseline = max(guess_accuracy(labels, mask, split_by_group(kept, seed=seed), within))
            out[name] = inlp(
                acts[name], labels, groups, mask=mask, baseline=baseline, margin=margin, max_rank=max_rank,
                seed=seed, label=f"inlp {label}",
            )  # fmt: skip
            bar.update(1)
    return out


def _activations(model: HookedModel, batch: Any, names: list[str], batch_size: int) -> dict[str, Tensor]:
    found = collect(model, batch, names, batch_size=batch_size).tensors
    for name, x in found.items():
        check_activations(model, name, x, spread_mask(batch.mask, x.shape[1]) if x.ndim > 1 else batch.mask)
    return found


def require_disjoint(fit: Any, held: Any) -> None:
    """Refuse (InputError) batches of which more than one in twenty held-out examples is also among those fitted on."""

    def texts(batch: Any) -> list[Any]:
        if not batch.examples.plain:
            parts = batch.examples.batched or {"": batch.examples.main}
            return [b"".join(x[i].detach().cpu().numpy().tobytes() for x in parts.values()) for i in range(len(batch))]
        real = real_tokens(batch.tokens, batch.mask, batch.attention_mask)
        return [tuple(token for token in row if token >= 0) for row in real.tolist()]

    known = set(texts(fit))
    shared = sum(text in known for text in texts(held))
    if shared > 0.05 * len(held):
        raise InputError(
            f"{shared} of {len(held)} held-out sequences are also among those that were fitted on, so what is measured on them is not "
            "held out. Draw both at once: task.splits({'fit': 2000, 'held': 400})"
        )
