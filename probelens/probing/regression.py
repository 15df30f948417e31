"""``probe_values``: how much of a number can be read linearly at each site.

The protocol of `probe` for numeric labels: split by sequence, ridge on standardised features, the penalty
chosen on validation, tested once, beside what position and the last tokens tell without any activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probelens._modes import exact
from probelens.errors import InputError, ShapeError, UnknownHookError, nearest
from probelens.probing.controls import contexts
from probelens.probing.factor import Factorised
from probelens.probing.ridge import ridge_path
from probelens.probing.splits import FRACTIONS, Split, split_by_group
from probelens.progress import progress_bar
from probelens.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["DEFAULT_ALPHAS", "ValueProbeResult", "probe_values"]

DEFAULT_ALPHAS = tuple(10.0**k for k in range(-2, 6))


@dataclass(frozen=True, eq=False)
class ValueProbeResult(Result):
    """How well numbers can be read linearly at each site.

    Args:
        rows: One a site, label and seed: site, layer, label, seed, r2, lo, hi, alpha, n_train, n_val,
            n_test, position (R² of the mean at each position) and, with tokens, last_w (of the mean after
            each window of tokens).
        coefs: Direction of each probe in the space of the activations. (d,)
        intercepts: ()
    """

    rows: list[dict[str, Any]]
    coefs: dict[str, Tensor]
    intercepts: dict[str, Tensor]

    def r2(self, site: str, label: str = "label", seed: int | None = None) -> float:
        """R² on the test sequences.

        Args:
            site: Hook point.
            label: Label.
            seed: Seed; None for the first.

        Returns:
            At most 1; below 0 where the mean of the test rows would do better.

        Raises:
            UnknownHookError: No such site.
            InputError: No such label or seed.
        """
        return float(self._row(site, label, seed)["r2"])

    def coef(self, site: str, label: str = "label", seed: int | None = None) -> Tensor:
        """Direction of a probe in the space of the activations.

        Args:
            site: Hook point.
            label: Label.
            seed: Seed; None for the first.

        Returns:
            The direction. (d,)
        """
        return self.coefs[_key(self._row(site, label, seed))]

    def intercept(self, site: str, label: str = "label", seed: int | None = None) -> Tensor:
        """Intercept that belongs to `coef`.

        Args:
            site: Hook point.
            label: Label.
            seed: Seed; None for the first.

        Returns:
            In the label's unit. ()
        """
        return self.intercepts[_key(self._row(site, label, seed))]

    def _row(self, site: str, label: str, seed: int | None) -> dict[str, Any]:
        sites = list(dict.fromkeys(row["site"] for row in self.rows))
        if site not in sites:
            raise UnknownHookError(
                f"site {site!r} was not probed. Nearest: {nearest(site, sites) or sites[:5]}"
            )
        found = [
            r for r in self.rows if (r["site"], r["label"]) == (site, label) and seed in (None, r["seed"])
        ]
        if not found:
            kinds = sorted({(r["label"], r["seed"]) for r in self.rows})
            raise InputError(f"no probe of label {label!r}, seed {seed!r}. There are (label, seed): {kinds}")
        return found[0]

    def to_dataframe(self) -> pd.DataFrame:
        """One row a site, label and seed."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def plot(self, title: str | None = None) -> go.Figure:
        """R² by layer with intervals and baselines; one panel a label, the first seed.

        Args:
            title: Shown above the figure.

        Returns:
            A line chart.
        """
        from probelens import plots

        table = self.to_dataframe()
        table = table[table["seed"] == table["seed"].iloc[0]]
        facet = "label" if table["label"].nunique() > 1 else None
        return plots.layer_profile(table, y="r2", y_label="R²", percent=False, facet=facet, title=title)


@exact
def probe_values(
    acts: Any,
    values: Tensor | Mapping[str, Tensor],
    groups: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    tokens: Tensor | None = None,
    w: int = 4,
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    splits: Sequence[float] = FRACTIONS,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    n_boot: int = 1000,
    progress: bool = False,
) -> ValueProbeResult:
    """Fit ridge probes at every site for every numeric label.

    Args:
        acts: Activations, a dict of tensors by site, or one tensor. each (n, pos, d) or (n, d)
        values: Numbers, one tensor or a dict by label. each (n, pos) or (n,)
        groups: What a split must keep together; each sequence by itself if None. (n,)
        mask: Where values count; ``acts.mask`` if None. (n, pos)
        tokens: For the baseline of the last w tokens. (n, pos)
        w: Window of that baseline.
        alphas: Penalties to choose from on validation, for standardised features.
        splits: Shares of train, validation and test, of groups.
        seed: Of the split, when ``seeds`` is None.
        seeds: Several seeds: one split, one set of probes each.
        n_boot: Resamples of test sequences for each interval.
        progress: Show a progress bar.

    Returns:
        R² on the test sequences with 95 % intervals over these sequences. 0 is what guessing the mean of
        the test labels gets; a probe that learned nothing general can fall below it.

    Raises:
        ShapeError: Values, mask, tokens or groups that don't fit the activations.
        InputError: NaN, a mask that is False everywhere, constant values, or too few sequences.

    Source:
        Hoerl and Kennard 1970 (ridge); the protocol is that of `probe`.

    Examples:
        >>> x = torch.randn(60, 5, 8, generator=torch.Generator().manual_seed(0))
        >>> probe_values(x, 2 * x[..., 3] + 1).r2("activations") > 0.99
        True
    """
    layers = dict(getattr(acts, "layers", {}))
    mask = getattr(acts, "mask", None) if mask is None else mask
    if not isinstance(values, (Tensor, Mapping)) or not isinstance(
        getattr(acts, "tensors", acts), (Tensor, Mapping)
    ):
        kinds = f"{type(acts).__name__} and {type(values).__name__}"
        raise InputError(f"give activations and values as tensors, or dicts of them, got {kinds}")
    sites = {"activations": acts} if isinstance(acts, Tensor) else dict(getattr(acts, "tensors", acts))
    named = {"label": values} if isinstance(values, Tensor) else {str(k): v for k, v in values.items()}
    if not sites or not named:
        raise InputError(f"{len(sites)} sites and {len(named)} labels: give at least one of each")
    if any(x.ndim not in (2, 3) for x in sites.values()):
        raise ShapeError(
            f"activations must be (n, d) or (n, pos, d), got {[tuple(x.shape) for x in sites.values()]}"
        )
    flat = all(x.ndim == 2 for x in sites.values())
    shape = tuple(next(iter(sites.values())).shape[: 1 if flat else 2])
    keep = torch.ones(shape, dtype=torch.bool) if mask is None else mask.bool().cpu()
    groups = torch.arange(shape[0]) if groups is None else groups.cpu()
    for name, found, wanted in [
        *((f"acts[{k!r}]", tuple(x.shape[: len(shape)]), shape) for k, x in sites.items()),
        *((f"values[{k!r}]", tuple(v.shape), shape) for k, v in named.items()),
        *([("tokens", tuple(tokens.shape), shape)] if tokens is not None else []),
        ("mask", tuple(keep.shape), shape),
        ("groups", tuple(groups.shape), shape[:1]),
    ]:
        if found != wanted:
            raise ShapeError(f"{name} has shape {found}; it must be {wanted}, as the activations say")
    if flat:
        keep = keep[:, None]
        sites = {k: x[:, None] for k, x in sites.items()}
        named = {k: v[:, None] for k, v in named.items()}
        tokens = None if tokens is None else tokens[:, None]
    if not bool(keep.any()):
        raise InputError("the mask is False everywhere: no value counts")
    for k, v in named.items():
        kept = v.cpu()[keep].double()
        if not bool(torch.isfinite(kept).all()):
            raise InputError(
                f"values[{k!r}] has NaN or infinity where the mask is True; mask these positions"
            )
        if bool((kept == kept[0]).all()):
            raise InputError(f"values[{k!r}] is {float(kept[0])} everywhere: there is nothing to probe")
    chosen = [seed] if seeds is None else list(seeds)
    out = ValueProbeResult([], {}, {})
    with progress_bar(len(chosen) * len(sites), "probes", progress) as bar:
        for s in chosen:
            split = split_by_group(groups, splits, s)
            beside = {k: _baselines(v.cpu().double(), keep, split, tokens, w) for k, v in named.items()}
            for site, x in sites.items():
                about = {"site": site, "layer": layers.get(site), "seed": s}
                _site(out, about, x, named, keep, split, alphas, beside, n_boot)
                bar.update(1)
    return out


def _site(
    out: ValueProbeResult,
    about: dict[str, Any],
    x: Tensor,
    named: Mapping[str, Tensor],
    keep: Tensor,
    split: Split,
    alphas: Sequence[float],
    beside: Mapping[str, dict[str, float]],
    n_boot: int,
) -> None:
    """Probes of every label at one site: one factorisation serves them all."""
    x = x.detach()
    on = keep.to(x.device)
    parts = [x[i.to(x.device)][on[i.to(x.device)]] for i in (split.train, split.val, split.test)]
    shared = Factorised.of(parts[0], standardize=True, precise=True)
    truth = [
        torch.stack([v.cpu()[i][keep[i]].double() for v in named.values()], 1).to(x.device)
        for i in (split.train, split.val, split.test)
    ]
    fits = ridge_path(shared, truth[0], alphas)
    errors = torch.stack([(fit.predict(parts[1].double()) - truth[1]).square().mean(0) for fit in fits])
    best = errors.argmin(0).tolist()
    for j, label in enumerate(named):
        fit = fits[best[j]]
        guess = fit.predict(parts[2].double())[:, j]
        r2, low, high = _r2(guess.cpu(), truth[2][:, j].cpu(), keep[split.test], n_boot, about["seed"])
        row = {
            "site": about["site"], "layer": about["layer"], "label": label, "seed": about["seed"],
            "r2": r2, "lo": low, "hi": high, "alpha": fit.alpha,
            "n_train": len(parts[0]), "n_val": len(parts[1]), "n_test": len(parts[2]), **beside[label],
        }  # fmt: skip
        out.rows.append(row)
        out.coefs[_key(row)] = fit.coef[j].float().cpu()
        out.intercepts[_key(row)] = fit.intercept[j].float().cpu()


def _r2(guess: Tensor, truth: Tensor, keep: Tensor, n_boot: int, seed: int) -> tuple[float, float, float]:
    """R² and its interval over sequences."""
    from probelens.stats import ratio_of_means

    def per_sequence(error: Tensor) -> Tensor:
        table = torch.zeros(keep.shape, dtype=torch.float64)
        table[keep] = error
        return table.sum(1)[keep.any(1)]

    wrong, spread = per_sequence((guess - truth).square()), per_sequence((truth - truth.mean()).square())
    if not bool(spread.sum() > 0):
        raise InputError("all test values are equal, so R² is undefined. Give more sequences.")
    found = ratio_of_means(wrong[None], spread[None], n_draws=n_boot, seed=seed)
    return 1 - float(found.estimate), 1 - float(found.high), 1 - float(found.low)


def _baselines(values: Tensor, keep: Tensor, split: Split, tokens: Tensor | None, w: int) -> dict[str, float]:
    """R² of the mean at each position and, with tokens, of the mean after each window of the last w."""
    keys = {"position": torch.arange(keep.shape[1]).expand(keep.shape)}
    if tokens is not None:
        keys["last_w"] = contexts(tokens.cpu(), n_contexts=1 << 40, w=w)[0]
    train, test = keep[split.train], keep[split.test]
    y, truth = values[split.train][train], values[split.test][test]
    spread = (truth - truth.mean()).square().sum()
    out = {}
    for name, key in keys.items():
        size = int(key.max()) + 1
        at = key[split.train][train]
        total = torch.zeros(size, dtype=torch.float64).index_add_(0, at, y)
        count = torch.bincount(at, minlength=size).double()
        mean = torch.where(count > 0, total / count.clamp(min=1), y.mean())
        out[name] = float(1 - (mean[key[split.test][test]] - truth).square().sum() / spread)
    return out


def _key(row: Mapping[str, Any]) -> str:
    return f"{row['site']}|{row['label']}|{row['seed']}"
