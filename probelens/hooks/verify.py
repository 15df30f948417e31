"""``verify``: proof, on the user's own model, that every hook point fires and edits what it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from probelens.errors import InputError, ProbelensError
from probelens.hooks.edits.values import replace
from probelens.hooks.inputs import skipped_embeddings, tokens_of
from probelens.hooks.names import resolve
from probelens.hooks.points import HookPoint
from probelens.hooks.protocol import Wrapped
from probelens.hooks.shorthand import Names
from probelens.numerics.modes import autocasting
from probelens.results.columns import Column
from probelens.results.progress import progress_bar
from probelens.results.rows import Rows
from probelens.tasks.examples import Examples

if TYPE_CHECKING:
    import plotly.graph_objects as go


__all__ = ["VerifyReport", "verify"]

SIZE = "relative to the output's size"


@dataclass(frozen=True, eq=False)
class VerifyReport(Rows):
    """What each hook point did.

    Args:
        rows: One per point; ``columns`` says what each holds.
        model: Name of the model.
        tolerance: Largest change that an identity edit may make, relative to the output's size.
        left_behind: Modules that still carry hooks or another forward afterwards.
    """

    columns = (
        Column("name", str, "Hook point."),
        Column("kind", str, '"boundary", "interior" or "step".'),
        Column("fired", int, "How often a hook there was called in one run.", "times"),
        Column("identity", float | None, "Largest change of the output by an edit that returns its input.", SIZE),
        Column("edit", float | None, "Largest change of the output by random noise.", SIZE),
        Column(
            "restored",
            float | None,
            "Share of another run's output that its activations bring back; None off the residual stream.",
            "fraction of 1",
        ),
        Column("ok", bool, "Whether the point passed."),
        Column("problem", str, "Why it did not, or empty."),
        Column("note", str, "A remark on a point that passed, or empty."),
    )

    rows: list[dict[str, Any]]
    model: str
    tolerance: float
    left_behind: list[str]

    @property
    def ok(self) -> bool:
        """Whether every point passed and nothing was left behind."""
        return not self.left_behind and all(row["ok"] for row in self.rows)

    def failures(self) -> list[dict[str, Any]]:
        """The rows that didn't pass."""
        return [row for row in self.rows if not row["ok"]]

    def plot(self) -> go.Figure:
        """How much noise at each point changes the output."""
        import plotly.express as px

        return px.bar(self.to_dataframe(), x="name", y="edit", color="ok", log_y=True)

    def findings(self) -> list[str]:
        """How many points pass, what is wrong with each of the others, and remarks on those that pass.

        Returns:
            One line each.
        """
        bad = self.failures()
        lines = [f"{self.model}: {len(self.rows) - len(bad)} of {len(self.rows)} hook points pass"]
        lines += [f"  {row['name']}: {row['problem']}" for row in bad]
        lines += [f"  {row['name']} passes: {row['note']}" for row in self.rows if row.get("note")]
        return lines + ([f"  left behind on: {', '.join(self.left_behind)}"] if self.left_behind else [])

    def __str__(self) -> str:
        return "\n".join(self.findings())


def verify(
    model: Wrapped,
    inputs: Any = None,
    names: Names = None,
    *,
    tolerance: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> VerifyReport:
    """Try every hook point; see ``HookedModel.verify``.

    Args:
        model: The wrapped model.
        Those of ``HookedModel.verify``.

    Returns:
        One row a point, and what was left behind.
    """
    x, other = _two_inputs(model, inputs, seed)
    without = skipped_embeddings(model, x, {}) if names is None else set()
    points = resolve(model, names)
    before = left_behind(model.module)
    dtype = model.cfg.dtype
    if tolerance is None:
        tolerance = 1e-5 if dtype in (torch.float32, torch.float64) and not autocasting() else 5e-2
    rows: list[dict[str, Any]] = []
    with torch.no_grad(), model.undisturbed(), progress_bar(len(points), "hook points", progress) as bar:
        native = model(x)
        target = model(other)
        size = native.float().abs().max().item() or 1.0
        gap = (target.float() - native.float()).norm().item()
        for point in points:
            if point.name in without:
                rows.append({**_row(point), "ok": True, "note": "not reached: the inputs are embeddings already"})
            else:
                rows.append(_try(model, point, x, other, native, target, size, gap, tolerance, seed))
            bar.update(1)
    left = [path for path in left_behind(model.module) if path not in before]
    return VerifyReport(rows, model.cfg.model_name, tolerance, left)


def _try(
    model: Wrapped, point: HookPoint, x: Any, other: Any, native: Tensor, target: Tensor,
    size: float, gap: float, tolerance: float, seed: int,
) -> dict[str, Any]:  # fmt: skip
    row = _row(point)
    generator = torch.Generator().manual_seed(seed)

    def same(tensor: Tensor, hook: HookPoint) -> Tensor:
        row["fired"] += 1
        return tensor.clone()

    def noise(tensor: Tensor, hook: HookPoint) -> Tensor:
        real = tensor[torch.isfinite(tensor) & (tensor.abs() < 1e9)]
        scale = real.float().std().item() if real.numel() > 1 else 1.0
        drawn = torch.randn(tensor.shape, generator=generator).to(tensor)
        return tensor + drawn * (scale or 1.0)

    try:
        untouched = model.run_with_hooks(x, [(point.name, same)])
        row["identity"] = (untouched - native).float().abs().max().item() / size
        # Beside the run with the other edit, not the native one: another backend rounds in another way.
        edited = model.run_with_hooks(x, [(point.name, noise)])
        row["edit"] = (edited - untouched).float().abs().max().item() / size
        if gap > 0 and _carries_everything(model, point):
            _, cache = model.run_with_cache(other, point.name)
            source = cache[point.name]
            patched = model.run_with_hooks(x, [(point.name, replace(source))])
            row["restored"] = 1 - (target.float() - patched.float()).norm().item() / gap
    except ProbelensError as err:
        row["problem"] = f"{type(err).__name__}: {err}"
        return row
    if row["identity"] > tolerance:
        row["problem"] = f"an edit that returns its input changes the output by {row['identity']:.2g}"
        return row
    if not row["edit"] > max(10 * min(row["identity"], 1e-5), 1e-7):
        if not _depends(model, point, x):
            row["problem"] = "the hook fired, but noise here doesn't change the output: nothing reads it"
            return row
        row["note"] = (
            f"the hook fired and what follows reads it, but noise as large as the activations changes the output by "
            f"{row['edit']:.1g} of its size, no more than rounding: on these inputs the output hardly depends on it"
        )
    if row["restored"] is not None and abs(row["restored"] - 1) > max(1e-3, 10 * tolerance):
        found = f"patching all of it from another run restores {row['restored']:.3f} of that run, not 1"
        if not _goes_around(model, point, other, source):
            row["problem"] = found
            return row
        # True of the model, not a fault of the hook: the residual is not all that it passes on.
        row["note"] = f"{found}: something goes around this block"
    row["ok"] = True
    return row


def _row(point: HookPoint) -> dict[str, Any]:
    row: dict[str, Any] = {"name": point.name, "kind": point.kind, "fired": 0, "identity": None, "edit": None}
    return {**row, "restored": None, "ok": False, "problem": "", "note": ""}


def _carries_everything(model: Wrapped, point: HookPoint) -> bool:
    """Whether all that the rest of the model sees of the input passes this point."""
    if point.block is None or not point.name.endswith((".hook_resid_pre", ".hook_resid_post")):
        return False
    return not model.adapter.rereads(point.layer() + point.name.endswith("post"))


def _depends(model: Any, point: HookPoint, x: Tensor) -> bool:
    """Whether the output has a gradient at a point: however small its part is, rounding doesn't hide it there."""
    leaves: list[Tensor] = []

    def hook(tensor: Tensor, hook: HookPoint) -> Tensor:
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1]

    with torch.enable_grad():
        out = model.run_with_hooks(x, [(point.name, hook)])
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.device)
        try:
            found = torch.autograd.grad((out.float() * weights).sum(), leaves, allow_unused=True)
        except RuntimeError:  # what has no gradient shows no more than its outputs do
            return False
    return any(bool(grad.any()) for grad in found if grad is not None)


def _goes_around(model: Wrapped, point: HookPoint, x: Any, resid: Tensor) -> bool:
    """Whether what follows reads something else too than the residual at this point."""
    after = point.layer() + point.name.endswith("hook_resid_post")
    if not model.can_skip():
        return False
    entering = model(x, stop_at_layer=after)
    return entering.shape != resid.shape or not torch.equal(entering, resid) or not model.can_start_at(after)


def _two_inputs(model: Wrapped, inputs: Any, seed: int) -> tuple[Any, Any]:
    """The inputs, and others of the same shape."""
    vocab = model.cfg.d_vocab
    if vocab == 1:
        raise InputError(
            "verify() compares runs on different tokens, and a vocabulary of 1 has no others. Try a model of the same "
            "kind with a larger one"
        )
    generator = torch.Generator().manual_seed(seed)
    if inputs is None:
        if not vocab:
            raise InputError("this model takes no tokens, so verify() needs inputs: model.verify(tensor)")
        inputs = torch.randint(vocab, (2, 8), generator=generator)
    if isinstance(inputs, Mapping):
        return inputs, _other_arguments(Examples(inputs), vocab, generator)
    if isinstance(inputs, (str, list)) and model.tokenizer is not None and all(isinstance(t, str) for t in inputs):
        inputs = tokens_of(model.adapter, inputs)[0]
    if not isinstance(inputs, Tensor):
        try:
            inputs = torch.as_tensor(inputs)
        except (TypeError, ValueError, RuntimeError) as err:
            raise InputError(f"verify() needs tokens, features, or text and a tokenizer, got {inputs!r}") from err
    if not inputs.numel():
        raise InputError("verify() needs inputs that aren't empty; without any it makes its own")
    if inputs.is_floating_point():
        return inputs, torch.randn(inputs.shape, generator=generator).to(inputs)
    inputs = inputs[None] if inputs.ndim == 1 else inputs
    if not vocab:  # not known: those of another example
        return inputs, inputs.flip(0) if len(inputs) > 1 else inputs.flip(1)
    shift = torch.randint(1, vocab, inputs.shape, generator=generator).to(inputs.device)
    return inputs, (inputs + shift) % vocab


def _other_arguments(examples: Examples, vocab: int, generator: torch.Generator) -> dict[str, Any]:
    """The same arguments with other tokens and other features; masks and numbers of each example stay."""

    def other(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.dtype == torch.bool or name.endswith("mask"):
            return tensor
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).to(tensor)
        if tensor is examples.main and vocab:
            new = (tensor + torch.randint(1, vocab, tensor.shape, generator=generator).to(tensor)) % vocab
            real = examples.attention_mask
            if real is None or real.shape != tensor.shape:
                return new
            # Padding stays where it is: some models read the last token that is none.
            return tensor.where(~real | torch.isin(new, tensor[~real]), new)
        # Ids of another kind, such as types of tokens: those of another example.
        return tensor.flip(0) if tensor is examples.main else tensor

    return {
        name: other(name, examples.batched[name]) if name in examples.batched else value
        for name, value in examples.inputs.items()
    }


def left_behind(module: nn.Module) -> list[str]:
    """Paths of modules with hooks on them or a forward of their own."""
    return [
        path or "(the model itself)"
        for path, m in module.named_modules()
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or "forward" in m.__dict__
    ]
