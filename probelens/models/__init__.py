"""Small models to build, train and evaluate on tasks; loading any model."""

from probelens.models import training
from probelens.models.build import build, config_of, n_params
from probelens.models.checkpoint import is_checkpoint, load, save
from probelens.models.config import ARCHITECTURES, FormalConfig
from probelens.models.rnn_lm import RNNLM
from probelens.models.untrained import untrained

__all__ = [
    "ARCHITECTURES",
    "RNNLM",
    "FormalConfig",
    "build",
    "config_of",
    "is_checkpoint",
    "load",
    "n_params",
    "save",
    "training",
    "untrained",
]
