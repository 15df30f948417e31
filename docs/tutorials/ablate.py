# %% [markdown]
# # Ablate and refit
#
# Does the model use what a probe can read? The usual test removes the directions that the probe reads with and looks at the
# damage. This tutorial runs it on a small GRU that keeps the parity of a bit string and gets a misleading answer. It then
# removes the directions in which the variable *lies*, shows what every ablation reports beside the damage, and ends with the
# question that an ablation leaves open: does the answer follow the variable?
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
# Fit probes on some sequences. On other sequences, project the probe's own rows out of each layer in turn, and let the
# model continue from there.

# %%
acts = pl.collect(model, fit, sites="layers")
probes = pl.probe(acts, {"state": fit.labels["state"]}, groups=fit.groups)
filters = pl.ablate(model, held, probes, directions="filter", label="state", refit=True, controls=20)

cost = ["layer", "rank", "probe_accuracy", "variance", "between_variance", "clean", "value", "drop", "lo", "hi"]
pd.DataFrame(filters.targets())[cost]

# %% [markdown]
# Layer −1 is what enters block 0, and the other layers are what each block returns. `clean` is the accuracy of the model,
# `value` its accuracy with the ablation, and `drop` the difference, with its 95 % interval over sequences from `lo` to `hi`.
#
# The probe reads the parity perfectly after every block. Without its direction at layer 1 the model still gets most
# answers right; at layer 2 it loses nothing. The usual conclusion is "readable, and hardly used".
#
# ## Where the variable lies
#
# A probe's row is a *filter*: what to read with. The variable lies where the class means differ, and that is what
# `pl.ablate` removes of a probe unless you say otherwise (`directions="class_means"`).

# %%
ablated = pl.ablate(model, held, probes, label="state", refit=True, controls=20)

rows = pd.DataFrame(ablated.targets())
rows[cost]

# %% [markdown]
# One direction again, and the same sequences: now half of the answers are lost at layers 0 and 2 and a third at layer 1, where
# without the filter it was 17, 0 and 7 %.
# `variance` is the share of the activations' variance that the direction carries, `between_variance` the share of the variance
# between the classes: of the latter the class means carry all, the filter a part. A drop without these two numbers says
# nothing about the variable.
#
# ## The refit
#
# Was the variable removed? `refit=True` trained new probes on the *ablated* activations: a linear one, a small MLP, and a
# linear one at each position. `baseline` is what can be guessed without activations. First the filter, then the class means:

# %%
left = ["directions", "layer", "refit_accuracy", "refit_mlp_accuracy", "refit_position_accuracy", "baseline", "verdict"]
pd.DataFrame([*filters.targets(), *ablated.targets()])[left]

# %% [markdown]
# Without the filter all of them read the parity as well as before: the probe's direction was not all that carries it, and
# the model could use what is left. Without the class means the linear probe is close to the baseline: equal class means
# leave a linear probe nothing. But after each block an MLP and the linear probes at one position still read it, since the GRU
# also keeps the parity in a form that one linear probe for all positions doesn't read. So the verdict stays
# "inconclusive": what became of the *variable* is not settled, whatever the damage. At layer 2 it is "tautological": the
# logits are a linear map of that site, so erasing everything linear there has to hurt. (At layer −1 the probe reads little more
# than the baseline; without the class means nothing is left to read, also no residue as small as the check plants: "erased".)
#
# ## The controls
#
# Where there is damage, is it due to these directions? Removing *any* directions costs something, so random
# subspaces are ablated too: some of the same rank, and some that remove the same variance. `damage` is the drop as a share
# of what there is to lose, the clean accuracy above chance.
#
# `effect` is the damage beyond the mean damage of the random subspaces that remove the same variance. `effect_lo` and
# `effect_hi` are the ends of its 95 % prediction interval, over control draws and sequences: the effect of one more random
# subspace would have an interval without 0 in about one case in twenty. `effect_p_adjusted` is the share of draws that cost
# as much, the subspace counted among them, adjusted for the number of layers.

# %%
beyond = ["layer", "damage", "damage_random", "control_overlap", "effect_against", "effect", "effect_lo", "effect_hi",
          "effect_p_adjusted", "needed"]  # fmt: skip
rows[beyond]

# %% [markdown]
# A direction with half of the variance leaves no room for a random one that removes as much: such draws contain it
# (`control_overlap`, from 0.3 on), or there are none. They are then no control, and the effect is measured from random
# subspaces of equal rank, as `effect_against` says. They cost nothing, so all of the damage is beyond them, and the p is as
# small as 20 draws can make it. `needed` answers for the *directions*: yes at layers 0 and 1, where the model needs them;
# at layer 2, which the readout reads, an ablation can't tell.

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
# Half of all answers are lost, and since a guess is right half of the time, there is no more to lose. But after each
# block an MLP still reads everything, and so do linear probes fitted at one position each, so the verdict at layers 0 and 1
# stays "inconclusive". Here it errs on the side of caution: the variable is still there, but the form in which the model
# reads it is not, and its answers are lost. (At layer −1 nothing is read any more, though the same probes would read a small
# planted residue: "erased". Half of the answers are lost there too: the parity at the first position is the first bit, so
# what LEACE erases from the embedding is the bits.)
#
# ## Replace all of it
#
# The whole activation can be replaced, to see whether the model can answer without it. The activations of *other
# sequences* are put in their place: they are typical of the model, and hold nothing about this sequence.

# %%
sites = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
replaced = pl.ablate_component(model, held, sites, how="resample", target="state")
replaced.to_dataframe()[["site", "how", "drop", "lo", "hi"]]

# %% [markdown]
# Half of the answers are lost, so the model needs what these sites carry, and the probes say that the parity is part of it.
# Ablation can say no more.
#
# ## Does the answer follow?
#
# An interchange takes two runs whose parities differ. Of the one it puts only the part in the span of the class means into the
# other, and asks in how many pairs the answer becomes that of the first. Beside it: everything (`full`), everything *but* that
# part (`complement`), and random directions of equal rank.

# %%
pairs = task.pairs(200, length=16, seed=2)  # two inputs each, one early bit flipped
followed = pl.interchange(model, pairs, probes, sites="layers", controls=5)
shares = followed.to_dataframe().groupby(["layer", "condition"])["iia"].mean().unstack()
verdicts = pd.DataFrame(followed.targets()).set_index("layer")["verdict"]
shares[["target", "full", "complement", "random"]].join(verdicts).reset_index()

# %% [markdown]
# After every block the answer follows one direction in all pairs, and never follows everything else together: the parity is *used*
# there, which no ablation could say, since a model may also break because it never met an activation without the variable.
# At layer 2 that is no surprise, as the logits are read from there. At layer −1 it says less than it seems to: an embedding of two
# tokens varies along one line only, so the class means are the token itself. No probe reads the parity there, and what is
# swapped is the bits. "used" is said only where a probe reads the label. Where in the sequence the parity is, is the
# question of [patching](patch.md).
#
# | you did | and saw | so the variable is |
# |---|---|---|
# | removed the probe's own rows | no drop, and refitted probes still read it | not tested |
# | removed some directions | a drop no larger than that of random subspaces | not tested |
# | removed the class means | a drop beyond that of random subspaces, but a refitted probe still reads it | in directions that are needed; the rest is open |
# | erased it, no refitted probe reads it | no drop | not needed there |
# | erased it, no refitted probe reads it | a drop beyond that of random subspaces | needed there |
# | interchanged the class means of what a probe reads | the answer follows them, and not all the rest | used there |
#
# [Ways to be fooled by a probe](../fooled.md) shows each row on a model that was built as its example.
