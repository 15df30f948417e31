# %% [markdown]
# # Bring your own task
#
# Everything works on tokens with labels. If you can generate strings and say what is true at each position of one, write
# a `Task` of two methods, and data, splits, pairs, baselines and profiles follow. If you have a data set, fill in a
# `Batch`.

# %%
import numpy as np
import torch

import probelens as pl

# %% [markdown]
# ## A task
#
# Digits come one after the other; at each, what is the largest so far? `draw` makes strings from a random generator,
# and `annotate` labels them, looking backward only. A second label comes free: whether this digit is a record.


# %%
class RunningMax(pl.tasks.Task):
    def __init__(self, digits=6, target="max", bos=False):
        self.digits = digits
        names = [str(i) for i in range(digits)]
        super().__init__("running max", names, {"max": names, "record": ["no", "yes"]}, target=target, bos=bos)

    def draw(self, n, length, rng):
        low = rng.integers(0, self.digits, (n, length))
        return np.minimum(low, rng.integers(0, self.digits, (n, length)))  # large ones are rare

    def annotate(self, symbols):
        largest = np.maximum.accumulate(symbols, axis=1)
        before = np.pad(largest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        return {"max": largest, "record": (symbols > before).astype(int)}


task = RunningMax()
batch = task.sample(3, length=8, seed=0)
print(task.decode(batch.tokens))
batch.labels["max"]

# %% [markdown]
# What can be guessed without keeping anything? Look before training, since a task that the last four tokens solve
# teaches nothing about state.

# %%
parts = task.splits({"train": 500, "test": 500}, length=16, seed=0)  # no string in both
{name: round(found["accuracy"], 3) for name, found in task.baselines(parts["train"], parts["test"]).items()}

# %% [markdown]
# Pairs for patching come from `draw` and `annotate` too: one early token is changed, so that the answer at the end
# differs. Override `draw_pairs` where such pairs are rare.

# %%
pairs = task.pairs(100, length=16, seed=0)
print(task.decode(pairs.clean[:1]), task.decode(pairs.corrupted[:1]), pairs.answers[:1].tolist())

# %% [markdown]
# ## From the task to a verdict
#
# Train something on it, and ask all four questions of every layer in one call: can the variable be read, is it needed, does
# patching restore it, does the answer follow it.

# %%
config = pl.models.FormalConfig.for_task("gru", task, n_layers=3, d_model=32, embedding_std=1.0)
module = pl.models.build(config)
settings = pl.training.TrainConfig(length=16, steps=600, lr=3e-3, warmup=20, decay_steps=50)
print(pl.training.train(module, task, config=settings, progress=False).accuracy)

profile = pl.profile(pl.wrap(module), task, length=16, n_probe=250, n_ablate=100, controls=10, mlp=False)
asked = ["layer", "readable", "accuracy", "baseline", "needed", "drop", "filter_drop", "sufficient", "recovery", "used", "iia"]
profile.answers()[asked]

# %% [markdown]
# Each answer stands beside the number that it rests on: the accuracy of a probe beside the best guess, the accuracy lost without
# the span of the class means beside what is lost without the probe's own rows (`filter_drop`), the largest share of the gap that
# one patched position restores, the share of pairs whose answer follows the class means of another run.
# `needed` can't tell here, since ten draws of the controls are too few for a p of 0.05; leave `controls` out for as many as it takes.

# %% [markdown]
# The verdict of the whole profile says *where* the variable builds up, by rules that are written down in
# [the indices](../api/numerics.md#probelens.numerics.indices):

# %%
print(profile.indices["max"].verdict, "-", profile.indices["max"].reason)

# %% [markdown]
# `task.config` is plain data, so that runs can be described by it. Keep each argument of `__init__` under its own name,
# as above, and it is complete.

# %%
task.config

# %% [markdown]
# ## A data set
#
# Labelled text, of unequal length: pad it, and say where labels count. `groups` keeps together what belongs together:
# here two sentences of one document are never split between training and test.

# %%
sentences = [[3, 1, 4, 1], [5, 9, 2], [6, 5], [3, 5, 8, 9]]
verbs = [[0, 1, 0, 0], [0, 0, 1], [1, 0], [0, 0, 1, 0]]
document = [0, 0, 1, 1]

tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sentences], batch_first=True)
labels = torch.nn.utils.rnn.pad_sequence([torch.tensor(v) for v in verbs], batch_first=True, padding_value=-100)
data = pl.Batch(tokens, {"verb": labels}, mask=labels >= 0, groups=torch.tensor(document))
data.mask.sum(1)

# %% [markdown]
# `pl.collect`, `pl.ablate` and `pl.erase` take it as they take a task's. `pl.probe` also reads labels that are numbers:
# give it a float tensor `(batch, pos)`, and the probe is a ridge regression whose rows have `r2`. Rows of a Hugging Face
# data set with `input_ids` go straight into `pl.collect`.
#
# For patching, fill in the pairs. The answers are ids of your model's logits, clean answer first; `edit_pos` is where
# the two differ, and several tokens may.

# %%
pairs = pl.PatchPairs(
    clean=torch.tensor([[3, 1, 4, 1]]), corrupted=torch.tensor([[3, 2, 4, 1]]), edit_pos=torch.tensor([1]),
    read_pos=torch.tensor([3]), answers=torch.tensor([[1, 2]]),
)
len(pairs)
