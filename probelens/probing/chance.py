"""When an accuracy counts as chance: how near it must be to what a guess gets."""

from __future__ import annotations

__all__ = ["slack"]


def slack(baseline: float, margin: float) -> float:
    """How far above its baseline an accuracy still counts as chance.

    Args:
        baseline: What a guess gets.
        margin: The distance asked for.

    Returns:
        The margin, or a quarter of the way to 1 where that is less: next to a baseline of 0.98 or more an
        accuracy of 1 would else be chance.

    Examples:
        >>> slack(0.5, 0.02), round(slack(0.98, 0.02), 3)
        (0.02, 0.005)
    """
    return min(margin, (1 - baseline) / 4)
