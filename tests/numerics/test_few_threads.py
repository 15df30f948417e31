"""The number of threads of long work: measured, said, restored, and never against the user's own choice."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import probelens as pl
from probelens.numerics import threads

OWN = os.cpu_count() or 1


@pytest.fixture(autouse=True)
def as_torch_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch with its own number of threads, and nothing given or measured."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", threads.SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_measured", {})
    torch.set_num_threads(max(OWN, 2))
    monkeypatch.setattr(os, "cpu_count", lambda: max(OWN, 2))
    yield
    torch.set_num_threads(before)


class Clock:
    """Time that passes only while work is done, by the number of threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, one: float, several: float) -> None:
        self.now, self.runs = 0.0, 0
        self.each = {True: one, False: several}
        monkeypatch.setattr(threads, "_work", self.work)

    def work(self) -> None:
        self.runs += 1
        self.now += self.each[torch.get_num_threads() == 1]

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("one", "several", "best"), [(10e-3, 6e-3, 2), (10e-3, 9.5e-3, 1), (10e-3, 70e-3, 1)])
def test_several_threads_are_taken_only_where_they_are_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, one: float, several: float, best: int
) -> None:
    assert threads.quickest(2, clock=Clock(monkeypatch, one, several)) == best
    assert torch.get_num_threads() == max(OWN, 2)


def test_measuring_ends_soon_where_every_round_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.1, 2.0)
    assert threads.quickest(2, clock=clock) == 1
    assert clock.runs == 4


def test_a_call_runs_on_what_was_measured_says_so_once_and_restores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(threads, "quickest", lambda most: asked.append(most) or 1)
    seen: list[int] = []
    before = torch.get_num_threads()

    @threads.few_threads()
    def fails() -> None:
        seen.append(torch.get_num_threads())
        with threads.few_threads():
            seen.append(torch.get_num_threads())
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fails()
        assert torch.get_num_threads() == before
    assert (seen, asked) == ([1] * 4, [before])
    assert capsys.readouterr().err.count("PROBELENS_THREADS=keep") == 1


def test_a_primitive_is_such_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "quickest", lambda most: 1)
    model = pl.wrap(pl.models.build(pl.models.FormalConfig.for_task("gru", pl.tasks.Parity(), n_layers=1, d_model=8)))
    seen: list[int] = []
    model.module.register_forward_pre_hook(lambda *a: seen.append(torch.get_num_threads()))
    pl.collect(model, pl.tasks.Parity().sample(4, length=5).tokens, sites="layers")
    assert set(seen) == {1}


@pytest.mark.parametrize(
    ("name", "value", "inside"),
    [("OMP_NUM_THREADS", "2", None), ("MKL_NUM_THREADS", "2", None), ("PROBELENS_THREADS", "keep", None), ("PROBELENS_THREADS", "3", 3)],
)  # fmt: skip
def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch, name: str, value: str, inside: int | None) -> None:
    monkeypatch.setattr(threads, "quickest", lambda most: pytest.fail("measured"))
    monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    with threads.few_threads():
        assert torch.get_num_threads() == (inside or before)
    assert torch.get_num_threads() == before


def test_a_number_given_to_pytorch_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "quickest", lambda most: pytest.fail("measured"))
    torch.set_num_threads(2 * max(OWN, 2) + 1)
    with threads.few_threads():
        assert torch.get_num_threads() == 2 * max(OWN, 2) + 1


def test_a_number_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBELENS_THREADS", "all")
    with pytest.raises(pl.InputError, match="PROBELENS_THREADS='all'"), threads.few_threads():
        pass
