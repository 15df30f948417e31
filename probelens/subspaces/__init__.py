"""Directions and subspaces fitted from activations, and erasers."""

from probelens.subspaces.directions import between_share, directions, variance_share
from probelens.subspaces.fitted import class_means, from_probe, mean_difference, moments, pca, probe_rows, svd, top_pca
from probelens.subspaces.inlp import Inlp, inlp
from probelens.subspaces.leace import ConditionalLeaceFitter, Eraser, LeaceFitter, leace
from probelens.subspaces.matched import orthogonal_pca, random, random_matched
from probelens.subspaces.oracle import OracleEraser, QuadraticEraser, QuadraticFitter, oracle, quadratic
from probelens.subspaces.subspace import Subspace

__all__ = ["ConditionalLeaceFitter", "Eraser", "Inlp", "LeaceFitter", "Subspace", "between_share", "class_means"]
__all__ += ["directions", "from_probe", "inlp", "leace", "mean_difference", "moments", "orthogonal_pca", "pca"]
__all__ += ["probe_rows", "random", "random_matched", "svd"]
__all__ += ["top_pca", "variance_share"]
__all__ += ["OracleEraser", "QuadraticEraser", "QuadraticFitter", "oracle", "quadratic"]
