# %% [markdown]
# # Ablate and refit
#
# Does the model use what a probe can read? The usual test removes the probe's directions and looks at the damage. This
# tutorial runs it on a small GRU that keeps the parity of a bit string and gets a wrong answer. It then shows what every
# ablation reports beside the damage, from which one sees that the answer can't be trusted.
#
# The GRU reads one bit at a time and answers with the parity so far, so it has to carry the parity from step to step.
# Whatever happens below, this model *does* need the variable.

# %%
import pandas as pd

import probelens as pl

task = pl.tasks.Parity()
config = pl.models.FormalConfig.for_task("gru", task, n_layers=3, d_model=32, embedding_std=1.0)
module = pl.models.build(config)
settings = pl.training.TrainConfig(length=16, steps=600, lr=3e-3, warmup=20, decay_steps=50)
pl.training.train(module, task, config=settings, progress=False).accuracy

# %%
model = pl.wrap(module)
data = task.splits({"fit": 400, "held": 300}, length=16, seed=0)  # no sequence in both
fit, held = data["fit"], data["held"]

# %% [markdown]
# ## The usual test
#
# Fit probes on some sequences. On other sequences, project the probe's directions out of each layer in turn, and let the
# model continue from there.

# %%
acts = pl.collect(model, fit, sites="layers")
probes = pl.probe(acts, {"state": fit.labels["state"]}, groups=fit.groups)
ablated = pl.ablate(model, held, probes, directions="filter", label="state", refit=True, controls=20)

rows = pd.DataFrame(ablated.targets())
rows[["layer", "rank", "probe_accuracy", "clean", "value", "drop", "lo", "hi"]]

# %% [markdown]
# Layer −1 is what enters block 0, and the other layers are what each block returns. `clean` is the accuracy of the model,
# `value` its accuracy with the ablation, and `drop` the difference, with its 95 % interval over sequences from `lo` to `hi`.
#
# The probe reads the parity perfectly after every block. Without its direction at layer 1 the model still gets most
# answers right; at layer 2 it loses nothing. The usual conclusion is "readable, and not used".

# %% [markdown]
# ## The refit
#
# Was the variable removed? `refit=True` trained new probes on the *ablated* activations: a linear one, a small MLP, and a
# linear one at each position. `baseline` is what can be guessed without activations.

# %%
rows[["layer", "refit_accuracy", "refit_mlp_accuracy", "refit_position_accuracy", "baseline", "verdict"]]

# %% [markdown]
# After each block they all read it as well as before. The probe's direction was one of many that carry the parity, and the
# model could use the others, so nothing was tested. The verdict is "inconclusive", not "not used". At layer 2 it is
# "tautological": the logits are a linear map of that site, so erasing everything linear there has to hurt. (At layer −1 the
# probe reads little more than the baseline, with the ablation and without.)

# %% [markdown]
# ## The controls
#
# Where there is damage, as at layer 0, is it due to the variable? Removing *any* directions costs something, so random
# subspaces are ablated too: some of the same rank, and some that remove the same variance. `damage` is the drop as a share
# of what there is to lose, the clean accuracy above chance.
#
# `effect` is the damage beyond the mean damage of the random subspaces that remove the same variance. `effect_lo` and
# `effect_hi` are the ends of its 95 % prediction interval, over control draws and sequences: the effect of one more random
# subspace would have an interval without 0 in about one case in twenty. `effect_p` is the share of draws that cost as much,
# the probe's subspace counted among them.

# %%
rows[["layer", "damage", "damage_random", "damage_random_matched", "effect", "effect_lo", "effect_hi", "effect_p"]]

# %% [markdown]
# At layers 0 and 1, random subspaces that remove as much variance cost nearly as much on average, and a good part of them
# more: both intervals contain 0. That damage isn't evidence either.

# %% alt="Drop by layer beside the drops of random subspaces; below, the accuracy of the refitted probes"
ablated.plot()

# %% [markdown]
# ## Remove more
#
# LEACE removes everything that any linear probe could read, with the least change. `pl.erase` fits it on some sequences
# and tests it on others.

# %%
erased = pl.erase(model, fit, held, label="state", controls=20)
rows = pd.DataFrame(erased.rows)
rows[["layer", "drop", "refit_accuracy", "refit_mlp_accuracy", "refit_position_accuracy", "baseline", "verdict"]]

# %% [markdown]
# Now half of all answers are lost, and since a guess is right half of the time, there is no more to lose. But after each
# block an MLP still reads everything, and so do linear probes fitted at one position each: the GRU also keeps the parity in a
# form that one linear probe for all positions doesn't read. So the verdict at layers 0 and 1 stays "inconclusive". Here it
# errs on the side of caution: the variable is still there, but the form in which the model reads it is not, and its answers
# are lost. (At layer −1 the verdict is "erased", and half of the answers are lost: the parity at the first position is the
# first bit, so what LEACE erases from the embedding is the bits.)
#
# ## Replace all of it
#
# The last step replaces the whole activation, to see whether the model can answer without it. The activations of *other
# sequences* are put in their place: they are typical of the model, and hold nothing about this sequence.

# %%
sites = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
replaced = pl.ablate_component(model, held, sites, how="resample", target="state")
replaced.to_dataframe()[["site", "how", "drop", "lo", "hi"]]

# %% [markdown]
# Half of the answers are lost, so the model needs what these sites carry, and the probes say that the parity is part of it.
# Ablation can say no more. Whether it is the *parity* that makes the answer, rather than something else in which sequences
# differ, is the question of [patching](patch.md), where the two inputs differ in one token.
#
# | you did | and saw | so the variable is |
# |---|---|---|
# | removed the probe's directions | no drop, and refitted probes still read it | not tested |
# | removed the probe's directions | a drop no larger than that of random subspaces | not tested |
# | erased it, no refitted probe reads it | no drop | not needed there |
# | erased it, no refitted probe reads it | a drop beyond that of random subspaces | needed there |
#
# [Five ways to be fooled by a probe](../five-ways.md) shows each row on a model that was built as its example.
