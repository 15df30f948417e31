"""Activation patching: put activations of one run into another and see what comes back.

Denoising puts clean activations into the corrupted run (sufficiency). Noising puts corrupted ones
into the clean run (necessity). ``attribute`` estimates either to first order.
"""

from __future__ import annotations

from typing import Any

from probelens.hooks.model import HookedModel
from probelens.hooks.shorthand import Names
from probelens.patching.metric import Metric
from probelens.patching.pairs import Heads, Mode, Pos
from probelens.patching.plan import patch_plan
from probelens.patching.result import PatchResult
from probelens.running.workers import Executor, takes_executor

__all__ = ["patch"]


@takes_executor
def patch(
    model: HookedModel,
    pairs: Any,
    sites: Names = "resid_pre",
    pos: Pos = "each",
    mode: Mode = "denoise",
    metric: Metric = "logit_diff",
    *,
    heads: Heads = None,
    joint: bool = False,
    batch_size: int = 64,
    memory: int | None = None,
    progress: bool = False,
    executor: Executor = None,
) -> PatchResult:
    """Patch each site and position, and measure what that does to the answer.

    Args:
        model: The wrapped model; run in eval mode.
        pairs: PatchPairs: clean and corrupted inputs (example, ...), where to read, the answers.
        sites: Where: a shorthand such as "resid_pre", "layers", names, globs, or a list.
        pos: "each" for every position by itself; "last" for the last real one of each side; None for all positions at once;
            an int; a slice or list for each of these; or a tensor with a position for each example (example,), or for each
            side (example, 2) = [clean, corrupted]. Positions are those of the activations. At a
            pattern (``attn.hook_pattern``, ``hook_attn_scores``) it is the position of the query.
        mode: "denoise" puts clean activations into the corrupted run, "noise" the mirror.
        metric: "logit_diff" (clean minus corrupted answer; of sets of tokens by the probability of any, of several tokens
            by their summed log-probability), "prob_diff", "kl" from the clean run's distribution, "value" (the number that
            a regression gives) or "mse" (from the clean answer, a number); or a function of the outputs, which are the
            logits at the read position (batch, d_vocab), and of the answers where there are any (batch, 2).
            ``pl.metrics.with_references`` gives it tensors of its own, cut by pair.
        heads: Patch these heads of each site, one at a time: an index, several, or "each".
        joint: Patch all sites (and heads) together in one run instead of each by itself.
        batch_size: Pairs in one forward pass, at most.
        memory: Bytes that may be held at once, for a sweep that would need too much; None for the usual
            limits. Values stay the same up to rounding. ``patch_plan`` says what is held.
        progress: Show a progress bar.
        executor: Where the runs go: None for this process, or ``pl.Workers``, "local", "dask", "submitit".

    Returns:
        ``values`` (site, pos, example), and ``recovery()`` (site, pos).

    Raises:
        InputError: A metric that the model's outputs or the answers don't fit, an unknown mode or position, heads at a
            site without them, a point without positions and ``pos`` other than None,
            an answer outside the vocabulary, or a memory budget that one pair at one patch exceeds.
        UnknownHookError: A site that the model doesn't have.
        MetricError: A metric that is NaN for every pair, or doesn't take its arguments.

    Source:
        Denoising ρ = (LD_patch − LD_corr)/(LD_clean − LD_corr): Heimersheim and Nanda 2024,
        arXiv 2404.15255; Zhang and Nanda 2024, arXiv 2309.16042.
    """
    planned = patch_plan(
        model, pairs, sites, pos, mode, metric, heads=heads, joint=joint, batch_size=batch_size, memory=memory
    )
    return planned.run(progress)
