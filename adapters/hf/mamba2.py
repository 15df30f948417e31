"""Hugging Face Mamba-2: the residual stream, and everything inside every mixer."""

from __future__ import annotations

from probelens.adapters.hf.mamba import HFMamba

__all__ = ["HFMamba2"]


class HFMamba2(HFMamba):
    """``Mamba2ForCausalLM`` and ``Mamba2Model``."""

    name = "hf-mamba2"
    model_types = ("mamba2",)
