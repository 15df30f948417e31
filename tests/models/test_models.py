"""Formal models: their sizes, the seed that alone decides their weights, their files, what they refuse."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from probelens import wrap
from probelens.errors import InputError, StoreError
from probelens.models import ARCHITECTURES, RNNLM, FormalConfig, build, config_of, is_checkpoint, load, n_params, save
from probelens.tasks import Dyck, GroupWords, Parity

SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_state": 4}


def small(arch: str, **options: object) -> nn.Module:
    return build(FormalConfig(arch, d_vocab=7, **{**SMALL, **options}))


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def random_states() -> tuple[bytes, str, str]:
    numpy_state = str(np.random.get_state())  # noqa: NPY002  the global state is what is asked about
    return torch.get_rng_state().numpy().tobytes(), numpy_state, str(random.getstate())


# Sizes


@pytest.mark.parametrize("arch", ["transformer", "lstm", "gru"])
def test_the_default_size_is_about_830_thousand_parameters(arch: str) -> None:
    assert abs(n_params(build(FormalConfig(arch, d_vocab=22))) / 830_000 - 1) < 0.05


@pytest.mark.parametrize("arch", ["lstm", "gru"])
def test_no_other_recurrent_width_comes_nearer_to_830_thousand(arch: str) -> None:
    def body(width: int) -> int:
        cells = nn.LSTM if arch == "lstm" else nn.GRU
        with torch.device("meta"):
            layers = [cells(128, width)] + [cells(width, width) for _ in range(3)]
        return sum(p.numel() for layer in layers for p in layer.parameters())

    best = min(range(100, 300, 4), key=lambda width: abs(body(width) - 830_000))
    assert FormalConfig(arch, d_vocab=22).width == best


def test_transformer_and_ssms_are_the_published_blocks_at_width_128() -> None:
    import transformers as tf

    common = {"vocab_size": 22, "hidden_size": 128, "num_hidden_layers": 4, "tie_word_embeddings": False}
    references = {
        "transformer": tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**common, num_attention_heads=4, intermediate_size=512)),
        "mamba": tf.MambaForCausalLM(tf.MambaConfig(**common)),
        "mamba2": tf.Mamba2ForCausalLM(tf.Mamba2Config(**common, num_heads=4, n_groups=1)),
    }
    for arch, reference in references.items():
        model = build(FormalConfig(arch, d_vocab=22))
        assert type(model) is type(reference)
        theirs = {name: p.shape for name, p in reference.named_parameters()}
        assert {name: p.shape for name, p in model.named_parameters()} == theirs
        assert n_params(model) == sum(p.numel() for p in reference.parameters())


def test_hidden_size_sets_the_width_inside_a_block() -> None:
    assert small("transformer", hidden_size=48).gpt_neox.layers[0].mlp.dense_h_to_4h.out_features == 48
    assert small("mamba", hidden_size=48).backbone.layers[0].mixer.out_proj.in_features == 48
    assert small("mamba2", hidden_size=48).backbone.layers[0].mixer.out_proj.in_features == 48
    assert small("lstm", hidden_size=48).layers[1].weight_ih_l0.shape == (4 * 48, 48)
    assert small("gru", hidden_size=48).layers[1].weight_ih_l0.shape == (3 * 48, 48)


def test_a_parameter_shared_by_two_modules_counts_once() -> None:
    a = nn.Linear(3, 3, bias=False)
    b = nn.Linear(3, 3, bias=False)
    assert n_params(nn.Sequential(a, b)) == 18
    b.weight = a.weight
    assert n_params(nn.Sequential(a, b)) == 9


# Weights and the forward pass


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equal_seeds_give_equal_weights_and_other_seeds_other_weights(arch: str) -> None:
    torch.manual_seed(1)
    first = small(arch, seed=3).state_dict()
    torch.manual_seed(2)
    again, other = small(arch, seed=3).state_dict(), small(arch, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].ndim > 1 and "A_log" not in name]
    assert matrices
    assert not any(torch.equal(first[name], other[name]) for name in matrices)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_building_leaves_the_global_random_state_alone(arch: str) -> None:
    before = random_states()
    small(arch)
    assert random_states() == before


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_embedding_std_changes_the_embedding_and_nothing_else(arch: str) -> None:
    narrow, wide = (build(FormalConfig(arch, d_vocab=400, embedding_std=std, **SMALL)) for std in (0.02, 1.0))
    (name,) = [key for key in narrow.state_dict() if not torch.equal(narrow.state_dict()[key], wide.state_dict()[key])]
    assert "emb" in name
    assert narrow.state_dict()[name].std().item() == pytest.approx(0.02, rel=0.05)
    assert wide.state_dict()[name].std().item() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_see_the_token_they_stand_at_and_none_after_it(arch: str) -> None:
    model = small(arch, embedding_std=1.0)
    tokens = torch.randint(0, 7, (3, 9), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 7
    before, after = logits(model, tokens), logits(model, changed)
    assert before.shape == (3, 9, 7)
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=1e-6, rtol=1e-5)
    assert (before[:, 5] - after[:, 5]).abs().amax(-1).min() > 1e-5


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_rnnlm_equals_torchs_fused_stack(cell: str) -> None:
    model = RNNLM(cell, d_vocab=7, d_model=6, hidden_size=10, n_layers=3)
    fused = (nn.LSTM if cell == "lstm" else nn.GRU)(6, 10, num_layers=3, batch_first=True)
    fused.load_state_dict(
        {
            name.replace("_l0", f"_l{i}"): value
            for i, layer in enumerate(model.layers)
            for name, value in layer.state_dict().items()
        }
    )
    tokens = torch.arange(14).reshape(2, 7) % 7
    expected = model.head(fused(model.embedding(tokens))[0])
    torch.testing.assert_close(model(tokens), expected, atol=1e-6, rtol=1e-6)


def test_models_come_in_eval_mode_without_dropout() -> None:
    for arch in ARCHITECTURES:
        model = small(arch)
        assert not any(module.training for module in model.modules())
        assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))


# Config


def test_for_task_covers_tokens_and_classes() -> None:
    dyck = Dyck(k=2, max_depth=10, bos=True)
    assert FormalConfig.for_task("gru", Parity()).d_vocab == 2
    assert FormalConfig.for_task("gru", Parity(bos=True)).d_vocab == 3
    assert FormalConfig.for_task("gru", dyck, label="state").d_vocab == 21
    assert FormalConfig.for_task("gru", dyck, label="top").d_vocab == 5
    assert FormalConfig.for_task("gru", dyck, label=("depth", "top")).d_vocab == 11 + 3
    assert FormalConfig.for_task("gru", GroupWords("S3"), seed=5).seed == 5


def test_for_task_refuses_a_label_the_task_does_not_have() -> None:
    with pytest.raises(InputError, match="no label 'heap'.*depth"):
        FormalConfig.for_task("gru", Dyck(), label="heap")


def test_a_config_survives_its_dict() -> None:
    config = FormalConfig("mamba", d_vocab=9, hidden_size=256, seed=7, embedding_std=1)
    assert FormalConfig.from_dict(config.to_dict()) == config
    with pytest.raises(InputError, match="unknown fields \\['colour'\\]"):
        FormalConfig.from_dict({**config.to_dict(), "colour": "red"})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"arch": "Transfomer"}, "unknown architecture 'Transfomer'.*Did you mean 'transformer'"),
        ({"arch": None}, "unknown architecture None.*Allowed: transformer, mamba"),
        ({"d_vocab": 0}, "d_vocab=0 must be a whole number, at least 1"),
        ({"n_layers": 2.0}, "n_layers=2.0 must be a whole number"),
        ({"d_model": True}, "d_model=True must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number, from 0"),
        ({"embedding_std": float("nan")}, "embedding_std must be a finite number"),
        ({"embedding_std": -0.1}, "embedding_std must be a finite number"),
        ({"arch": "transformer", "n_heads": 3}, "d_model=128 does not divide into n_heads=3"),
        ({"arch": "transformer", "d_model": 16, "n_heads": 4}, "can't be rotated.*multiple of 8"),
        ({"arch": "mamba", "hidden_size": 200}, "hidden_size=200 is not a multiple of d_model=128"),
        ({"arch": "mamba2", "hidden_size": 200}, "hidden_size=200 is not a multiple of d_model=128"),
    ],
)
def test_a_bad_config_is_refused_with_the_reason(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        FormalConfig(**{"arch": "lstm", "d_vocab": 5, **fields})


def test_build_refuses_anything_but_a_config() -> None:
    with pytest.raises(InputError, match="takes a FormalConfig, not a str"):
        build("lstm")


# Files


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_saved_model_comes_back_bit_for_bit(arch: str, tmp_path) -> None:
    model = small(arch, seed=2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)  # not the initial weights, which the config alone would give back
    path = save(model, tmp_path / "deep" / "model.safetensors")
    again = load(path)
    assert config_of(again) == config_of(model)
    assert not again.training
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    tokens = torch.arange(12).reshape(2, 6) % 7
    assert torch.equal(logits(model, tokens), logits(again, tokens))
    assert torch.equal(logits(load(path.parent), tokens), logits(again, tokens))


def test_is_checkpoint_tells_our_files_from_others(tmp_path) -> None:
    ours = save(small("gru"), tmp_path / "ours" / "model.safetensors")
    theirs = tmp_path / "theirs" / "model.safetensors"
    theirs.parent.mkdir()
    save_file({"w": torch.zeros(2)}, theirs, metadata={"format": "pt"})
    assert all(map(is_checkpoint, (ours, ours.parent)))
    assert not any(map(is_checkpoint, (theirs, theirs.parent, tmp_path, tmp_path / "nothing")))


def test_a_file_that_is_missing_truncated_or_foreign_is_refused(tmp_path) -> None:
    path = save(small("gru"), tmp_path / "model.safetensors")
    whole = path.read_bytes()
    for size in (0, 4, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError, match="can't read"):
            load(path)
    path.write_bytes(whole)
    load(path)
    with pytest.raises(StoreError, match="can't read"):
        load(tmp_path / "nothing.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(StoreError, match="not a formal model"):
        load(tmp_path / "other.safetensors")


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path) -> None:
    model = small("gru")
    model.formal_config = FormalConfig("gru", d_vocab=8, **SMALL)
    save(model, tmp_path / "model.safetensors")
    with pytest.raises(StoreError, match="does not fit the model it describes"):
        load(tmp_path / "model.safetensors")


def test_save_refuses_a_module_that_was_not_built_here(tmp_path) -> None:
    assert config_of(nn.Linear(2, 2)) is None
    with pytest.raises(InputError, match="made by probelens.models.build; this Linear was not"):
        save(nn.Linear(2, 2), tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_recurrent_model_needs_no_transformers() -> None:
    code = (
        "import sys; from probelens.models import FormalConfig, build;"
        "build(FormalConfig('lstm', d_vocab=5));"
        "assert 'transformers' not in sys.modules; build(FormalConfig('transformer', d_vocab=5));"
        "assert 'transformers' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Without a convolution


@pytest.mark.parametrize("arch", ["mamba", "mamba2"])
def test_with_one_tap_the_convolution_has_no_past(arch: str) -> None:
    with_past, without = small(arch), small(arch, d_conv=1)
    shapes = [
        {p.shape[-1] for name, p in m.named_parameters() if "conv1d.weight" in name} for m in (with_past, without)
    ]
    assert shapes == [{4}, {1}]
    tokens = torch.randint(0, 7, (2, 12), generator=torch.Generator().manual_seed(0))
    model = wrap(without)
    with model.backend("reference"):
        torch.testing.assert_close(model(tokens), logits(without, tokens), atol=1e-5, rtol=1e-5)
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 7
    convolved = [
        model.run_with_cache(t, names_filter="blocks.0.mixer.hook_conv")[1]["blocks.0.mixer.hook_conv"]
        for t in (tokens, changed)
    ]
    differs = (convolved[0] - convolved[1]).abs().amax((0, 2)) > 0
    assert differs.nonzero().flatten().tolist() == [3]


def test_the_number_of_taps_is_checked_and_saved(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="d_conv=0 must be a whole number"):
        FormalConfig("mamba", d_vocab=7, d_conv=0)
    save(small("mamba", d_conv=1), tmp_path / "model.safetensors")
    assert config_of(load(tmp_path / "model.safetensors")).conv_kernel == 1
