"""``nn.TransformerEncoder`` with padding, whose layers PyTorch would hand nested tensors, and with time first."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import Tensor, nn

import probelens as pl


class Net(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.head, self.first = nn.Embedding(zoo.VOCAB, 16), nn.Linear(16, zoo.VOCAB), batch_first
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) if self.first else self.embed(tokens).transpose(0, 1)
        padding = None if attention_mask is None else attention_mask == 0
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(x if self.first else x.transpose(0, 1))


@pytest.mark.parametrize("batch_first", [True, False])
def test_padded_sequences_are_read_and_edited_like_those_that_run_alone(batch_first: bool) -> None:
    torch.manual_seed(0)
    raw = Net(batch_first).eval()
    model, x = pl.wrap(raw, blocks="encoder.layers", embed="embed", unembed="head"), zoo.tokens(3, 8)
    lengths = torch.tensor([8, 5, 3])
    mask = (torch.arange(8) < lengths[:, None]).long()
    nested = raw.encoder.use_nested_tensor
    point = "blocks.0.hook_resid_post"

    def flip(t: Tensor, hook: pl.HookPoint) -> Tensor:
        return -t

    with torch.no_grad():
        native = raw(x, mask)
        out, cache = model.run_with_cache(x, point, attention_mask=mask)
        edited = model.run_with_hooks(x, [(point, flip)], attention_mask=mask)
        first = model.run_with_hooks(x, [(point, pl.edits.zero(pos=0))], attention_mask=mask)
        for row, length in enumerate(lengths.tolist()):
            alone = x[row : row + 1, :length]
            assert torch.allclose(out[row, :length], native[row, :length], atol=1e-5)
            layer = raw.encoder.layers[0]
            seen = raw.embed(alone)
            want = layer(seen if batch_first else seen.transpose(0, 1))
            want = want if batch_first else want.transpose(0, 1)
            assert torch.allclose(cache[point][row, :length], want[0], atol=1e-5)
            assert torch.allclose(edited[row, :length], model.run_with_hooks(alone, [(point, flip)])[0], atol=1e-5)
            assert (first[row, :length] - native[row, :length]).abs().max() > 1e-3
        acts = pl.collect(model, x, "resid_post", attention_mask=mask)
    assert torch.allclose(acts[point][mask.bool()], cache[point][mask.bool()], atol=1e-6)
    assert raw.encoder.use_nested_tensor == nested == batch_first
