"""Write one small file of each kind that probelens saves, and beside each what it holds as plain JSON.

Run with the name of a new folder, it writes them with the installed version. The folder ``saved_by_0_1_0_dev`` was written by the
version before its modules moved into rooms: what was saved then must load in every later version.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import probelens as pl

TRAINING: dict[str, Any] = {
    "steps": 30, "batch_size": 16, "lr": 5e-3, "warmup": 2, "decay_steps": 5, "length": 6, "eval_sequences": 16,
    "eval_every": 15, "target_accuracy": None,
}  # fmt: skip


def plain(value: Any) -> Any:
    """A value as JSON can keep it; a tensor is its dtype, its shape and its numbers."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": plain(value.flatten().tolist())}
    if dataclasses.is_dataclass(value):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, "fields": fields}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value.item() if hasattr(value, "item") else value


def stream_batch() -> Any:
    """What was streamed to the folder ``stream``."""
    return pl.tasks.Parity(bos=True).sample(4, length=5, seed=3)


def main(folder: Path) -> None:
    """Write everything."""
    from probelens.experiments.record import RunRecord
    from probelens.experiments.store import Store, cell_key

    folder.mkdir(parents=True)
    task = pl.tasks.Parity(bos=True)
    config = pl.models.FormalConfig.for_task("gru", task, n_layers=2, d_model=4, hidden_size=4)
    torch.manual_seed(0)
    model = pl.wrap(pl.models.build(config))
    run = folder / "training"
    training = pl.training.train(
        model, task, config=pl.training.TrainConfig(**TRAINING), checkpoint_dir=run, progress=False
    )
    for name, made in results(model, task, training).items():
        made.save(folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(plain(made)))
    weights = {key: plain(value) for key, value in model.module.state_dict().items()}
    (folder / "training.json").write_text(json.dumps(weights))
    streamed = pl.collect(model, stream_batch(), "layers", out=folder / "stream")
    (folder / "stream.json").write_text(json.dumps(plain(streamed.tensors)))
    rows = [{"accuracy": 0.5, "layer": -1, "label": "state"}, {"accuracy": 1.0, "layer": 0, "label": "state"}]
    cell = {"arch": "gru", "seed": 3, "lengths": [4, 6]}
    key = cell_key(cell, "0.1.0.dev0")
    Store(folder / "run").write(key, cell, rows)
    RunRecord("quickstart", {"seed": 1, "archs": ["gru"]}, [key], {"probelens": pl.__version__}).save(folder / "run")
    (folder / "run.json").write_text(json.dumps({"key": key, "config": cell, "rows": rows}))
    profile = folder / "profile"
    command = [
        "profile", str(run), "--task", "parity", "--out", str(profile), "--quiet", "--set", "length=6", "--set", "n_probe=20",
        "--set", "n_ablate=6", "--set", "n_pairs=4", "--set", "controls=1", "--set", "mlp=false",
    ]  # fmt: skip
    if cli(command):
        raise SystemExit("probelens profile failed")
    for page in profile.glob("*.html"):
        page.unlink()


def cli(command: list[str]) -> int:
    """The command line, wherever this version has it."""
    found = pl.cli if hasattr(pl.cli, "main") and callable(pl.cli.main) else None
    if found is None:
        from probelens.cli import main as found
    return int(found.main(command) or 0)


def results(model: Any, task: Any, training: Any) -> dict[str, Any]:
    """One small result of each class."""
    batch = task.sample(12, length=5, seed=2)
    acts = pl.collect(model, batch, "layers")
    site = acts.names[-1]
    x, y = acts[site][batch.mask], batch.labels["state"][batch.mask]
    numbers = torch.rand(12, 6, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"length": 6, "n_probe": 20, "n_ablate": 6, "n_pairs": 4, "controls": 1, "mlp": False}
    profile = pl.profile(model, task, control_task=True, mdl=True, untrained=pl.wrap(pl.models.build(
        pl.models.FormalConfig.for_task("gru", task, n_layers=2, d_model=4, hidden_size=4))), **options)  # fmt: skip
    parts = task.splits({"fit": 20, "held": 10}, length=6)
    erasing: dict[str, Any] = {"label": "state", "sites": [site], "controls": 1, "mlp": False}
    pairs = task.pairs(4, length=6)
    subspace = pl.subspaces.pca(x, 2)
    found = {
        "Activations": acts,
        "Subspace": subspace,
        "Eraser": pl.leace(x, y),
        "ProbeResult": profile.probes,
        "ProbeResult_numbers": pl.probe(acts, numbers, batch.groups, mask=batch.mask, tokens=batch.tokens),
        "AblationResult": dataclasses.replace(profile.ablations["state"], extra={"subspaces": {site: subspace}}),
        "ErasureResult": pl.erase(model, parts["fit"], parts["held"], **erasing),
        "ErasureResult_inlp": pl.erase(model, parts["fit"], parts["held"], method="inlp", max_rank=1, **erasing),
        "DoseResult": pl.dose_response(model, parts["held"], {site: subspace}, controls=1, label="state"),
        "LengthTransfer": pl.length_transfer(model, task, {site: subspace}, (6, 8), trained_length=6, n=6, controls=1),
        "ComponentResult": pl.ablate_component(model, batch, "resid_post", ("zero", "resample"), draws=2),
        "PatchResult": pl.patch(model, pairs),
        "PatchSitesResult": pl.patch_sites(model, pairs, correct_only=False, n_boot=20),
        "Profile": profile,
        "ProfileIndices": profile.indices["state"],
        "Interval": pl.stats.hierarchical_bootstrap(torch.rand(2, 6, generator=torch.Generator().manual_seed(0)), n_draws=50),
        "TrainResult": training,
        "EvalResult": pl.training.evaluate(model, task, (6, 8), n=4, trained_length=6),
        "VerifyReport": model.verify(),
    }  # fmt: skip
    try:
        from probelens.probing import probe_values
    except ImportError:
        return found
    found["ValueProbeResult"] = probe_values(acts, numbers, batch.groups, mask=batch.mask)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
