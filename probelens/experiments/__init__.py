"""Experiments: cells with a key, a store that keeps their rows, and a grid that runs what is missing."""

from probelens.experiments.grid import GridReport, run_grid
from probelens.experiments.record import RunRecord, versions
from probelens.experiments.status import Status
from probelens.experiments.store import Store, cell_key
from probelens.running.executors import Dask, Local, Submitit, using

__all__ = [
    "Dask",
    "GridReport",
    "Local",
    "RunRecord",
    "Status",
    "Store",
    "Submitit",
    "cell_key",
    "run_grid",
    "using",
    "versions",
]
