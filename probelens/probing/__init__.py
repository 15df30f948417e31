"""Probing: what can be read from activations, and what that reading is worth."""

from probelens.probing.controls import control_labels, selectivity
from probelens.probing.linear import LinearProbe, RidgeProbe
from probelens.probing.mdl import Codelength, online_codelength
from probelens.probing.mlp import MLPProbe
from probelens.probing.probe import probe
from probelens.probing.refit import refit_accuracy
from probelens.probing.result import ProbeResult
from probelens.probing.solvers.factor import Factorised
from probelens.probing.solvers.logistic import LogisticFit, fit_path
from probelens.probing.solvers.ridge import RidgeFit, ridge_path
from probelens.probing.splits import Split, split_by_group

__all__ = [
    "Codelength",
    "Factorised",
    "LinearProbe",
    "LogisticFit",
    "MLPProbe",
    "ProbeResult",
    "RidgeFit",
    "RidgeProbe",
]
__all__ += ["Split", "control_labels", "fit_path", "online_codelength", "probe", "refit_accuracy", "ridge_path"]
__all__ += ["selectivity", "split_by_group"]
