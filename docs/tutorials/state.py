# %% [markdown]
# # The state of an LSTM and of a Mamba
#
# A recurrent model carries everything it knows of the past in its state. Here the state can be read at every step, and
# edited at one: what a hook returns is what this step's output is read from *and* what every later step goes on from.
# This tutorial transplants a memory: a model reads one string, and at step 5 is given the state of another.
#
# Both models learn flip-flop: `w1` writes a bit, `i0` is to be ignored; which bit was written last?

# %%
import plotly.express as px
import torch

import probelens as pl

task = pl.tasks.FlipFlop()


def train(arch):
    config = pl.models.FormalConfig.for_task(arch, task, n_layers=2, d_model=32, embedding_std=1.0)
    module = pl.models.build(config)
    settings = pl.training.TrainConfig(
        length=12, steps=600, lr=3e-3, warmup=20, decay_steps=50, target_accuracy=0.995
    )
    found = pl.training.train(module, task, config=settings, progress=False, backend="reference")
    print(arch, found.accuracy)
    return pl.wrap(module)


lstm = train("lstm")

# %% [markdown]
# ## Two strings
#
# They differ in the bit written at position 1, and from then on in everything that is to be remembered.

# %%
pairs = task.pairs(200, length=12, seed=1)
pairs = pairs[pairs.edit_pos == 1]
donor, patient = pairs.clean, pairs.corrupted
bit = task.labels(donor)["state"]  # what the donor remembers, at every position
print(task.decode(donor[:1]), task.decode(patient[:1]))


def answers_like_donor(logits):
    """At each position, how often the answer is the donor's."""
    return (logits.argmax(-1) == bit).float().mean(0)


answers_like_donor(lstm(patient))

# %% [markdown]
# ## Read
#
# A cache has the state of every step, stacked along the positions. An LSTM has two: the hidden state `h`, which is also
# the layer's output, and the cell `c`.

# %%
_, memory = lstm.run_with_cache(donor, names_filter="blocks.*.rnn.hook_[ch]")
{name: tuple(state.shape) for name, state in memory.items()}

# %% [markdown]
# `nn.LSTM` returns the cell of the last step only. That one is the same:

# %%
module = lstm.module
_, (h, c) = module.layers[0](module.embedding(donor))
assert torch.allclose(c[0], memory["blocks.0.rnn.hook_c"][:, -1], atol=1e-6)

# %% [markdown]
# ## Transplant
#
# `pl.at(5, fn)` calls the hook at step 5 only. It gets the state after that step, `(batch, d)`, and returns another.


# %%
def transplant(model, memory, names):
    hooks = [(name, pl.at(5, lambda state, hook: memory[hook.name][:, 5])) for name in names]
    return answers_like_donor(model.run_with_hooks(patient, fwd_hooks=hooks))


curves = {
    "all of the state": transplant(lstm, memory, list(memory)),
    "c of layer 0": transplant(lstm, memory, ["blocks.0.rnn.hook_c"]),
    "h of layer 0": transplant(lstm, memory, ["blocks.0.rnn.hook_h"]),
    "c of layer 1": transplant(lstm, memory, ["blocks.1.rnn.hook_c"]),
}

# %% alt="Share of answers like the donor's, by position. With all of the state or the cell of layer 0 it goes to 1 at step 5 and stays; with h of layer 0 or c of layer 1 it falls back"
def draw(curves):
    rows = [(n, p, float(v)) for n, curve in curves.items() for p, v in enumerate(curve)]
    figure = px.line(
        {"transplanted": [r[0] for r in rows], "position": [r[1] for r in rows], "answers": [r[2] for r in rows]},
        x="position", y="answers", color="transplanted", symbol="transplanted",
    )
    figure.update_layout(template=pl.plots.template(), height=380)
    figure.update_yaxes(range=[-0.05, 1.05], title="answers like the donor")
    return figure


draw(curves)

# %% [markdown]
# With all of the state the model answers as the donor from step 5 on: there is no other memory. The cell of layer 0
# alone does it too, one step late. `h` of the same layer doesn't: what was transplanted is gone after one step. Layer 1
# keeps nothing of its own; it answers from what layer 0 tells it at each step, and a transplant there is overwritten.
# So the bit is kept in the cell of layer 0.
#
# ## The same for a state space model
#
# The state of a Mamba layer is a matrix, `(d_inner, d_state)`, at each step. No kernel returns it and no module holds
# it: while a hook asks for it, the layer runs a scan of its own with the same numbers.

# %%
mamba = train("mamba")
native, memory = mamba.run_with_cache(donor, names_filter="blocks.*.mixer.hook_ssm_state")
assert torch.allclose(native, mamba(donor), atol=1e-4)
{name: tuple(state.shape) for name, state in memory.items()}

# %% alt="The same for Mamba: with the states of both layers the answers go to 1; with one layer's they stay in between"
draw({
    "both layers": transplant(mamba, memory, list(memory)),
    "layer 0": transplant(mamba, memory, ["blocks.0.mixer.hook_ssm_state"]),
    "layer 1": transplant(mamba, memory, ["blocks.1.mixer.hook_ssm_state"]),
})

# %% [markdown]
# This Mamba keeps the bit in both layers: either alone, contradicted by the other, moves some answers, and together
# they move all. (Its convolutions remember the last three inputs too. At step 5 those are the same in both strings.)
#
# ## A state is not an output
#
# Compare what reaches later steps. Zero the *output* of the scan at step 5, and only that step can change; zero the
# *state*, and all later ones may. (Layer 1 is the last: nothing else carries its output on.)

# %%
def changed(name):
    zeroed = mamba.run_with_hooks(donor, fwd_hooks=[(name, pl.at(5, pl.edits.zero()))])
    return ((zeroed - native).abs().amax((0, 2)) > 1e-3).int().tolist()


print("output", changed("blocks.1.mixer.hook_ssm_y"))
print("state ", changed("blocks.1.mixer.hook_ssm_state"))
