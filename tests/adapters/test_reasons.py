"""What a wrapped model gives for the same arguments, and the reasons it names, are those of the module."""

from __future__ import annotations

import pytest
import torch
import zoo

import probelens as pl


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_packed_position_ids_mean_what_they_mean_to_the_module(family: str) -> None:
    net, x = zoo.build(family), zoo.tokens(1, 10)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    model = pl.wrap(net)
    assert torch.equal(model(x, position_ids=packed), zoo.logits(net, x, position_ids=packed))
    alone = zoo.logits(net, x, position_ids=packed, use_cache=False)
    assert torch.equal(model(x, position_ids=packed, use_cache=False), alone)
    assert not torch.allclose(alone, zoo.logits(net, x, position_ids=packed), atol=1e-3), "the control"


@pytest.mark.parametrize("name", ["blocks.0.attn.hook_nothing", "blocks.1.attn.hook_result"])
def test_an_unknown_name_in_attention_that_is_read_is_not_called_out_of_reach(name: str) -> None:
    model = pl.wrap(zoo.build("gpt2"))
    with pytest.raises(pl.UnknownHookError, match=r"Nearest: 'blocks\.\d\.attn\.hook_") as found:
        model.run_with_hooks(zoo.tokens(), [(name, lambda t, hook: None)])
    assert "out of reach" not in str(found.value)


def test_the_vocabulary_of_one_token_and_one_that_is_not_known_have_their_reasons() -> None:
    def tower(vocab: int, **known: str) -> pl.HookedModel:
        net = zoo.Recurrent(torch.nn.LSTM)
        net.embed, net.head = torch.nn.Embedding(vocab, zoo.WIDTH), torch.nn.Linear(zoo.WIDTH, vocab)
        return pl.wrap(net.eval(), **known)

    for inputs in (None, torch.zeros(2, 5, dtype=torch.long)):
        with pytest.raises(pl.InputError, match="a vocabulary of 1 has no others"):
            tower(1).verify(inputs)
    assert tower(2).verify().ok
    net = zoo.build("lstm")
    net.places = torch.nn.Embedding(20, zoo.WIDTH)  # two tables, so that neither is taken for the tokens'
    model = pl.wrap(net)
    assert not model.cfg.d_vocab
    assert model.verify(zoo.tokens(3, 6)).ok
