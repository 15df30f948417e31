# %% [markdown]
# # Patch
#
# Which activations are enough to carry an answer? Take two inputs that differ in one token, so that their answers
# differ. Run one, and at one layer and position put in the activation of the other. If the answer follows, that
# activation carries it. The same call shows how differently a Transformer and an LSTM move one bit.

# %%
import probelens as pl

task = pl.tasks.FlipFlop()  # w1 writes a bit, i0 is to be ignored; which bit was written last?


def train(arch):
    config = pl.models.FormalConfig.for_task(arch, task, n_layers=3, d_model=32, embedding_std=1.0)
    module = pl.models.build(config)
    settings = pl.training.TrainConfig(
        length=12, steps=600, lr=3e-3, warmup=20, decay_steps=50, target_accuracy=0.995
    )
    print(arch, pl.training.train(module, task, config=settings, progress=False).accuracy)
    return pl.wrap(module)


transformer, lstm = train("transformer"), train("lstm")

# %% [markdown]
# ## Pairs
#
# A pair has a clean and a corrupted input, the position where they differ, the position where the answer is read, and
# the two right answers. Tasks make them; for data of your own fill in `pl.PatchPairs`. Here are those in which the bit
# at position 3 is changed, and everything after it is to be ignored.

# %%
pairs = task.pairs(300, length=12, seed=1)
pairs = pairs[pairs.edit_pos == 3]
print(task.decode(pairs.clean[:1]), task.decode(pairs.corrupted[:1]), pairs.read_pos[:1], pairs.answers[:1])

# %% [markdown]
# ## Every layer, every position
#
# Each cell is a run of its own on the corrupted input with one clean activation. `recovery` is the share of the gap
# between the two runs that came back: 0 is the corrupted run, 1 the clean one.

# %% alt="Transformer: recovery by layer and position. It sits at position 3, until the last layer"
patched = pl.patch(transformer, pairs, sites="layers", pos="each")
patched.plot()

# %% [markdown]
# In the Transformer the bit stays where it was written. Layer 0 has hardly moved it; by layer 1 it begins to spread;
# the last block's attention fetches it to position 11, where it is read.

# %% alt="LSTM: recovery by layer and position. After the first block no single early position restores anything"
pl.patch(lstm, pairs, sites="layers", pos="each").plot()

# %% [markdown]
# The LSTM hands the bit on from step to step, in every layer. After block 0 the bit is at *all* later positions, so
# putting one of them right restores little: the others still say the opposite. Only near the position that is read does
# it begin to count.
#
# ## Two cells that say nothing
#
# The residual after the last block at the position that is read gives 1, and at any other position 0: nothing after it
# mixes positions. It is so in any model, trained or not. `patch_sites` measures the ten things that "patching the last
# layer at position m" can mean, and says which are fixed in advance.

# %%
readings = pl.patch_sites(lstm, pairs, pos=6).to_dataframe()
readings[readings["applicable"]][["site", "description", "read", "expected", "recovery"]]

# %% [markdown]
# G tells what the heatmap couldn't: with the stream entering the last block put right *from position 6 on*, the answer
# is back. One position of it (E) isn't enough. H puts the last layer's *state* right at position 6, and the stream that
# comes in afterwards, still corrupted, overwrites it.
#
# ## Uncertainty, and the mirror
#
# `interval` resamples pairs. `mode="noise"` puts corrupted activations into the clean run, and tells what the clean run
# can't do without: of a variable that is kept twice, spoiling one copy may cost nothing.

# %%
low, high = patched.interval()
print(f"layer 1, position 3: {patched.recovery()[2, 3]:.2f} ({low[2, 3]:.2f} to {high[2, 3]:.2f})")

noised = pl.patch(transformer, pairs, sites="layers", pos="each", mode="noise")
print(f"noised: {noised.recovery()[2, 3]:.2f}")

# %% [markdown]
# ## Parts of a block
#
# Sites can be any hook points: the output of attention, of the MLP, single heads. A head's output is `attn.hook_z`;
# here at the position that is read.

# %%
parts = pl.patch(transformer, pairs, sites=["attn_out", "mlp_out"], pos=11)
for site, recovered in zip(parts.sites, parts.recovery()[:, 0]):
    print(f"{site:24} {recovered:6.2f}")

# %% [markdown]
# ## The cheap estimate
#
# `pl.attribute` estimates all cells from one backward pass. It is exact for small changes. Changing a bit isn't one:

# %%
estimate = pl.attribute(transformer, pairs, sites="layers", pos="each")
agreement = patched.agreement(estimate)
{name: round(agreement[name], 2) for name in ("correlation", "max_difference", "top_overlap")}

# %% [markdown]
# Use it to find candidates on large models, and patch those.
