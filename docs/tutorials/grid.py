# %% [markdown]
# # Run a grid, here or on a cluster
#
# One model is an anecdote. A grid runs the same measurement on every architecture, task and seed: each in a *cell* of
# its own, kept when it is finished, and not run again. It runs in processes of this machine, on Dask, or as SLURM jobs,
# without a change to the cell.
#
# ## A cell
#
# A cell is a function of plain data. It gets a config and a folder for its checkpoints, and returns rows. Put it in a
# module, so that another process can import it.

# %%
from pathlib import Path

Path("depth_cells.py").write_text('''
import probelens as pl


def cell(config, folder):
    task = pl.tasks.Parity()
    shape = pl.models.FormalConfig.for_task(config["arch"], task, n_layers=2, d_model=32, seed=config["seed"])
    module = pl.models.build(shape)
    settings = pl.training.TrainConfig(length=12, steps=300, lr=3e-3, warmup=20, decay_steps=50, seed=config["seed"])
    trained = pl.training.train(module, task, config=settings, checkpoint_dir=folder, progress=False)

    model, batch = pl.wrap(module), task.sample(150, length=12, seed=config["seed"])
    result = pl.probe(pl.collect(model, batch, sites="layers"), batch.labels, groups=batch.groups)
    result.save(folder / "probes.safetensors")
    keep = ("layer", "accuracy", "majority")
    return [{**config, "solved": trained.accuracy, **{k: row[k] for k in keep}} for row in result.rows]
''')

# %% [markdown]
# With `checkpoint_dir=folder` the training saves itself as it goes: a cell that was killed goes on from there.
#
# ## A grid
#
# Configs are dicts. A cell is named by a hash of its config and of the version of the library, so a changed setting is
# another cell, and never mixes with the old ones.

# %%
from depth_cells import cell

from probelens.experiments import Store, run_grid

configs = [{"arch": arch, "seed": seed} for arch in ("gru", "lstm") for seed in (0, 1)]
store = Store("runs/depth")
report = run_grid(cell, configs, store, workers=1, progress=False)
print(f"{len(report.ran)} ran, {len(report.found)} were there, {len(report.failed)} failed")

# %% [markdown]
# `workers=1` runs in this process. Leave it out, and each core gets a process that runs one cell after another. (In a
# script, put the call under `if __name__ == "__main__":`, as always with Python's processes; a notebook needs no such
# thing.)
#
# A cell that fails doesn't stop the others: its traceback is in `report.failed`, and in `error.txt` in its folder. Run
# the grid again, with another seed, and only what is missing runs.

# %%
configs.append({"arch": "gru", "seed": 2})
report = run_grid(cell, configs, store, workers=1, progress=False)
print(f"{len(report.ran)} ran, {len(report.found)} were there, {len(report.failed)} failed")

# %% [markdown]
# ## Rows
#
# All rows of all cells are one table, and every cell is a Parquet file that needs no library to be read.

# %%
rows = store.all_rows(report.keys)
rows.groupby(["arch", "layer"])[["solved", "accuracy", "majority"]].mean().reset_index()

# %% [markdown]
# ## Dask
#
# `executor="dask"` starts a scheduler and workers here; `Dask("tcp://10.0.0.1:8786")` uses one that runs. Its workers
# must see the run folder under the same path, and be able to import the cell. (`pip install "probelens[dask]"`.)

# %%
report = run_grid(cell, [{"arch": "gru", "seed": 3}], store, executor="dask", workers=1, progress=False)
print(f"{len(report.ran)} ran, {len(report.failed)} failed")

# %% [markdown]
# ## SLURM
#
# Each cell is a job of an array, through submitit. A job that comes to its time limit is queued again, and goes on from
# its checkpoint. `cluster="local"` runs the same jobs as processes here, to try things out.
# (`pip install "probelens[submitit]"`.)

# %%
from probelens.experiments import Submitit, using

slurm = Submitit(partition="gpu", time=60, gpus=1, memory=16)
rehearsal = Submitit(cluster="local")

# %% [markdown]
# `run_grid(cell, configs, store, executor=slurm)` submits them and waits. A recipe of the command line runs where
# `using` says, or `--executor`:
#
# ```bash
# probelens run quickstart --executor submitit --executor-set partition=gpu --executor-set time=60
# ```

# %%
with using(rehearsal):
    report = run_grid(cell, configs, store, progress=False)  # all there: nothing is submitted
print(f"{len(report.found)} were there")

# %% [markdown]
# Any executor of `concurrent.futures` works, too. [The command line](../command-line.md#clusters) has the rest.
