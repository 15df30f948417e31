# %% [markdown]
# # Probe, with controls
#
# How well can a variable be read from each layer? An accuracy alone doesn't say. This tutorial reads two variables from
# a small LSTM and asks of each number what it would be without the model's work.
#
# The LSTM learns to name the innermost open bracket of a string such as `([](`, so that the answer is known everywhere.
# It takes some seconds; take a model of your own instead.

# %%
import probelens as pl

task = pl.tasks.Dyck(k=2, max_depth=5, noop=0.2, target="top")
config = pl.models.FormalConfig.for_task("lstm", task, n_layers=2, d_model=32, embedding_std=1.0)
module = pl.models.build(config)
settings = pl.training.TrainConfig(length=24, steps=600, batch_size=32, lr=3e-3, warmup=20, decay_steps=50)
pl.training.train(module, task, config=settings, progress=False).accuracy

# %% [markdown]
# ## Activations and labels
#
# A batch has tokens, labels at every position, a mask that is False where a label doesn't count, and groups: positions
# of one sequence never fall on both sides of a split. `"layers"` is the embedding and every block's output.

# %%
model = pl.wrap(module)
batch = task.sample(250, length=24, seed=0)
print(task.decode(batch.tokens[:1])[0])
print(batch.labels["depth"][0].tolist())

acts = pl.collect(model, batch, sites="layers")
acts.to_dataframe()[["site", "layer", "shape", "norm"]]

# %% [markdown]
# The strongest control costs one line: the same architecture with the weights it started from.

# %%
blank = pl.wrap(pl.models.build(config))
untrained = pl.collect(blank, batch, sites="layers")

# %% [markdown]
# ## Probe
#
# One call fits a linear probe for each site and label: standardised on the training sequences, regularised by what the
# validation sequences say, scored once on the test sequences. `top` is the innermost bracket, which the model was
# trained to name; `depth` is how many are open, which nobody asked for.

# %%
result = pl.probe(
    acts, {"top": batch.labels["top"], "depth": batch.labels["depth"]}, groups=batch.groups, mask=batch.mask,
    tokens=batch.tokens, untrained=untrained, control_task=True, mdl=True,
)
rows = result.to_dataframe().query("control == 'task'")
rows[["label", "layer", "accuracy", "lo", "hi", "majority", "position", "last_w", "embedding", "untrained"]]

# %% [markdown]
# Read a row from right to left.
#
# - `untrained`: what the random LSTM gives. It remembers its last tokens without having learned anything.
# - `embedding`: what the token alone gives, the same probe at layer −1.
# - `last_w`: the best guess from the last four tokens, without any model.
# - `position`: the best guess from the position, and `majority`, the most common class.
# - `lo`, `hi`: a 95 % interval over test *sequences*. Positions of one sequence are not independent. An accuracy of 1 has a
#   lower end below 1: the exact one of as many trials as there are test sequences.
#
# What the model adds is the distance to the *best* of these, not to zero.

# %%
rows = rows.assign(best_guess=rows[["majority", "position", "last_w", "embedding", "untrained"]].max(axis=1))
rows = rows.assign(added=rows["accuracy"] - rows["best_guess"])
rows[["label", "layer", "accuracy", "best_guess", "added"]]

# %% alt="Accuracy by layer for top and depth, beside the majority, position, last tokens and the untrained model"
result.plot()

# %% [markdown]
# ## Could the probe have learned it by itself?
#
# A probe with many weights can memorise. The control task gives every *context* a random label, drawn once: a probe
# that reads it well learns by heart. `selectivity` is the accuracy on the label less the accuracy on the control task.
# `compression` asks the same without a control: how many times shorter the labels become if the probe that sends them
# has to be learned on the way. `compression_floor` is what the label's frequencies alone give, log2 k / H(y): a
# compression of no more than that is nothing read.

# %%
rows[["label", "layer", "accuracy", "selectivity", "compression", "compression_floor"]]

# %% [markdown]
# ## What it shows, and what it doesn't
#
# Both variables can be read, and the model made them so: the first block adds to every guess. That says nothing about
# use. The depth might be a by-product that no later computation reads; [Ablate and refit](ablate.md) asks that.
#
# Results are tables, and files without pickle.

# %%
result.save("probes.safetensors")
pl.ProbeResult.load("probes.safetensors").accuracy("blocks.1.hook_resid_post", "depth")
