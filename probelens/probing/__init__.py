"""Probing: what can be read from activations, and what that reading is worth."""

from probelens.probing.linear import LinearProbe, RidgeProbe
from probelens.probing.protocol import ProbeResult, probe, refit_accuracy
from probelens.probing.solver import fit_path
from probelens.probing.splits import Split, split_by_group

__all__ = [
    "LinearProbe",
    "ProbeResult",
    "RidgeProbe",
    "Split",
    "fit_path",
    "probe",
    "refit_accuracy",
    "split_by_group",
]
