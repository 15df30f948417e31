# %% [markdown]
# # Wrap your own model
#
# `pl.wrap` takes the PyTorch module that you have. It changes nothing in it, and gives it names at which it can be read
# and edited. Here: a tagger with a bidirectional GRU, written the way people write them, and a GPT-2 of transformers.

# %%
import torch
from torch import nn

import probelens as pl


class Tagger(nn.Module):
    def __init__(self, words=50, tags=6, d=32):
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.rnn = nn.GRU(d, d, num_layers=2, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(2 * d)
        self.tags = nn.Linear(2 * d, tags)

    def forward(self, tokens):
        x, _ = self.rnn(self.embed(tokens))
        return self.tags(self.norm(x))


torch.manual_seed(0)
tagger = Tagger().eval()
tokens = torch.randint(50, (4, 9))

model = pl.wrap(tagger)
model

# %% [markdown]
# ## What can be read and edited
#
# `nn.GRU` runs both layers and both directions in one fused call, so a forward hook of PyTorch sees the top layer only.
# Here every layer is a block of its own, and inside it are the gates and the hidden state of each direction.

# %%
table = model.hook_points()
table[table["name"].str.startswith("blocks.1.")][["name", "kind", "axes"]]

# %% [markdown]
# Does each of them do what it says? `verify` tries: the point fires, returning its input changes nothing, noise changes
# the output, another run's residual stream brings that run's output back, and nothing is left on the module.

# %%
report = model.verify(tokens)
print(report)

# %% [markdown]
# ## Read
#
# Names are those of TransformerLens. A cache takes a full name, or a short one with its layer.

# %%
logits, cache = model.run_with_cache(tokens, names_filter=["blocks.*.hook_resid_post", "blocks.1.rnn.hook_h*"])
{name: tuple(tensor.shape) for name, tensor in cache.items()}

# %%
assert torch.equal(cache["resid_post", 0], cache["blocks.0.hook_resid_post"])
assert torch.equal(logits, tagger(tokens))  # bit for bit what the module gives

# %% [markdown]
# ## Edit
#
# A hook gets the tensor, and returns what the model goes on with. The backward half of the GRU reads the sentence from
# its end, so the last word can change every tag. Silence that half in both layers: does the last word still matter?


# %%
def silence_backward(tensor, hook):
    tensor[..., 32:] = 0
    return tensor


other = tokens.clone()
other[:, -1] = (tokens[:, -1] + 1) % 50  # another last word


def changed():
    """At which positions the scores depend on the last word."""
    return ((model(other) - model(tokens)).abs().amax((0, 2)) > 1e-5).int().tolist()


print("as it is ", changed())
with model.hooks(fwd_hooks=[(f"blocks.{layer}.hook_resid_post", silence_backward) for layer in (0, 1)]):
    print("silenced ", changed())

# %% [markdown]
# The hooks went with the block. They also go after an exception, and the module has the same class and the same state
# dict as before.

# %%
assert torch.equal(model(tokens), logits)
assert type(tagger) is Tagger and "rnn.weight_hh_l1_reverse" in tagger.state_dict()

# %% [markdown]
# ## Silence is an error
#
# A name that isn't there is refused, with the nearest ones. So is a hook that the run never reaches, which elsewhere
# passes for "this has no effect".

# %%
try:
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_resid_post", silence_backward)])
except pl.UnknownHookError as error:
    print(error)

# %%
try:
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_post", silence_backward)], stop_at_layer=1)
except pl.HookNotFiredError as error:
    print(error)

# %% [markdown]
# ## A model of transformers
#
# The same calls, on a Transformer. This one is made from a config; `pl.load("openai-community/gpt2")` would fetch one
# from the hub. Decoders of transformers, Mamba and Mamba-2 need nothing else:
# [which architectures](../hook-points.md#families).

# %%
from transformers import GPT2Config, GPT2LMHeadModel

sizes = GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=0)
gpt2 = pl.wrap(GPT2LMHeadModel(sizes).eval())
logits, cache = gpt2.run_with_cache(tokens)
print(cache["pattern", 0].shape, cache["resid_post", 2].shape)
print(gpt2.verify(tokens).ok)

# %% [markdown]
# ## A model that nobody has heard of
#
# If `pl.wrap` finds no recurrent layer and no known decoder, say where the blocks are. That gives the residual stream,
# the input and output of every module, and everything that is built on them; [an adapter](../write-an-adapter.md)
# adds what is inside a block.

# %%
class Floors(nn.Module):
    def __init__(self, words=50, d=32, n=3):
        super().__init__()
        self.table = nn.Embedding(words, d)
        self.floors = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU()) for _ in range(n))
        self.head = nn.Linear(d, words)

    def forward(self, tokens):
        x = self.table(tokens)
        for floor in self.floors:
            x = floor(x)
        return self.head(x)


try:
    pl.wrap(Floors())
except pl.AdapterNotFoundError as error:
    print(error)

# %%
model = pl.wrap(Floors(), blocks="floors", embed="table", unembed="head")
_, cache = model.run_with_cache(tokens, names_filter=["blocks.*.hook_resid_post", "floors.1.2.hook_out"])
list(cache)
