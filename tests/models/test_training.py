"""Training learns, repeats itself bit for bit, survives every kill, and refuses what it can't continue."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from probelens.errors import InputError, ShapeError, StoreError
from probelens.models import FormalConfig, build, config_of, load
from probelens.models.evaluation import label_slices
from probelens.models.training import EvalResult, TrainConfig, TrainResult, evaluate, train
from probelens.tasks import Dyck, Parity

TINY = {"n_layers": 1, "d_model": 8, "hidden_size": 8}
SHORT = TrainConfig(
    steps=30,
    decay_steps=5,
    batch_size=8,
    length=6,
    start_length=3,
    grow_at=0.3,
    eval_every=4,
    eval_sequences=16,
    warmup=5,
    lr=1e-2,
    target_accuracy=None,
    checkpoint_every=7,
)


def tiny(arch: str = "gru", task: Parity | Dyck | None = None, **options: object) -> nn.Module:
    return build(FormalConfig.for_task(arch, task or Parity(), **{**TINY, **options}))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def steps_of(result: TrainResult) -> dict[str, object]:
    """Everything but the clocks."""
    return {**dataclasses.asdict(result), "seconds": 0, "cpu_seconds": 0}


class Recorder(Parity):
    """Parity that remembers what was drawn from it, and can fail on purpose."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.fail_at, self.error = fail_at, error
        self.drawn: list[Tensor] = []

    @property
    def config(self) -> dict[str, object]:
        return Parity().config

    def sample(self, n: int, length: int = 40, seed: int = 0, **kw: object):
        batch = super().sample(n, length, seed, **kw)
        if n == SHORT.batch_size:
            if len(self.drawn) == self.fail_at:
                raise self.error
            self.drawn.append(batch.tokens)
        return batch


class Oracle(nn.Module):
    """Knows the parity up to a position, and says 0 from there on."""

    def __init__(self, until: int = 10**9, bos: bool = False) -> None:
        super().__init__()
        self.until, self.bos = until, bos
        self.embedding = nn.Embedding(3, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        bits = torch.where(tokens < 2, tokens, 0)
        state = bits.cumsum(1) % 2
        t = torch.arange(tokens.shape[1]) + 1 - int(self.bos)
        return F.one_hot(torch.where(t <= self.until, state, 0), 3).float()


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[dict[str, Tensor], TrainResult]:
    model = tiny()
    result = train(model, Parity(), config=SHORT, progress=False)
    return weights(model), result


# It learns


def test_a_small_gru_learns_parity_and_the_untrained_one_does_not_know_it() -> None:
    task = Parity()
    model = build(FormalConfig.for_task("gru", task, n_layers=1, d_model=16, hidden_size=24, embedding_std=1.0))
    before = evaluate(model, task, (6, 12), trained_length=6, late=4).accuracy(6)
    config = TrainConfig(
        steps=600, batch_size=32, lr=1e-2, length=6, start_length=2, eval_every=20, decay_steps=20, warmup=10
    )
    result = train(model, task, config=config, progress=False)
    after = evaluate(model, task, (6, 12), trained_length=6, late=4)
    assert before < 0.7
    assert result.reached
    assert result.accuracy > 0.95
    assert result.steps < 600
    assert after.accuracy(6) > 0.95
    assert after.accuracy(6, "late") > 0.95
    assert not model.training


def test_training_stops_decay_steps_after_the_target_and_the_rate_falls_to_nothing(uninterrupted) -> None:
    config = dataclasses.replace(SHORT, target_accuracy=0.01, decay_steps=6)
    result = train(tiny(), Parity(), config=config, progress=False)
    assert result.reached
    assert result.steps == 4 + 6  # the first evaluation, then the decay
    rows = {row["step"]: row for row in result.history}
    assert [row["phase"] for row in rows.values()] == ["warmup", "decay", "decay"]
    assert rows[10]["lr"] == pytest.approx(1e-2 / 7)
    control = uninterrupted[1]
    assert not control.reached
    assert control.steps == 30


def test_the_rate_rises_stays_and_falls() -> None:
    config = dataclasses.replace(SHORT, eval_every=1, steps=12, warmup=4, decay_steps=3)
    rates = [row["lr"] / config.lr for row in train(tiny(), Parity(), config=config, progress=False).history]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_the_curriculum_grows_after_good_batches_only_and_ends_at_the_full_length() -> None:
    task = Recorder()
    train(tiny(), task, config=dataclasses.replace(SHORT, grow_at=0.0), progress=False)
    lengths = [tokens.shape[1] for tokens in task.drawn]
    assert lengths == [3, 5] + [6] * 28
    never, none = Recorder(), Recorder()
    train(tiny(), never, config=dataclasses.replace(SHORT, grow_at=1.0), progress=False)
    train(tiny(), none, config=dataclasses.replace(SHORT, start_length=None), progress=False)
    assert {tokens.shape[1] for tokens in never.drawn} == {3}
    assert {tokens.shape[1] for tokens in none.drawn} == {6}


def test_one_step_is_the_textbook_step() -> None:
    # The same update by hand: cross-entropy at every position, clipping, AdamW at the warmed-up rate.
    config = dataclasses.replace(SHORT, steps=1, decay_steps=0, start_length=None, clip=0.01, warmup=4)
    task, model, ours = Recorder(), tiny(), tiny()
    train(ours, task, config=config, progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 / 4, betas=(0.9, 0.98), weight_decay=0.01)
    tokens = task.drawn[0]
    F.cross_entropy(model(tokens).flatten(0, 1), task.labels(tokens)["state"].flatten()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    assert norm > 0.01
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, atol=1e-6, rtol=1e-5)


# It repeats itself


def test_equal_seeds_repeat_and_another_data_seed_does_not(uninterrupted) -> None:
    again, other = tiny(), tiny()
    torch.manual_seed(123)  # must not matter
    result = train(again, Parity(), config=SHORT, progress=False)
    train(other, Parity(), config=dataclasses.replace(SHORT, seed=1), progress=False)
    assert equal(weights(again), uninterrupted[0])
    assert steps_of(result) == steps_of(uninterrupted[1])
    assert not equal(weights(other), uninterrupted[0])


def test_the_global_random_state_is_untouched() -> None:
    def states() -> tuple[bytes, str, str]:
        numpy_state = str(np.random.get_state())  # noqa: NPY002  the global state is what is asked about
        return torch.get_rng_state().numpy().tobytes(), numpy_state, str(random.getstate())

    before = states()
    model = tiny()
    train(model, Parity(), config=SHORT, progress=False)
    evaluate(model, Parity(), (6,), n=8)
    assert states() == before


def test_no_two_steps_see_the_same_batch() -> None:
    task = Recorder()
    train(tiny(), task, config=dataclasses.replace(SHORT, length=20, start_length=None), progress=False)
    rows = torch.cat(task.drawn)
    assert len(rows) == 30 * 8
    assert len(rows.unique(dim=0)) == len(rows)


# It goes on where it was stopped


@pytest.mark.parametrize("arch", ["lstm", "transformer", "mamba"])
def test_an_interrupted_run_goes_on_to_the_same_weights(arch: str, tmp_path: Path) -> None:
    options = {"n_layers": 2, "d_model": 16, "n_heads": 2, "hidden_size": 16, "d_state": 4}
    whole = tiny(arch, **options)
    expected = train(whole, Parity(), config=SHORT, progress=False)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(arch, **options), Recorder(11), config=SHORT, checkpoint_dir=tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["train.safetensors"]
    second = Recorder()
    model = tiny(arch, seed=0, **options)
    result = train(model, second, config=SHORT, checkpoint_dir=tmp_path, progress=False)
    assert len(second.drawn) == 30 - 11  # the interrupt lost no step
    assert equal(weights(model), weights(whole))
    assert steps_of(result) == steps_of(expected)
    assert equal(weights(load(tmp_path)), weights(whole))


def test_ctrl_c_ends_the_step_saves_and_gives_the_signal_back(tmp_path: Path, uninterrupted) -> None:
    seen = []

    def press(row: dict[str, object]) -> None:
        seen.append(row["step"])
        if row["step"] == 9:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), Parity(), config=SHORT, checkpoint_dir=tmp_path, progress=press)
    assert signal.getsignal(signal.SIGINT) is handler
    assert seen[-1] == 9
    task, model = Recorder(), tiny()
    train(model, task, config=SHORT, checkpoint_dir=tmp_path, progress=False)
    assert len(task.drawn) == 30 - 9
    assert equal(weights(model), uninterrupted[0])


def test_an_error_of_the_task_leaves_the_last_checkpoint(tmp_path: Path, uninterrupted) -> None:
    with pytest.raises(ZeroDivisionError):
        train(tiny(), Recorder(11, ZeroDivisionError), config=SHORT, checkpoint_dir=tmp_path, progress=False)
    task, model = Recorder(), tiny()
    train(model, task, config=SHORT, checkpoint_dir=tmp_path, progress=False)
    assert len(task.drawn) == 30 - 7  # checkpoint_every=7
    assert equal(weights(model), uninterrupted[0])


# The scenarios of one process that kills itself, run in children so that the parent lives to resume.
KILLED = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    import torch
    torch.set_num_threads(1)
    from test_training import SHORT, Parity, tiny, train

    die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def child(folder, progress=False, patch=None):
        pid = os.fork()
        if pid == 0:
            if patch:
                patch()
            train(tiny(), Parity(), config=SHORT, checkpoint_dir=folder, progress=progress)
            os._exit(3)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status

    def before_replacing(which):
        def patch():
            real, count = os.replace, [0]
            def replace(*args):
                count[0] += 1
                die() if count[0] == which else real(*args)
            os.replace = replace
        return patch

    child(sys.argv[2] + "/step", progress=lambda row: die() if row["step"] == 17 else None)
    child(sys.argv[2] + "/first_save", patch=before_replacing(1))
    child(sys.argv[2] + "/third_save", patch=before_replacing(3))
    child(sys.argv[2] + "/last_save", patch=before_replacing(5))
    child(sys.argv[2] + "/model", patch=before_replacing(6))
    """
)


def test_sigkill_at_any_moment_costs_steps_but_not_the_result(tmp_path: Path, uninterrupted) -> None:
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", KILLED, here, str(tmp_path)], check=True, timeout=240)
    left = {"step": 30 - 14, "first_save": 30, "third_save": 30 - 14, "last_save": 30 - 28, "model": 0}
    for name, steps in left.items():
        task, model, folder = Recorder(), tiny(), tmp_path / name
        assert not (folder / "model.safetensors").exists()
        result = train(model, task, config=SHORT, checkpoint_dir=folder, progress=False)
        assert len(task.drawn) == steps
        assert equal(weights(model), uninterrupted[0])
        assert steps_of(result) == steps_of(uninterrupted[1])
        assert equal(weights(load(folder)), uninterrupted[0])


def test_a_finished_run_returns_at_once_with_its_weights(tmp_path: Path, uninterrupted) -> None:
    train(tiny(), Parity(), config=SHORT, checkpoint_dir=tmp_path, progress=False)
    before = contents(tmp_path)
    task, model = Recorder(0), tiny()
    result = train(model, task, config=SHORT, checkpoint_dir=tmp_path, progress=False)
    assert equal(weights(model), uninterrupted[0])
    assert steps_of(result) == steps_of(uninterrupted[1])
    assert result.seconds > 0
    assert contents(tmp_path).keys() == before.keys() == {"train.safetensors", "model.safetensors"}


def test_resume_false_starts_over(tmp_path: Path, uninterrupted) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), Recorder(11), config=SHORT, checkpoint_dir=tmp_path, progress=False)
    task, model = Recorder(), tiny()
    train(model, task, config=SHORT, checkpoint_dir=tmp_path, resume=False, progress=False)
    assert len(task.drawn) == 30
    assert equal(weights(model), uninterrupted[0])


def test_settings_that_do_not_change_the_result_may_change(tmp_path: Path, uninterrupted) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), Recorder(11), config=SHORT, checkpoint_dir=tmp_path, progress=False)
    threads = torch.get_num_threads()
    config = dataclasses.replace(SHORT, checkpoint_every=3, threads=1)
    model = tiny()
    train(model, Parity(), config=config, checkpoint_dir=tmp_path, progress=False)
    assert equal(weights(model), uninterrupted[0])
    assert torch.get_num_threads() == threads


# What it refuses


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": dataclasses.replace(SHORT, lr=0.5)}, "config.lr is 0.01 there and 0.5 here"),
        ({"model": {"seed": 9}}, "model.seed is 0 there and 9 here"),
        ({"model": {"arch": "lstm"}}, "model.arch is 'gru' there and 'lstm' here"),
        ({"task": Parity(bos=True), "model": {"d_vocab": 3}}, "task.bos is False there and True here"),
    ],
)
def test_another_runs_folder_is_refused_and_left_alone(
    change: dict[str, object], says: str, resume: bool, tmp_path: Path
) -> None:
    train(tiny(), Parity(), config=SHORT, checkpoint_dir=tmp_path, progress=False)
    before = contents(tmp_path)
    model = build(FormalConfig(**{"arch": "gru", "d_vocab": 2, **TINY, **change.get("model", {})}))
    untouched = weights(model)
    with pytest.raises(StoreError, match=f"another run: .*{says}.*choose another folder"):
        train(
            model,
            change.get("task", Parity()),
            config=change.get("config", SHORT),
            checkpoint_dir=tmp_path,
            resume=resume,
            progress=False,
        )
    assert contents(tmp_path) == before
    assert equal(weights(model), untouched)


def test_another_label_or_a_user_module_of_another_shape_is_another_run(tmp_path: Path) -> None:
    task = Dyck(k=2, max_depth=3)
    config = dataclasses.replace(SHORT, steps=6)
    model = build(FormalConfig("gru", d_vocab=9, **TINY))
    train(model, task, label="depth", config=config, checkpoint_dir=tmp_path / "a", progress=False)
    with pytest.raises(StoreError, match=r"labels is \['depth'\] there and \['top'\] here"):
        train(model, task, label="top", config=config, checkpoint_dir=tmp_path / "a", progress=False)

    def own(width: int) -> nn.Module:
        with torch.random.fork_rng():
            return nn.Sequential(nn.Embedding(2, width), nn.Linear(width, 2))

    result = train(own(4), Parity(), config=config, checkpoint_dir=tmp_path / "b", progress=False)
    assert result.steps == 6
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["train.safetensors"]
    with pytest.raises(StoreError, match="another run"):
        train(own(5), Parity(), config=config, checkpoint_dir=tmp_path / "b", progress=False)


def test_a_truncated_checkpoint_is_refused_until_told_to_start_over(tmp_path: Path, uninterrupted) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), Recorder(11), config=SHORT, checkpoint_dir=tmp_path, progress=False)
    file = tmp_path / "train.safetensors"
    whole = file.read_bytes()
    for size in (0, 40, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"Nothing was changed there.*resume=False"):
            train(tiny(), Parity(), config=SHORT, checkpoint_dir=tmp_path, progress=False)
        assert file.read_bytes() == whole[:size]
    model = tiny()
    train(model, Parity(), config=SHORT, checkpoint_dir=tmp_path, resume=False, progress=False)
    assert equal(weights(model), uninterrupted[0])


def test_a_folder_with_a_model_that_no_run_left_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(StoreError, match="not the folder of a training run"):
        train(tiny(), Parity(), config=SHORT, checkpoint_dir=tmp_path, progress=False)
    assert contents(tmp_path) == {"model.safetensors": b"precious"}


def test_a_loss_that_is_not_finite_ends_the_run_and_spares_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = tiny(), []

    def poison(module: nn.Module, args: object, out: Tensor) -> Tensor | None:
        calls.append(1)
        return out * float("nan") if module.training and len(calls) > 25 else None

    model.register_forward_hook(poison)
    with pytest.raises(InputError, match=r"the loss is nan at step \d+: training diverged.*lr below 0.01"):
        train(model, Parity(), config=SHORT, checkpoint_dir=tmp_path, progress=False)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    train(tiny(), Parity(), config=SHORT, checkpoint_dir=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"steps": 0}, "steps=0 must be a whole number, at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be a whole number"),
        ({"lr": float("nan")}, "lr must be a number from"),
        ({"lr": 0}, "lr must be a number from"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"target_accuracy": 99}, "target_accuracy must be a number from 0.0 to 1.0, not 99"),
        ({"start_length": 50}, "start_length=50 is beyond length=40"),
        ({"steps": 50, "decay_steps": 50}, "decay_steps=50 leaves nothing of steps=50"),
        ({"seed": -1}, "seed=-1 must be a whole number, at least 0"),
        ({"eval_every": True}, "eval_every=True must be a whole number"),
    ],
)
def test_a_bad_training_config_is_refused_with_the_reason(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        TrainConfig(**fields)


def test_a_model_that_does_not_fit_the_task_is_refused() -> None:
    dyck = Dyck(k=2, max_depth=10)
    with pytest.raises(InputError, match=r"has 2 token ids, task 'dyck' needs 4.*for_task"):
        train(tiny(), dyck, config=SHORT, progress=False)
    model = build(FormalConfig("gru", d_vocab=4, **TINY))
    with pytest.raises(InputError, match="has 4 logits, the classes of depth need 11"):
        train(model, dyck, config=SHORT, progress=False)
    with pytest.raises(InputError, match="has 4 logits, the classes of depth need 11"):
        evaluate(model, dyck)
    for label, says in (("heap", "no label 'heap'"), ((), "one label or several"), (["top", "top"], "several")):
        with pytest.raises(InputError, match=says):
            train(model, dyck, config=SHORT, label=label, progress=False)
    with pytest.raises(InputError, match="config must be a TrainConfig, not a dict"):
        train(tiny(), Parity(), config={"steps": 3}, progress=False)
    with pytest.raises(InputError, match="torch module or a HookedModel, got a str"):
        train("gru", Parity(), progress=False)


def test_a_model_without_a_logit_for_every_position_is_refused() -> None:
    class Pooled(nn.Sequential):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).mean(1)

    with pytest.raises(ShapeError, match=r"tokens \(1, 1\) to logits \(batch, pos, vocab\); it gave \(1, 4\)"):
        train(Pooled(nn.Embedding(2, 4)), Parity(), config=SHORT, progress=False)


# Evaluation


def test_spans_split_the_accuracy_at_the_trained_length() -> None:
    task = Parity()
    perfect = evaluate(Oracle(), task, (10, 30), n=64, trained_length=10, late=5)
    half = evaluate(Oracle(until=10), task, (10, 30), n=512, trained_length=10, late=5)
    assert {row["accuracy"] for row in perfect.rows} == {1.0}
    assert half.accuracy(10) == half.accuracy(30, "trained") == 1.0
    assert half.accuracy(30, "beyond") == pytest.approx(0.5, abs=0.03)
    assert half.accuracy(30, "all") == pytest.approx((10 + 20 * half.accuracy(30, "beyond")) / 30)
    assert half.accuracy(30, "late") == pytest.approx((5 + 20 * half.accuracy(30, "beyond")) / 25)
    counts = {(row["length"], row["span"]): row["n_positions"] for row in half.rows}
    assert counts == {
        (10, "all"): 512 * 10,
        (10, "trained"): 512 * 10,
        (10, "late"): 512 * 5,
        (30, "all"): 512 * 30,
        (30, "trained"): 512 * 10,
        (30, "beyond"): 512 * 20,
        (30, "late"): 512 * 25,
    }


def test_bos_is_not_a_position() -> None:
    result = evaluate(Oracle(until=4, bos=True), Parity(bos=True), (8,), n=32, trained_length=4, late=2)
    assert result.accuracy(8, "trained") == 1.0
    assert result.accuracy(8, "beyond") < 0.75
    assert [row["n_positions"] for row in result.rows] == [32 * 8, 32 * 4, 32 * 4, 32 * 6]


def test_balanced_accuracy_counts_every_class_alike() -> None:
    class Empty(Oracle):
        def forward(self, tokens: Tensor) -> Tensor:
            return F.one_hot(torch.full_like(tokens, 2), 12).float()

    row = evaluate(Empty(), Dyck(k=1, max_depth=10, noop=0.3), (40,), n=64).rows[0]
    assert row["balanced_accuracy"] == pytest.approx(1 / 11)
    assert row["accuracy"] > row["balanced_accuracy"]


def test_evaluation_does_not_depend_on_the_batch_size_and_keeps_the_training_flag() -> None:
    model = tiny().train()
    rows = [evaluate(model, Parity(), (9,), n=10, batch_size=size).rows for size in (1, 3, 64)]
    assert rows[0] == rows[1] == rows[2]
    assert model.training


def test_evaluation_draws_other_sequences_than_training_at_the_same_seed() -> None:
    task = Recorder()
    train(tiny(), task, config=dataclasses.replace(SHORT, length=24, start_length=None), progress=False)
    trained = {tuple(row) for tokens in task.drawn for row in tokens.tolist()}
    task.drawn = []
    evaluate(tiny(), task, (24,), n=SHORT.batch_size)
    assert not trained & {tuple(row) for row in task.drawn[0].tolist()}
    assert len(trained) == 240


@pytest.mark.parametrize("options", [{"lengths": ()}, {"lengths": (0,)}, {"n": 0}, {"batch_size": 0}])
def test_evaluation_refuses_sizes_below_one(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        evaluate(tiny(), Parity(), **options)


def test_an_accuracy_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(InputError, match="no accuracy for length 50.*There are"):
        evaluate(tiny(), Parity(), (5,), n=2).accuracy(50)


# Several labels


def test_several_labels_take_consecutive_logits_and_are_all_learned() -> None:
    task = Dyck(k=2, max_depth=2)
    assert label_slices(task, ("depth", "top")) == {"depth": slice(0, 3), "top": slice(3, 6)}
    assert label_slices(task, "top") == {"top": slice(None)}
    config = FormalConfig.for_task(
        "gru", task, label=("depth", "top"), n_layers=1, d_model=16, hidden_size=24, embedding_std=1.0
    )
    assert config.d_vocab == 6
    model = build(config)
    settings = TrainConfig(
        steps=600, batch_size=32, lr=1e-2, length=8, start_length=3, eval_every=20, decay_steps=20, warmup=10
    )
    before = evaluate(model, task, (8,), label=("depth", "top"), trained_length=8)
    result = train(model, task, config=settings, label=("depth", "top"), progress=False)
    after = evaluate(model, task, (8,), label=("depth", "top"), trained_length=8)
    assert result.labels == ["depth", "top"]
    assert result.accuracy > 0.9  # both right at once
    for label in ("depth", "top"):
        assert before.accuracy(8, label=label) < 0.7
        assert after.accuracy(8, label=label) > 0.95


# Around it


def test_a_backend_is_entered_for_training_and_evaluation() -> None:
    inside, depth = [], [0]

    @contextlib.contextmanager
    def backend():
        depth[0] += 1
        yield
        depth[0] -= 1

    model = tiny()
    model.register_forward_hook(lambda *_: inside.append(depth[0]))
    train(model, Parity(), config=SHORT, backend=backend, progress=False)
    evaluate(model, Parity(), (6,), n=4, backend=backend)
    # The first call of each only asks for the width of the logits.
    assert inside.count(0) == 2
    assert set(inside[1:-2]) == {1}
    assert depth == [0]


def test_the_reference_backend_trains_mamba_to_the_same_weights_within_rounding() -> None:
    import probelens as pl

    options = {"n_layers": 2, "d_model": 16, "hidden_size": 32, "d_state": 4}
    config = dataclasses.replace(SHORT, steps=6, decay_steps=1, lr=1e-3)
    native, reference, named = (tiny("mamba", **options) for _ in range(3))
    start = weights(native)
    train(native, Parity(), config=config, progress=False)
    train(pl.wrap(reference), Parity(), config=config, backend="reference", progress=False)
    train(named, Parity(), config=config, backend="reference", progress=False)
    assert equal(weights(reference), weights(named))
    for name, value in weights(native).items():
        torch.testing.assert_close(weights(reference)[name], value, atol=2e-4, rtol=1e-3)
    assert not equal(weights(reference), start)


def test_progress_is_silent_without_a_terminal_and_calls_a_function_every_step(capfd) -> None:
    rows: list[dict[str, object]] = []
    train(tiny(), Parity(), config=SHORT, progress=True)
    train(tiny(), Parity(), config=SHORT, progress=rows.append)
    assert capfd.readouterr() == ("", "")
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[0].keys() == {"step", "steps", "length", "loss", "accuracy", "phase"}


def test_results_survive_their_files_and_become_tables_and_figures(tmp_path: Path, uninterrupted) -> None:
    result = uninterrupted[1]
    assert TrainResult.load(result.save(tmp_path / "train.safetensors")) == result
    assert list(result.to_dataframe()["step"]) == [4, 8, 12, 16, 20, 24, 28, 30]
    assert len(result.plot().data) >= 3
    found = evaluate(tiny(), Parity(), (6, 12), n=8, trained_length=6, late=3)
    assert EvalResult.load(found.save(tmp_path / "eval.safetensors")) == found
    frame = found.to_dataframe()
    assert set(frame["span"]) == {"all", "trained", "beyond", "late"}
    assert {trace.name for trace in found.plot().data} >= {"all", "beyond"}


def test_the_trained_model_is_the_users_own_with_no_hooks_left() -> None:
    model = tiny()
    keys, modules = list(model.state_dict()), list(model.modules())
    train(model, Parity(), config=SHORT, progress=False)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert config_of(model) is not None


def test_the_interval_of_an_accuracy_is_over_sequences() -> None:
    # Half of the sequences are answered rightly everywhere, half wrongly: 40 positions are no 40 observations.
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(3, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            state = tokens.cumsum(1) % 2
            answer = torch.where(tokens[:, :1] == 1, state, 1 - state)
            return torch.nn.functional.one_hot(answer, 3).float() + 0 * self.embedding(tokens)

    row = evaluate(Split(), Parity(), (40,), n=400).rows[0]
    assert row["n_sequences"] == 400
    half = (row["hi"] - row["lo"]) / 2
    assert abs(half - 1.96 * (0.25 / 400) ** 0.5) < 0.006, half
    perfect = evaluate(Split(), Parity(), (1,), n=10, seed=3).rows[0]
    assert perfect["lo"] <= perfect["accuracy"] <= perfect["hi"]
