# %% [markdown]
# # Ablate and refit
#
# Does the model use what a probe can read? The usual test removes the probe's directions and looks at the damage. This
# tutorial runs it on a small GRU that keeps the parity of a bit string, gets an answer that is wrong, and shows what
# is reported beside every ablation so that it isn't believed.
#
# A parity can't be named without keeping it: whatever happens below, this model *does* need the variable.

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
# Fit probes on some sequences; on others, project their directions out of each layer in turn, and let the model run on.

# %%
acts = pl.collect(model, fit, sites="layers")
probes = pl.probe(acts, {"state": fit.labels["state"]}, groups=fit.groups)
ablated = pl.ablate(model, held, probes, label="state", refit=True, controls=20)

rows = pd.DataFrame(ablated.targets())
rows[["layer", "rank", "probe_accuracy", "clean", "value", "drop", "lo", "hi"]]

# %% [markdown]
# The probe reads the parity perfectly after every block. Without its direction at layer 1 the model still gets most
# answers right, at layer 2 it loses nothing. "Readable, and not used", one would write.

# %% [markdown]
# ## The refit
#
# Was the variable removed? Train new probes on the *ablated* activations: a linear one, a small MLP, and one at each
# position.

# %%
rows[["layer", "refit_accuracy", "refit_mlp_accuracy", "refit_position_accuracy", "baseline", "verdict"]]

# %% [markdown]
# After each block they all read it as well as before. The probe's direction was one of many that carry the parity, the
# model went on with the others, and nothing was tested. So the verdict is "inconclusive", not "not used". At layer 2 it
# is "tautological": that site feeds the linear readout, where erasing all that is read would have to hurt.

# %% [markdown]
# ## The controls
#
# And where there is damage, as at layer 0, is it the variable's? Removing *any* directions costs something. Random
# subspaces of the same rank and of the same variance removed are ablated too: `effect` is the damage beyond theirs, and
# `effect_p` the share of draws that cost as much.

# %%
rows[["layer", "damage", "damage_random", "damage_random_matched", "effect", "effect_lo", "effect_hi", "effect_p"]]

# %% [markdown]
# At layer 0, random directions that carry as much variance cost nearly as much, and a good part of them more. That
# damage isn't evidence either.

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
# Now half of all answers are lost, which for a parity is all there is to lose. But an MLP still reads everything: the
# GRU keeps the parity in a code that isn't linear alone. The verdict after each block stays "inconclusive", and here it
# errs on the side of caution: a model may lose its answers though the variable is there, if the form that it reads was
# taken away. (At layer −1 it is "erased", at the full price: the parity of the first position is the first bit, so
# what was erased from the embedding is the bits.)
#
# ## Replace all of it
#
# What remains is to take the activation away altogether, and see whether anything else could answer: put the
# activations of *other sequences* in their place, which are typical in every way and know nothing of this one.

# %%
sites = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
replaced = pl.ablate_component(model, held, sites, how="resample", target="state")
replaced.to_dataframe()[["site", "how", "drop", "lo", "hi"]]

# %% [markdown]
# Nothing goes around these sites, so the model needs what they carry; the probes say that the parity is among it. That
# is as far as ablation goes. Whether the *parity*, rather than something else that other sequences lack, makes the
# answer is asked by [patching](patch.md), which changes one token and nothing else.
#
# | you did | and saw | it says |
# |---|---|---|
# | removed a direction | no drop, and the refit reads it | nothing |
# | removed a direction | a drop, random ones drop as much | nothing |
# | erased it, refit at chance | no drop | not needed there |
# | erased it, refit at chance | a drop beyond the controls | needed there |
#
# [Five ways to be fooled by a probe](../five-ways.md) shows each row on a model that was built to be its example.
