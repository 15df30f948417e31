"""The terms of the methods, each explained in a few sentences for a reader who is new to them."""

from __future__ import annotations

__all__ = ["TERMS"]

#: Key -> (heading, text). A section names the keys it needs in ``Section.explain``.
TERMS: dict[str, tuple[str, str]] = {
    "questions": (
        "Readable, needed, sufficient, used",
        "Four questions with four methods. Readable: can a simple classifier (a probe) read the "
        "variable off the activations? Needed: does the model do worse when the variable is removed "
        "(ablation)? Sufficient: does putting it back restore the behaviour (patching)? Used: does the answer follow "
        "when only the variable's directions are taken from another run (interchange)? One answer does "
        "not imply another: a variable can be readable everywhere and used nowhere.",
    ),
    "layers": (
        "The layer axis",
        "A model of n blocks is read at n + 1 points. Layer \u22121, labelled `embed`, is the vector at "
        "each token before the first block; layer l is the vector after block l, counted from 0. For a "
        "stack of recurrent layers, block l is the l-th recurrent layer. The final normalisation, where "
        "a model has one, comes after the last block and is a point of its own.",
    ),
    "probe": (
        "Probe",
        "A linear classifier (multinomial logistic regression with an L2 penalty) trained to read one "
        "label off the activations at one layer. Whole sequences, never single positions, are split "
        "60/20/20: the classifier is trained on the first part, its penalty is chosen on the second, "
        "and the accuracy shown is measured once on the third. A high accuracy says that the label can "
        "be read there by a linear map; it does not say that the model uses it.",
    ),
    "baselines": (
        "Baselines",
        "An accuracy means little by itself, so each is compared with guesses that need no model at all. Majority "
        "class: always the most frequent label. Position only: the best guess from the position in the "
        "sequence. Last w tokens: the best guess from the last few tokens. A probe that does not beat "
        "these has found nothing that the model had to compute.",
    ),
    "untrained": (
        "Untrained model",
        "The same architecture with its random initial weights, probed in the same way. What can be read there comes "
        "from the input and the architecture; only what a trained model has beyond it was learned.",
    ),
    "interval": (
        "Intervals",
        "95 % intervals from a bootstrap that draws training seeds first and then whole sequences within each, because "
        "positions of one sequence are not independent. With a single seed only sequences are drawn, and the interval "
        "says nothing about how another training run would differ.",
    ),
    "ablation": (
        "Ablation",
        "The probe's weight rows span a small subspace of the activations, of rank at most the number of classes minus "
        "one. Ablating replaces the activation x by x \u2212 Q\u1d40Q(x \u2212 \u03bc), where the rows of Q are an "
        "orthonormal basis of that subspace and \u03bc is the mean activation: what lies inside becomes its mean, "
        "everything else stays, and the blocks above run on. The drop is the metric without ablation minus the metric "
        "with it; positive means that ablation hurts.",
    ),
    "refit": (
        "Refitted probe",
        "After ablation a new probe is trained on the ablated activations. If it still reads the label clearly above "
        "the baseline (by more than 2 percentage points), the variable was not removed: it is also written in other "
        "directions. The ablation is then inconclusive about whether the model needs the variable, whether the drop "
        "was large or small. Where no probe reads it any more the variable was erased; where none could read it before "
        "the ablation either, it is absent from that layer, and whatever the ablation costs there is not about it.",
    ),
    "random": (
        "Random control",
        "Removing any subspace can hurt. The same ablation is therefore done with random subspaces of "
        "the same rank, 20 draws unless the run says otherwise. Only a drop beyond theirs belongs to this subspace in "
        "particular. A random subspace usually carries less of the activations' variance than the "
        "probe's, so where it is shown a control matched in the variance removed is the stricter one.",
    ),
    "erasure": (
        "Erasure (LEACE, INLP)",
        "Stronger removal than projecting out the probe. LEACE is the smallest affine edit after which the class means "
        "are equal, so that no linear probe has a lower loss than a constant guess on the data it was fitted on. INLP "
        "refits and projects out probes in turn until the refitted probe is at the baseline on held-out sequences. The "
        "refitted probe shows how far the erasure came.",
    ),
    "tautological": (
        "Tautological ablations",
        "After the final normalisation only the linear readout remains. Removing what the readout reads "
        "damages the output by construction there, so such a drop is no evidence about how the model "
        "computes; it is labelled tautological.",
    ),
    "patching": (
        "Patching (denoising)",
        "Two inputs differ in one early token, the clean and the corrupted one. The model runs on the corrupted input "
        "while one activation, at one layer and one position, is replaced by its value from the clean run. If the "
        "output moves to the clean answer, that activation is sufficient to carry the difference.",
    ),
    "recovery": (
        "Recovery",
        "The logit difference LD is logit[clean answer] \u2212 logit[corrupted answer] at the position "
        "that is read. Recovery = (LD patched \u2212 LD corrupted) / (LD clean \u2212 LD corrupted), a "
        "ratio of means over the pairs that the model answers correctly in both runs. 0 is the "
        "corrupted run, 1 the clean run. It is not clipped: values below 0 or above 1 occur.",
    ),
    "vacuous": (
        "Cells that are 0 or 1 by construction",
        "Patching the embedding of the edited token makes the two inputs equal, so it recovers exactly 1. After the "
        "last block, only the position that is read reaches the output: patching there recovers exactly 1, at any "
        "other position exactly 0. Positions before the edited token are equal in both runs of a model that reads left "
        "to right and recover 0. Evidence is in the cells between.",
    ),
    "interchange": (
        "Interchange",
        "Two inputs differ in the variable. The model runs on one of them, and at one layer the part of the activation in "
        "a subspace is replaced by what the other run has there. The accuracy of the interchange is the share of pairs, of "
        "those both runs answer correctly, whose answer becomes the other run's. The variable is used there if the answer "
        "follows its subspace and follows neither everything but that subspace nor random subspaces. Swapping everything "
        "at all positions moves every answer by construction, so that is a ceiling and no evidence.",
    ),
    "selectivity": (
        "Selectivity",
        "The probe's accuracy on the real label minus its accuracy on a control task, a label drawn at "
        "random for each context. A probe that can memorise arbitrary labels has a high control "
        "accuracy, and its accuracy on the real label says less about the activations.",
    ),
    "mdl": (
        "Description length",
        "The number of bits needed to send the labels with a probe that learns as it goes (online "
        "coding), and the compression against sending them with no probe. A compression is to be compared with its floor, "
        "what the frequencies of the labels alone give. Where accuracies are all near "
        "100 %, bits still tell how easily the label is read.",
    ),
    "profile": (
        "Profile statistics",
        "The gain of each block is how much it raises the running maximum of the probe's accuracy above the baseline, "
        "as a share of the whole gain. The centre of mass is where along the blocks the gain lies (0 first, 1 last); "
        "the concentration is 1 if one block brings all of it and 0 if all bring the same. Late, immediate and gradual "
        "are said only when the whole interval agrees; otherwise the profile is undetermined, and it is not given at "
        "all where the model has not solved the task.",
    ),
    "training": (
        "Training",
        "The models are trained from scratch, and every batch is newly drawn. The sequences that are "
        "probed, ablated or patched are drawn separately from those of training.",
    ),
}
"""Heading and text of each term that a report can explain."""
