"""The classes of the mamba-ssm package on a machine without CUDA, and their own torch references.

The package imports a compiled extension and Triton. Its sources are fetched and imported with empty
stand-ins for these two. What its kernels compute, its own reference functions compute here, so that its
modules run as they were written, on the CPU and independent of probelens.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import tarfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from real_models.fetch import MAMBA_SSM, cache_dir, fetch, locked

STAND_INS = ("triton", "triton.language", "triton.testing", "selective_scan_cuda")


class _StandIn(types.ModuleType):
    """A module that has every attribute."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []
        self.__version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Anything(int):
    """A number, a sequence and a function of anything: what the definition of a kernel asks of Triton."""

    def __call__(self, *args: Any, **kw: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter((self,))

    def __getitem__(self, key: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def sources() -> Path:
    """The folder with the package's sources, unpacked into the cache."""
    archive = fetch(MAMBA_SSM)
    name = archive.name.removesuffix(".tar.gz")
    with locked(name):
        if not (cache_dir() / name / "mamba_ssm").is_dir():
            with tarfile.open(archive) as file:
                file.extractall(cache_dir(), filter="data")
    return cache_dir() / name


@lru_cache(maxsize=1)
def package() -> types.SimpleNamespace:
    """The package's modules: ``Block``, ``MambaLMHeadModel``, ``MambaConfig``, ``InferenceParams``.

    Nothing stays in ``sys.modules``: transformers would take the package for installed.
    """
    # With the stand-ins in place these would find a Triton and look for more of it than there is.
    from huggingface_hub import PyTorchModelHubMixin  # noqa: F401
    from transformers.generation import GenerateDecoderOnlyOutput, TextStreamer  # noqa: F401

    folder = str(sources())
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    sys.path.insert(0, folder)
    for name in STAND_INS:
        sys.modules[name] = _StandIn(name)
    for name in STAND_INS[1:3]:
        setattr(sys.modules["triton"], name.split(".")[1], sys.modules[name])
    try:
        importlib.import_module("mamba_ssm")
        found = {name: module for name, module in sys.modules.items() if name.startswith("mamba_ssm")}
    finally:
        sys.path.remove(folder)
        for name in list(sys.modules):
            if _ours(name):
                del sys.modules[name]
        sys.modules.update(before)
    use_references(found)
    seq = found["mamba_ssm.models.mixer_seq_simple"]
    return types.SimpleNamespace(
        modules=found,
        MambaLMHeadModel=seq.MambaLMHeadModel,
        MambaConfig=found["mamba_ssm.models.config_mamba"].MambaConfig,
        InferenceParams=found["mamba_ssm.utils.generation"].InferenceParams,
    )


def _ours(name: str) -> bool:
    return name.split(".")[0] in ("mamba_ssm", "triton", "selective_scan_cuda")


def use_references(modules: dict[str, types.ModuleType]) -> None:
    """Put the package's own torch references in place of its kernels, in every module that imported them."""
    norm: Any = modules["mamba_ssm.ops.triton.layer_norm"]
    gated: Any = modules["mamba_ssm.ops.triton.layernorm_gated"]
    scan: Any = modules["mamba_ssm.ops.selective_scan_interface"]
    ssd: Any = modules["mamba_ssm.ops.triton.ssd_combined"]

    def layer_norm_fn(
        x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-6,
        prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False, **kw: Any,
    ) -> Any:  # fmt: skip
        # The kernel adds and norms in float32, and keeps the sum as the residual.
        total = x.float() if residual is None else x.float() + residual.float()
        ref = norm.rms_norm_ref if is_rms_norm else norm.layer_norm_ref
        out = ref(total, weight.float(), None if bias is None else bias.float(), eps=eps).to(x.dtype)
        kept = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
        return (out, total.to(kept)) if prenorm else out

    def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Any = None, **kw: Any) -> Any:
        return layer_norm_fn(x, weight, bias, residual, is_rms_norm=True, **{k: kw[k] for k in ("eps",) if k in kw})

    def rmsnorm_fn(x: Tensor, weight: Tensor, bias: Any, z: Any = None, eps: float = 1e-6, **kw: Any) -> Tensor:
        return gated.rms_norm_ref(x, weight, bias, z=z, eps=eps, **kw)  # type: ignore[no-any-return]

    def chunk_scan(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None, z: Any = None,
        dt_bias: Any = None, dt_softplus: bool = False, dt_limit: Any = (0.0, float("inf")), **kw: Any,
    ) -> Any:  # fmt: skip
        # Each head's channels are channels of a plain selective scan with one decay for all of them.
        b, length, heads, width = x.shape
        dt = nn.functional.softplus(dt + dt_bias) if dt_softplus else dt + dt_bias
        dt = dt.clamp(*dt_limit).repeat_interleave(width, 2)
        spread = A.repeat_interleave(width)[:, None].expand(-1, B.shape[-1])
        groups = [t.permute(0, 2, 3, 1) for t in (B, C)]
        skip = None if D is None else D.reshape(-1) if D.ndim == 2 else D.repeat_interleave(width)
        gate = None if z is None else z.reshape(b, length, -1).transpose(1, 2)
        out, last = scan.selective_scan_ref(
            x.reshape(b, length, -1).transpose(1, 2), dt.transpose(1, 2), spread, *groups, skip, gate,
            return_last_state=True,
        )  # fmt: skip
        y = out.transpose(1, 2).reshape(b, length, heads, width)
        return (y, last.reshape(b, heads, width, -1)) if kw.get("return_final_states") else y

    replaced = {
        id(norm.layer_norm_fn): layer_norm_fn,
        id(norm.rms_norm_fn): rms_norm_fn,
        id(gated.rmsnorm_fn): rmsnorm_fn,
        id(scan.selective_scan_fn): scan.selective_scan_ref,
        id(ssd.mamba_chunk_scan_combined): chunk_scan,
    }
    for module in modules.values():
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])
            elif name in ("selective_state_update", "causal_conv1d_fn", "causal_conv1d_update"):
                setattr(module, name, None)


def build(kind: str = "Mamba1", *, seed: int = 0, ssm: dict[str, Any] | None = None, **config: Any) -> nn.Module:
    """A tiny ``MambaLMHeadModel`` with every parameter away from its initial value, in eval mode."""
    ours = package()
    sizes: dict[str, Any] = {"d_model": 16, "n_layer": 3, "vocab_size": 24, **config}
    layers = {"layer": kind, "d_state": 4, **({"headdim": 8} if kind == "Mamba2" else {}), **(ssm or {})}
    if kind == "Mamba2":
        # The fused path hands the convolution and out_proj to one kernel that has no reference.
        layers["use_mem_eff_path"] = False
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ours.MambaLMHeadModel(ours.MambaConfig(**{**sizes, "ssm_cfg": layers}))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "A_log" in name:
                    continue
                p.mul_(3.0 if p.ndim == 2 else 1.0).add_(torch.randn_like(p) * 0.1)
    return model.eval()


@contextmanager
def without_kernels() -> Iterator[None]:
    """The package as it is on a machine without its kernels: what they would compute raises."""
    modules = package().modules

    def missing(*args: Any, **kw: Any) -> Any:
        raise RuntimeError("this kernel needs CUDA")

    names = ("layer_norm_fn", "rms_norm_fn", "rmsnorm_fn", "selective_scan_fn", "mamba_chunk_scan_combined")
    saved = [(m, name, vars(m)[name]) for m in modules.values() for name in names if name in vars(m)]
    for module, name, _ in saved:
        setattr(module, name, missing)
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)
