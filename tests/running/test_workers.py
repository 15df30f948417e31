"""``executor=``: a call spread over processes gives what one process gives, and a worker that dies loses nothing."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from here import Here

import probelens as pl
from probelens.running import workers
from probelens.running.executors import Dask, Submitit
from probelens.running.sweep.conditions import Read
from probelens.running.sweep.plan import plan
from probelens.running.sweep.spreading import need_memory

N, LENGTH = 12, 10


def made(name: str, seed: int = 0) -> pl.HookedModel:
    return pl.wrap(zoo.build(name, seed))


def here(name: str) -> pl.Workers:
    return pl.Workers(functools.partial(made, name), Here(), workers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a formal model: its workers import no transformers, and so start in a third of the time."""
    config = pl.models.FormalConfig("gru", 50, n_layers=3, d_model=16, hidden_size=16, seed=1)
    return pl.models.save(pl.models.build(config), tmp_path_factory.mktemp("gru") / "model.safetensors")


@pytest.fixture
def model(folder: Path) -> pl.HookedModel:
    return pl.load(folder)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As many as the workers have."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def pairs(vocabulary: int = 50) -> pl.PatchPairs:
    g = torch.Generator().manual_seed(0)
    clean = torch.randint(vocabulary, (N, LENGTH), generator=g)
    corrupted = clean.clone()
    corrupted[:, 3] = (clean[:, 3] + 1 + torch.arange(N) % 7) % vocabulary
    answers = torch.stack([torch.zeros(N, dtype=torch.long), torch.ones(N, dtype=torch.long)], 1)
    return pl.PatchPairs(clean, corrupted, read_pos="last", answers=answers)


def batch() -> pl.Batch:
    tokens = pairs().clean
    return pl.Batch(tokens, {"odd": tokens % 2}, torch.ones(N, LENGTH, dtype=torch.bool))


def subspaces(model: pl.HookedModel) -> dict[str, pl.Subspace]:
    g = torch.Generator().manual_seed(2)
    return {
        f"blocks.{i}.hook_resid_post": pl.Subspace(
            torch.linalg.qr(torch.randn(16, 2, generator=g))[0].T, torch.zeros(16)
        )
        for i in (0, 1)
    }


def dies_once(marker: Path) -> None:
    """Kill the process that comes here first, unless it is the test's own."""
    if os.getpid() != int(marker.read_text()) and not marker.with_suffix(".died").exists():
        marker.with_suffix(".died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def deadly(logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, *, marker: Path, **_: Any) -> torch.Tensor:
    """The probability of the token itself."""
    dies_once(marker)
    return logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]


def deadly_load(folder: Path, marker: Path) -> pl.HookedModel:
    dies_once(marker)
    return pl.load(folder)


def calls(model: pl.HookedModel, tmp_path: Path, metric: Any) -> dict[str, Any]:
    """Every primitive that takes ``executor=``, and what of its result must not change."""
    spaces, some, pair = subspaces(model), batch(), pairs()
    cheap: dict[str, Any] = {"controls": 2, "batch_size": 4}
    return {
        "patch": lambda: pl.patch(model, pair, "resid_post", batch_size=4).values,
        "one batch": lambda: pl.patch(model, pair, "resid_post").values,
        "interchange": lambda: pl.interchange(model, pair, spaces, pos=[3, -1], **cheap).to_dataframe(),
        "ablate": lambda: pl.ablate(model, some, spaces, metric="kl", refit=False, **cheap).to_dataframe(),
        "killed": lambda: pl.ablate(model, some, spaces, metric=metric, refit=False, **cheap).to_dataframe(),
        "erase": lambda: pl.erase(
            model, some, pl.Batch((some.tokens + 1) % 50, some.labels, some.mask), sites=list(spaces), mlp=False, **cheap
        ).to_dataframe(),
        "collect": lambda: pl.collect(model, some, "resid_post", batch_size=4).tensors["blocks.2.hook_resid_post"],
        "streamed": lambda: pl.collect(
            model, some, "resid_post", pos="last", out=tmp_path / "kept", batch_size=4
        ).tensors["blocks.0.hook_resid_post"],
    }  # fmt: skip


def same(got: Any, want: Any, exact: bool = True) -> None:
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want) if exact else torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    else:
        import pandas as pd

        pd.testing.assert_frame_equal(got, want, check_exact=exact, rtol=1e-5, atol=1e-5)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    place = tmp_path / "marker"
    place.write_text(str(os.getpid()))
    return place


@pytest.mark.slow
def test_two_processes_give_what_one_gives(model: pl.HookedModel, tmp_path: Path, marker: Path) -> None:
    """Bit by bit where batches are split; where there is one batch, and conditions are, up to rounding."""
    metric = functools.partial(deadly, marker=marker)
    one = {name: call() for name, call in calls(model, tmp_path / "one", metric).items()}
    with pl.Workers(executor="local", workers=2).open(model):
        assert workers.workers_here(model) == 2
        two = {name: call() for name, call in calls(model, tmp_path / "two", metric).items()}
    assert not workers.workers_here(model)
    assert marker.with_suffix(".died").exists(), "a worker was killed, and replaced"
    for name in one:
        same(two[name], one[name], exact=name != "one batch")


@pytest.mark.slow
@pytest.mark.parametrize("executor", [Dask(), Submitit("local", time=5)], ids=["dask", "submitit"])
def test_a_killed_worker_of_a_cluster_loses_nothing(
    model: pl.HookedModel, folder: Path, marker: Path, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    settings = pl.Workers(functools.partial(deadly_load, folder, marker), executor, workers=2)
    got = pl.collect(model, batch(), "resid_post", batch_size=4, executor=settings)
    assert marker.with_suffix(".died").exists(), "a worker was killed"
    want = pl.collect(model, batch(), "resid_post", batch_size=4)
    assert got.names == want.names
    assert all(torch.equal(got[name], want[name]) for name in want.names)


@pytest.mark.parametrize("name", ["gpt2", "mamba", "lstm", "gru"])
def test_what_is_sent_runs_on_a_worker_s_own_model(name: str) -> None:
    """Conditions hold points and parts of the caller's model, and a worker puts its own in their place."""
    model, settings = made(name), here(name)
    pair = pairs(model.cfg.d_vocab)
    asked: dict[str, Any] = {"sites": "resid_post", "batch_size": 4}
    got = pl.patch(model, pair, **asked, executor=settings)
    assert isinstance(settings.executor, Here)
    assert settings.executor.calls >= 3
    same(got.values, pl.patch(model, pair, **asked).values)


@pytest.mark.parametrize("stdin", [True, False])
def test_processes_run_the_caller_s_script_only_once(stdin: bool, tmp_path: Path) -> None:
    """One that comes from stdin, or that has no guard against being imported, would end them."""
    text = (
        "import os\nfrom probelens.running.executors import Processes\n"
        "pool = Processes(1, main=False)\n"
        "print(pool.submit(os.getpid).result() != os.getpid())\npool.shutdown()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-" if stdin else str(script)], input=text if stdin else None, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n", done.stderr


def test_an_error_in_a_worker_is_the_error_of_the_call(model: pl.HookedModel) -> None:
    def wrong(*_: Any) -> torch.Tensor:
        raise ValueError("a metric of one's own")

    settings = pl.Workers(workers._recipes[model], Here(), workers=2)
    with pytest.raises(ValueError, match="a metric of one's own") as caught:
        pl.patch(model, pairs(), metric=wrong, batch_size=4, executor=settings)
    assert not workers.workers_here(model)
    assert not model.has_hooks()
    assert any(note.startswith("in a worker:") and "in wrong" in note for note in caught.value.__notes__)


def test_what_cannot_be_sent_is_refused(model: pl.HookedModel) -> None:
    lock = threading.Lock()
    for load, metric in ((workers._recipes[model], lambda *_: lock), (lambda: lock, "logit_diff")):
        with pytest.raises(pl.InputError, match="can't be sent to another process"):
            pl.patch(model, pairs(), metric=metric, batch_size=4, executor=pl.Workers(load, Here(), workers=2))


def test_what_workers_could_not_repeat_is_refused(model: pl.HookedModel) -> None:
    wrapped = pl.wrap(model.module)
    with pytest.raises(pl.InputError, match="workers can't make this model"):
        pl.collect(wrapped, batch(), executor="local")
    with pytest.raises(pl.InputError, match="executor=5: it must be None"):
        pl.collect(model, batch(), executor=5)  # type: ignore[arg-type]
    with pytest.raises(pl.InputError, match="executor 'slurm' not found"):
        pl.collect(model, batch(), executor="slurm")
    with pytest.raises(pl.InputError, match="threads share one model"), concurrent.futures.ThreadPoolExecutor() as pool:
        pl.Workers("x", pool, workers=2)
    with pytest.raises(pl.InputError, match=r"Give .*workers="):
        pl.Workers("x", Dask("tcp://10.0.0.1:8786"))
    model.add_hook("hook_embed", lambda tensor, hook: tensor * 2)
    with pytest.raises(pl.InputError, match="has hooks"):
        pl.collect(model, batch(), executor="local")


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (functools.partial(made, "gpt2"), "other hook points than the caller's"),
        (functools.partial(made, "neox", 1), "other weights than the caller's"),
        (lambda: torch.nn.Linear(1, 1), "load gives a Linear"),
    ],
    ids=["architecture", "weights", "not wrapped"],
)
def test_another_model_in_the_workers_is_refused(load: Any, said: str) -> None:
    model = made("neox")
    with pytest.raises(pl.InputError, match=said):
        pl.collect(model, pairs(model.cfg.d_vocab).clean, batch_size=4, executor=pl.Workers(load, Here(), workers=2))


def test_a_plan_says_time_and_memory_and_too_little_memory_is_refused(
    model: pl.HookedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = pl.patch_plan(model, pairs(), "resid_post", batch_size=4)
    said = planned.sweep.cost(2)
    assert said.startswith("about ")
    assert " on 2 workers, " in said
    held = sum(p.numel() * 4 for p in model.module.parameters()) + planned.sweep.bytes
    unit = 1 << 10 if held < 1 << 20 else 1 << 20
    shown = float(said.split(" workers, ")[1].split()[0].replace(",", ""))
    assert shown * unit == pytest.approx(held + sum(b.numel() * 4 for b in model.module.buffers()), rel=0.01)
    monkeypatch.setattr("probelens.running.sweep.spreading.free_memory", lambda: 1000)
    read = Read(lambda logits: logits.flatten(1))
    with pl.Workers(workers._recipes[model], Here(), workers=2).open(model):
        need_memory(plan(model, pairs().clean, [], read)._strategy)  # it may have another machine's memory
        monkeypatch.setattr(pl.Workers, "local", True)
        with pytest.raises(pl.InputError, match="2 workers need about"):
            need_memory(plan(model, pairs().clean, [], read)._strategy)
