"""The rows of the table: names, aims and peers, without loading what they run, so that a list of them takes no time."""

from __future__ import annotations

from probelens.bench.harness import MAMBAPY, NNSIGHT, TL, Case

__all__ = ["CASES", "DEFAULT", "RAW", "SKLEARN"]

RAW = "raw forward"
SKLEARN = "scikit-learn"
DEFAULT = "transformers"
_STEP_AIMS = {DEFAULT: 33.0, MAMBAPY: 12.0}
_STATE_AIMS = {TL + " eager_scan": 5.0, TL + " compute_ssm_state": 200.0}
_BOTH = (TL, NNSIGHT)

CASES = [
    Case("patch-neox", "patching sweep, resid_pre, layer × position, Pythia-160M shape, 4 pairs × 32", "sweeps:patch_neox", {TL: 5.0}, needs=(TL,)),
    Case("patch-mamba", "the same, Mamba-130M shape", "sweeps:patch_mamba", {TL: 5.0}, needs=(TL,)),
    Case("ablation", "subspace ablation at every layer with random controls, 6 layers d 512", "sweeps:ablation", {"plain hooks": 0.9 * 12 / 7}),
    Case("interchange", "interchange at every layer and position with random controls, 4 layers", "sweeps:interchange", {"plain hooks": 2.0}),
    Case("patch-padded-neox", "patching sweep, resid_pre, layer × position, padded left and right, GPT-NeoX", "naive:patch_padded_neox", {"plain hooks": 5.0}),
    Case("patch-padded-llama", "the same, Llama", "naive:patch_padded_llama", {"plain hooks": 5.0}),
    Case("patch-bfloat16", "patching sweep, resid_pre, layer × position, bfloat16, GPT-NeoX", "naive:patch_bfloat16", {"plain hooks": 3.5}),
    Case("patch-float16", "the same, float16", "naive:patch_float16", {"plain hooks": 3.5}),
    Case("patch-window", "patching sweep, resid_pre, layer × position, Mistral with a window of 12", "naive:patch_window", {"plain hooks": 5.0}),
    Case("patch-hybrid", "the same, Jamba", "naive:patch_hybrid", {"plain hooks": 3.0}),
    Case("patch-lstm", "the same, stacked LSTM, 4 layers, width 164", "naive:patch_lstm", {"plain hooks": 3.5}),
    Case("patch-gru", "the same, stacked GRU", "naive:patch_gru", {"plain hooks": 3.5}),
    Case("probes", "layerwise probes, label sets × C, power-law features", "probing:probes", {SKLEARN: 8.0}),
    Case("inlp", "INLP, one direction a step, refitted each time", "probing:inlp", {SKLEARN: 8.0}),
    Case("mamba-step", "Mamba forward and backward, whole model", "mamba:train_step", _STEP_AIMS, takes=(MAMBAPY,)),
    Case("ssm-states", "reading every SSM state", "mamba:states", _STATE_AIMS, needs=(TL,)),
    Case("cache", "run_with_cache, all resid_post, 6 layers d 512", "running:cache_large", {RAW: -1.05}, takes=_BOTH),
    Case("cache-small", "run_with_cache, all resid_post, 24 layers d 64, 1 × 8", "running:cache_small", {RAW: -1.25}, takes=_BOTH),
    Case("collect", "collecting 6 layers × d 512 in float16 to disk", "running:collecting", {RAW: -1.15}),
    Case("import", "import probelens (after torch)", "running:importing", {}),
]  # fmt: skip
