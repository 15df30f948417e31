"""``patch_sites``: what "patching position m at the final layer" can mean, every reading measured side by side.

Some readings are vacuous: the last residual at m decides the logits at m, so patching it there restores all
of them, and nothing after m. They are measured all the same, as a check of the model and of the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens.errors import InputError, ShapeError, metric_name
from probelens.hooks.inputs import padding_mask
from probelens.hooks.model import HookedModel
from probelens.hooks.names import need_wrapped
from probelens.patching.final_layer_sites import RUN, SITES, Plan, Site
from probelens.patching.metric import Metric, answered, need_numbers, read_metric
from probelens.patching.pairs import Mode, check_pairs
from probelens.patching.result import GAP, need_answered
from probelens.results.columns import Column
from probelens.results.rows import Rows
from probelens.results.sentences import between, count, fixed, listed
from probelens.running.sweep.conditions import Condition, Read
from probelens.running.sweep.plan import sweep

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["LETTERS", "PatchSitesResult", "patch_sites"]

LETTERS = "ABCDEFGHIJ"
"""The sites, in the order of the table."""

TOLERANCE = 1e-4
_ALIKE = "at m the model answers alike on both runs in every pair, so the answers at T are read there"


@dataclass(frozen=True, eq=False)
class PatchSitesResult(Rows):
    """Recovery at each site, and what it has to be.

    Args:
        rows: One per site; ``columns`` says what each holds.
        values: The metric after each patch, at m or at T as the site is read. NaN where a site
            doesn't apply. (site, example)
        clean: The metric on the clean run, at m and at T. (2, example)
        corrupted: The metric on the corrupted run. (2, example)
        counted: Which pairs count, at m and at T. (2, example)
        pos: The patched position m of each pair. (example,)
        read_pos: The position T. (example,)
        answers_at_pos: [clean answer, corrupted answer] read at m. (example, 2)
        mode: "denoise" or "noise".
        metric: Name of the metric.
        path: How the engine ran: "resume", "skip" or "full"; see ``sweep``.
        extra: What the caller wants to keep with the result; saved and loaded with it.
    """

    columns = (
        Column("site", str, 'Letter of the site, "A" to "J"; "H+conv" is H with the tail of the convolution.'),
        Column("description", str, "What is patched where."),
        Column("read", str, 'Where the answer is read: "m" or "T".'),
        Column("expected", float | None, "1 or 0 where the architecture leaves no choice, otherwise None.", GAP),
        Column("recovery", float | None, "Share of the clean−corrupted gap that the patch moves; not clipped.", GAP),
        Column("lo", float | None, "Lower end of its 95 % interval, over pairs.", GAP),
        Column("hi", float | None, "Upper end of it.", GAP),
        Column("n", int, "Pairs counted.", "pairs"),
        Column("holds", bool | None, "Whether an expected value came out; None where nothing is expected."),
        Column("applicable", bool, "Whether the architecture has the site."),
        Column("why", str | None, "Why there is no recovery, or a remark."),
    )

    rows: list[dict[str, Any]]
    values: Tensor
    clean: Tensor
    corrupted: Tensor
    counted: Tensor
    pos: Tensor
    read_pos: Tensor
    answers_at_pos: Tensor
    mode: str = "denoise"
    metric: str = "logit_diff"
    path: str = "full"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def sites(self) -> list[str]:
        """The sites, those that don't apply included."""
        return [row["site"] for row in self.rows]

    @property
    def ok(self) -> bool:
        """Whether every site that has to be 0 or 1 is, within 1e-4 or what rounding leaves of a small gap."""
        return all(row["holds"] is not False for row in self.rows)

    def row(self, site: str) -> dict[str, Any]:
        """The row of a site.

        Args:
            site: Letter of the site.

        Returns:
            What is in ``rows``.

        Raises:
            InputError: It was not measured.
        """
        if site not in self.sites:
            raise InputError(f"site {site!r} was not measured. Measured: {', '.join(self.sites)}")
        return self.rows[self.sites.index(site)]

    def recovery(self, site: str) -> float:
        """Recovery at a site.

        Args:
            site: Letter of the site.

        Returns:
            1 where the clean answer is restored, 0 where nothing changes; not clipped.

        Raises:
            InputError: It was not measured, or doesn't apply; the message says why.
        """
        row = self.row(site)
        if row["recovery"] is None:
            raise InputError(f"site {site!r} has no recovery: {row['why']}")
        return float(row["recovery"])

    def findings(self) -> list[str]:
        """The sites whose value is forced, and the recovery at each of the others."""
        forced = [row for row in self.rows if row["holds"] is not None]
        wrong = [
            f"{row['site']} is {row['recovery']:.3f}, not {row['expected']:g}" for row in forced if not row["holds"]
        ]
        holds = ", ".join(row["site"] for row in forced)
        free = [row for row in self.rows if row["holds"] is None and row["recovery"] is not None]
        free.sort(key=lambda row: -row["recovery"])
        absent = [row["site"] for row in self.rows if row["recovery"] is None]
        what = "recovers" if self.mode == "denoise" else "removes"
        lines = [
            f"{self.metric} on {count(self.values.shape[-1], 'pair')}, patched at position m, read there or where the pair is read, "
            f"T ({self.mode}). Each letter is a site and where it is read, as the column description says.",
            f"Of the values that the architecture fixes, {listed(wrong)}." if wrong else
            f"The values that the architecture fixes came out as they must ({holds})." if forced else "",
            *(
                f"{row['site']} {what} {fixed(row['recovery'])}{between(row['lo'], row['hi'], fixed)}: {row['description']}"
                for row in free
            ),
            f"Not measured: {listed(absent, 12)}; the column why has the reasons." if absent else "",
        ]  # fmt: skip
        return [line for line in lines if line]

    def plot(self, title: str | None = None) -> go.Figure:
        """Recovery by site with intervals; hollow dots where the value is forced by the architecture.

        Args:
            title: Shown above the figure.
        """
        from probelens.results.plots.patching import sites_figure

        return sites_figure(self.rows, self.mode, title)


def patch_sites(
    model: HookedModel,
    pairs: Any,
    pos: int | Tensor | None = None,
    which: str | Iterable[str] = LETTERS,
    *,
    answers_at_pos: Tensor | None = None,
    mode: Mode = "denoise",
    metric: Metric = "logit_diff",
    correct_only: bool = True,
    n_boot: int = 1000,
    batch_size: int = 64,
    memory: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> PatchSitesResult:
    """Patch position m in every way that "at the final layer" can mean.

    h⁻¹ is the embedding and hˡ the residual after block l of n; T is where a pair is read, m a
    position before it. A: hⁿ⁻¹ at m → m. B: hⁿ⁻¹ at m → T. C: output of the last mixer at m → m.
    D: hⁿ⁻² at m → m. E: hⁿ⁻² at m → T. F: hⁿ⁻¹ at m..T → T. G: hⁿ⁻² at m..T → T. H: recurrent state
    of the last layer after m → T, without and with ("H+conv") what its convolution remembers of
    m and before. I: states and convolution tails of all layers after m → T. J: hˡ of all layers at
    m → T; states change only by what position m itself writes.

    A and F have to be 1, B has to be 0, whatever the model has learned. I has to be 1 for any
    recurrent model, since nothing else reaches later positions. Only the others say something.

    Args:
        model: The wrapped model.
        pairs: PatchPairs. Clean and corrupted must not differ after m, or I says nothing.
        pos: The position m: one for all pairs, or one each (example,); None for halfway between
            the last token in which a pair differs and where it is read.
        which: Letters of the sites to measure.
        answers_at_pos: [clean answer, corrupted answer] at m, for the sites that are read there; a
            task's answers at T are usually not those at m. None for the model's own: what it answers
            at m on the clean and on the corrupted run; pairs in which these agree are left out there,
            and if all agree, the pairs' own answers are read at m. (example, 2)
        correct_only: Count only pairs that both runs answer correctly.
        n_boot: Resamples of pairs for each interval.
        seed: Of the intervals.
        mode, metric, batch_size, memory, progress: As for ``patch``.

    Returns:
        A row for each site, those that the architecture doesn't have included, with the reason.

    Raises:
        InputError: Pairs that aren't token ids read at one position that both sides share, answers that aren't one token
            each, an unknown letter or mode, m outside the span from the last difference to before
            the read position, or a metric or answer that ``patch`` refuses.
        ShapeError: ``pos`` or ``answers_at_pos`` of another shape.
        MetricError: No pair is answered correctly by both runs.

    Units:
        Recovery is a fraction of the clean−corrupted gap, a ratio of means over pairs.

    Source:
        Heimersheim and Nanda 2024, arXiv 2404.15255, for recovery. The sites are the readings of
        "mid-position patching at the final layer" in arXiv 2606.00926.
    """
    need_wrapped(model)
    check_pairs(pairs, mode)
    sites = _chosen(which)
    _need_tokens(pairs)
    m = _positions(pairs, pos)
    plan = Plan(model, m, pairs.read_pos.long())
    into, source = (pairs.corrupted, pairs.clean) if mode == "denoise" else (pairs.clean, pairs.corrupted)
    mask = padding_mask(pairs.mask, model, pairs.clean)
    reasons = {site.name: plan.reason(site.name) for site in sites}
    asked = [site for site in sites if reasons[site.name] is None]

    alike = False
    if answers_at_pos is None:
        own = _own_answers(model, pairs, m, mask, batch_size, memory)
        alike = bool((own[:, 0] == own[:, 1]).all())
        own = pairs.answers.long().cpu() if alike else own
    else:
        own = torch.as_tensor(answers_at_pos).long().cpu()
        if own.shape != (len(pairs), 2):
            raise ShapeError(f"answers_at_pos must be ({len(pairs)}, 2), got {tuple(own.shape)}")
    score = read_metric(metric)

    def fn(logits: Tensor, at_m: Tensor, at_t: Tensor) -> Tensor:
        both = [score(logits[:, i : i + 1], answers) for i, answers in enumerate((at_m, at_t))]
        return torch.stack(both, 1)

    read = Read(fn, torch.stack([m, plan.last], 1), {"at_m": own, "at_t": pairs.answers})
    edits = plan.edits([site.name for site in asked], source, mask, batch_size)
    # A and B, D and E are one run each, read at two positions.
    runs = list(dict.fromkeys(RUN[site.name] for site in asked))
    run = sweep(
        model, into, [Condition((key,), edits[key]) for key in runs], read,
        batch_size=batch_size, memory=memory, attention_mask=mask, progress=progress, describe="sites",
    )  # fmt: skip
    other = sweep(model, source, (), read, batch_size=batch_size, memory=memory, attention_mask=mask).base
    clean, corrupted = (other, run.base) if mode == "denoise" else (run.base, other)
    counted = answered(clean, corrupted)
    counted = counted if correct_only else torch.ones_like(counted)
    clean, corrupted = clean[..., 0], corrupted[..., 0]
    need_numbers(metric, clean[:, 1], corrupted[:, 1])
    counted[:, 0] = (counted[:, 0] | alike) & (own[:, 0] != own[:, 1])
    need_answered(counted[:, 1])
    values = torch.full((len(sites), len(pairs)), float("nan"))
    eps = torch.finfo(model.cfg.dtype).eps
    rows = []
    for i, site in enumerate(sites):
        reason = reasons[site.name]
        row: dict[str, Any] = {
            "site": site.name, "description": site.text, "read": site.read,
            "expected": 1.0 if site.name == "C" and plan.mixer == plan.after else site.expected,
            "recovery": None, "lo": None, "hi": None, "n": 0, "holds": None,
            "applicable": reason is None, "why": plan.remark(site.name) if reason is None else reason,
        }  # fmt: skip
        if reason is None:
            where = 0 if site.read == "m" else 1
            if alike and site.read == "m":
                row["why"] = "; ".join(filter(None, [row["why"], _ALIKE]))
            values[i] = run.values[runs.index(RUN[site.name])][:, where, 0]
            some = counted[:, where]
            parts = (values[i][some], clean[some, where], corrupted[some, where])
            row.update(_measured(row, parts, mode, eps, n_boot, seed))
        rows.append(row)
    return PatchSitesResult(
        rows, values, clean.T.contiguous(), corrupted.T.contiguous(), counted.T.contiguous(),
        m, plan.last, own, mode, metric_name(metric), run.path,
    )  # fmt: skip


def _chosen(which: str | Iterable[str]) -> list[Site]:
    letters = list(which)
    unknown = [letter for letter in letters if letter not in [*LETTERS, "H+conv"]]
    if unknown or not letters:
        raise InputError(f"which={which!r}: give letters of the sites, from {LETTERS!r}")
    return [site for site in SITES if site.name in letters or site.name[0] in letters]


def _need_tokens(pairs: Any) -> None:
    """Refuse (InputError) pairs that have no position between the last difference and the one that is read."""
    what = None
    if not all(side.plain for side in pairs.sides):
        what = f"inputs {pairs.sides[0].describe()}, no token ids (example, pos)"
    elif pairs.read_pos is None:
        what = "no read_pos: the model answers once for each example, at no position"
    elif pairs.read_pos.ndim != 1 or not torch.equal(pairs.mask, pairs.corrupted_mask):
        what = "read positions or masks that differ between the sides"
    elif pairs.noise is not None:
        what = "noise on the embedding, and no token that differs"
    elif not isinstance(pairs.answers, Tensor) or pairs.answers.ndim != 2 or pairs.answers.is_floating_point():
        what = "answers that aren't one token id for each side (example, 2)"
    if what is not None:
        raise InputError(
            f"patch_sites() patches between the last token that differs and the one that is read; these pairs have {what}. "
            "pl.patch takes them, at any position of any site"
        )


def _positions(pairs: Any, pos: int | Tensor | None) -> Tensor:
    """The position m of each pair, checked. (example,)"""
    n, length = pairs.clean.shape
    read = pairs.read_pos.long().cpu()
    differ = (pairs.clean != pairs.corrupted).cpu() & (torch.arange(length) <= read[:, None])
    last = torch.where(differ, torch.arange(length), -1).amax(1)
    if bool((last < 0).any()):
        raise InputError("a pair differs only after the position at which it is read: nothing can be restored")
    if pos is None:
        m = (last + read) // 2
    else:
        m = torch.as_tensor(pos).long().cpu()
        m = m.expand(n).clone() if m.ndim == 0 else m
        if m.shape != (n,):
            raise ShapeError(f"pos must be one position, or ({n},) with one for each pair, got {tuple(m.shape)}")
        m = torch.where(m < 0, m + length, m)
    bad = (m < last) | (m >= read)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise InputError(
            f"m={int(m[i])} for pair {i}: this pair last differs at {int(last[i])} and is read at {int(read[i])}, "
            f"and m must be from {int(last[i])} to {int(read[i]) - 1} ({int(bad.sum())} of {n} pairs don't fit). "
            "Give pos=None for halfway between, or one position a pair."
        )
    return m


def _own_answers(
    model: HookedModel, pairs: Any, m: Tensor, mask: Tensor | None, batch_size: int, memory: int | None
) -> Tensor:
    """What the model answers at m on the clean and on the corrupted run. (example, 2)"""
    read = Read(lambda logits: logits[:, 0].argmax(-1), m[:, None])
    found = [
        sweep(model, tokens, (), read, batch_size=batch_size, memory=memory, attention_mask=mask).base
        for tokens in (pairs.clean, pairs.corrupted)
    ]
    return torch.stack(found, 1)


def _measured(
    row: dict[str, Any], parts: tuple[Tensor, Tensor, Tensor], mode: str, eps: float, n_boot: int, seed: int
) -> dict[str, Any]:
    """Recovery of one site from the metric on the patched, clean and corrupted runs of the pairs that count."""
    from probelens.numerics.stats import ratio_of_means

    patched, clean, corrupted = (x.double() for x in parts)
    gap = clean - corrupted
    if not len(gap) or not float(gap.mean().abs()) > 1e-12:
        return {"n": len(gap), "why": f"no gap at {row['read']}: clean and corrupted runs don't differ there"}
    done = patched - corrupted if mode == "denoise" else clean - patched
    # Adding zero turns −0.0, which reads like a sign, into 0.0.
    out: dict[str, Any] = {"n": len(gap), "recovery": (done.mean() / gap.mean()).item() + 0.0}
    if len(gap) > 1:
        found = ratio_of_means(done[None], gap[None], n_draws=n_boot, seed=seed)
        out.update(lo=found.low.item(), hi=found.high.item())
    if row["expected"] is not None:
        # Of a gap far smaller than the metric itself, rounding leaves few digits.
        size = torch.cat([clean, corrupted]).abs().mean().item()
        rounding = 8 * eps * size / abs(gap.mean().item())
        out["holds"] = abs(out["recovery"] - row["expected"]) <= TOLERANCE + rounding
    return out
