"""Random walks between 0 and a top whose law at a position is the same in every longer string.

A walk is a Markov chain with three moves, up, down and stay. Left alone it needs about top² steps to forget that it
started at 0, so that deep states would be rarer in short strings than in long ones. `to_stationary` changes the first
2·top steps, by dynamic programming over the paths, so that the chain has its stationary law exactly from then on.
"""

from __future__ import annotations

import numpy as np

UP, DOWN, STAY = 0, 1, 2
CHANGE = np.array([1, -1, 0], dtype=np.intp)

Kernel = tuple[np.ndarray, np.ndarray]  # probability and target of each move, both (top + 1, 3)


def reflected(top: int, stay: float) -> Kernel:
    """Fair moves; at 0 only up, at the top only down. Stationary law: 1 : 2 : 2 … 2 : 1."""
    probability, target = clipped(top, stay)
    probability[0] = [1 - stay, 0, stay]
    probability[top] = [0, 1 - stay, stay]
    return probability, target


def clipped(top: int, stay: float) -> Kernel:
    """Fair moves; one that would leave [0, top] has no effect. Stationary law: uniform."""
    depth = np.arange(top + 1)
    probability = np.tile([(1 - stay) / 2, (1 - stay) / 2, stay], (top + 1, 1))
    target = np.stack([np.minimum(depth + 1, top), np.maximum(depth - 1, 0), depth], axis=1)
    return probability, target


def to_stationary(kernel: Kernel, law: np.ndarray) -> np.ndarray:
    """Thresholds of the chain from 0 that follows ``law`` after 2·top steps. (top + 1,) -> (2·top + 1, top + 1, 2)

    This is Doob's transform: among all chains with that law at step 2·top, the one closest to the kernel in relative
    entropy. Where the kernel alternates between odd and even depths, the law is restricted to the right parity. The
    last row is for all later steps.
    """
    probability, target = kernel
    steps = 2 * (len(law) - 1)
    matrix = np.zeros((len(law), len(law)))
    np.add.at(matrix, (np.arange(len(law))[:, None], target), probability)
    reached = np.linalg.matrix_power(matrix, steps)[0]
    weight = np.divide(law, reached, out=np.zeros_like(reached), where=reached > 0)
    rows = [plain(kernel)]
    for _ in range(steps):
        rows.append(_thresholds(kernel, weight))
        weight = matrix @ weight
    return np.stack(rows[::-1])


def plain(kernel: Kernel) -> np.ndarray:
    """Thresholds of the kernel itself. (top + 1, 2)"""
    return _thresholds(kernel, np.ones(len(kernel[0])))


def bridge(kernel: Kernel, steps: int) -> np.ndarray:
    """Thresholds of the chain at 0 after ``steps``; row s: the step after which s remain. (steps, top + 1, 2)"""
    probability, target = kernel
    weight = np.eye(len(probability))[0]
    rows = []
    for _ in range(steps):
        rows.append(_thresholds(kernel, weight))
        weight = (probability * weight[target]).sum(1)
    return np.stack(rows) if rows else np.empty((0, len(probability), 2))


def step(u: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """The move that a uniform number picks, given each walker's thresholds. (n,), (n, 2) -> (n,)"""
    return (u >= thresholds[:, 0]).astype(np.int8) + (u >= thresholds[:, 1])


def walk(thresholds: np.ndarray, target: np.ndarray, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Moves of n walkers that start at 0. (length, n) int8"""
    first, second = np.ascontiguousarray(thresholds[:, :, 0]), np.ascontiguousarray(thresholds[:, :, 1])
    u = rng.random((length, n))
    moves = np.empty((length, n), dtype=np.int8)
    depth = np.zeros(n, dtype=np.intp)
    target = np.ascontiguousarray(target, dtype=np.intp).ravel()
    for t in range(length):
        row = min(t, len(thresholds) - 1)
        moves[t] = (u[t] >= first[row].take(depth)).view(np.int8) + (u[t] >= second[row].take(depth)).view(np.int8)
        depth = target.take(depth * 3 + moves[t])
    return moves


def _thresholds(kernel: Kernel, weight: np.ndarray) -> np.ndarray:
    """Cumulative probability of up, and of up or down, when a move counts by the weight of where it leads."""
    probability, target = kernel
    tilted = probability * weight[target]
    total = tilted.sum(1, keepdims=True)
    # Depths from which nothing can be reached are never visited, so any number will do there.
    cumulative = np.divide(tilted, total, out=np.full_like(tilted, 1 / 3), where=total > 0).cumsum(1)[:, :2]
    # A uniform number is below 1, so a move after which nothing is left must have the threshold 1 exactly.
    cumulative[np.isclose(cumulative, 1.0, rtol=0, atol=1e-12)] = 1.0
    return cumulative
