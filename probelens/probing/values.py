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

from probelens.errors import InputError, UnknownHookError, nearest
from probelens.numerics.modes import exact
from probelens.numerics.tensors import tensor_of
from probelens.probing.controls import contexts
from probelens.probing.data import Data
from probelens.probing.rows import by_group
from probelens.probing.solvers.factor import Factorised
from probelens.probing.solvers.ridge import ridge_path
from probelens.probing.splits import FRACTIONS, Split, split_by_group
from probelens.results.progress import progress_bar
from probelens.results.result import Result

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
        from probelens.results import plots

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
        groups: What a split must keep together; each sequence by itself if None. Sequences of equal
            tokens are kept together as well. (n,)
        mask: Where values count; ``acts.mask`` if None. (n, pos)
        tokens: For the baseline of the last w tokens; ``acts.tokens`` if None, as in `probe`. (n, pos) or (n, T)
        w: Window of that baseline.
        alphas: Penalties to choose from on validation, for standardised features.
        splits: Shares of train, validation and test, of groups.
        seed: Of the split, when ``seeds`` is None.
        seeds: Several seeds: one split, one set of probes each.
        n_boot: Resamples of test sequences for each interval.
        progress: Show a progress bar.

    Returns:
        R² on the test sequences with 95 % intervals over their groups. 0 is what guessing the mean of
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
    if not isinstance(values, (Tensor, Mapping)) or not isinstance(
        getattr(acts, "tensors", acts), (Tensor, Mapping)
    ):
        kinds = f"{type(acts).__name__} and {type(values).__name__}"
        raise InputError(f"give activations and values as tensors, or dicts of them, got {kinds}")
    named = {"label": values} if isinstance(values, Tensor) else dict(values)
    numbers = {str(k): tensor_of(f"values[{k!r}]", v).double() for k, v in named.items()}
    data = Data.of(acts, numbers, groups, mask, tokens)
    return fit_values(
        data.tensors, data.numbers, data.groups, data.mask, data.tokens, data.at, layers=data.layers, w=w, alphas=alphas,
        splits=splits, seeds=[seed] if seeds is None else list(seeds), n_boot=n_boot, progress=progress,
    )  # fmt: skip


def fit_values(
    sites: Mapping[str, Tensor],
    named: Mapping[str, Tensor],
    groups: Tensor,
    keep: Tensor,
    tokens: Tensor | None,
    at: Tensor | None,
    *,
    w: int,
    splits: Sequence[float],
    seeds: Sequence[int],
    n_boot: int,
    layers: Mapping[str, int] | None = None,
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    progress: bool = False,
) -> ValueProbeResult:
    """As `probe_values`, of arguments that were checked and brought into one shape."""
    out = ValueProbeResult([], {}, {})
    with progress_bar(len(seeds) * len(sites), "probes", progress) as bar:
        for s in seeds:
            split = split_by_group(groups, splits, s)
            beside = {k: _baselines(v.double(), keep, split, tokens, at, w) for k, v in named.items()}
            for site, x in sites.items():
                about = {"site": site, "layer": (layers or {}).get(site), "seed": s}
                _site(out, about, x, named, keep, split, groups, alphas, beside, n_boot)
                bar.update(1)
    return out


def _site(
    out: ValueProbeResult,
    about: dict[str, Any],
    x: Tensor,
    named: Mapping[str, Tensor],
    keep: Tensor,
    split: Split,
    groups: Tensor,
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
        r2, low, high = _r2(
            guess.cpu(), truth[2][:, j].cpu(), keep[split.test], groups[split.test], n_boot, about["seed"]
        )
        row = {
            "site": about["site"], "layer": about["layer"], "label": label, "seed": about["seed"],
            "r2": r2, "lo": low, "hi": high, "alpha": fit.alpha,
            "n_train": len(parts[0]), "n_val": len(parts[1]), "n_test": len(parts[2]), **beside[label],
        }  # fmt: skip
        out.rows.append(row)
        out.coefs[_key(row)] = fit.coef[j].float().cpu()
        out.intercepts[_key(row)] = fit.intercept[j].float().cpu()


def _r2(
    guess: Tensor, truth: Tensor, keep: Tensor, groups: Tensor, n_boot: int, seed: int
) -> tuple[float, float, float]:
    """R² and its interval over groups."""
    from probelens.numerics.stats import ratio_of_means

    def per_sequence(values: Tensor) -> Tensor:
        table = torch.zeros(keep.shape, dtype=torch.float64)
        table[keep] = values
        return table.sum(1)

    wrong, spread = per_sequence((guess - truth).square()), per_sequence((truth - truth.mean()).square())
    if not bool(spread.sum() > 0):
        raise InputError("all test values are equal, so R² is undefined. Give more sequences.")
    wrong, spread, _ = by_group(groups, wrong, spread, keep.double().sum(1))
    found = ratio_of_means(wrong[None], spread[None], n_draws=n_boot, seed=seed)
    return 1 - float(found.estimate), 1 - float(found.high), 1 - float(found.low)


def _baselines(
    values: Tensor, keep: Tensor, split: Split, tokens: Tensor | None, at: Tensor | None, w: int
) -> dict[str, float]:
    """R² of the mean at each position and, with tokens, of the mean after the longest window of the last w that training has."""
    train, test = keep[split.train], keep[split.test]
    y, truth = values[split.train][train], values[split.test][test]
    spread = (truth - truth.mean()).square().sum()
    keys = {"position": [torch.arange(keep.shape[1]).expand(keep.shape)]}
    if tokens is not None:
        windows = [contexts(tokens, n_contexts=1 << 40, w=back)[0] for back in range(1, w + 1)]
        keys["last_w"] = [ids if at is None else ids[:, at] for ids in windows]
    out = {}
    for name, shorter_first in keys.items():
        guess = y.mean().expand(len(truth))
        for ids in shorter_first:
            size = int(ids.max()) + 1
            seen, asked = ids[split.train][train], ids[split.test][test]
            count = torch.bincount(seen, minlength=size).double()
            mean = torch.zeros(size, dtype=torch.float64).index_add_(0, seen, y) / count.clamp(min=1)
            guess = torch.where(count[asked] > 0, mean[asked], guess)
        out[name] = float(1 - (guess - truth).square().sum() / spread)
    return out


def _key(row: Mapping[str, Any]) -> str:
    return f"{row['site']}|{row['label']}|{row['seed']}"
