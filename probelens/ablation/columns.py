"""The columns that the rows of ablations share: where, which condition, what it cost, and what a refitted probe reads."""

from __future__ import annotations

from functools import partial

from probelens.results.columns import Column

TARGETS = "targets"
_METRIC = "that of the metric"
_SHARE = "fraction of 1"
_target = partial(Column, unit=_SHARE, on=TARGETS)
_refitted = partial(Column, unit=_SHARE, on="targets, with refit")

SITE = (Column("site", str, "Hook point."), Column("layer", int, "Place on the layer axis; −1 is the embedding."))
CONDITION = (
    Column("label", str, "The variable whose subspace was removed."),
    Column(
        "condition",
        str,
        '"target" for the subspace asked for; controls: "random" (equal rank), "random_matched" (equal variance removed), '
        '"pca" (the top principal components), "orthogonal_pca" (the top ones orthogonal to the subspace).',
    ),
    Column(
        "directions",
        str,
        'What the subspace asked for is: "class_means", "pattern", "filter" or "leace" of a probe, otherwise its own label, '
        'or "given".',
    ),
    Column("draw", int, "Number of the draw of a control, from 0."),
    Column("rank", int, "Directions removed."),
    Column("alpha", float, "Strength: 1 removes the subspace, 0 nothing."),
    Column("variance", float, "Share of the activations' variance that the subspace carries, on this batch.", _SHARE),
    Column(
        "between_variance",
        float | None,
        "Share of the variance between the label's classes that the subspace carries; None where there is none.",
        _SHARE,
    ),
)
SCORES = (
    Column("chance", float | None, "Best accuracy of a constant answer, averaged over sequences.", _SHARE),
    Column("value", float, "Mean metric with the ablation.", _METRIC),
    Column("clean", float, "Mean metric without.", _METRIC),
    Column("drop", float, "clean − value.", _METRIC),
    Column("lo", float, "Lower end of the 95 % interval of the drop, over sequences.", _METRIC),
    Column("hi", float, "Upper end of it.", _METRIC),
    Column("damage", float | None, "drop/(clean − chance); None where the model is at chance.", _SHARE),
)
EFFECT = (
    Column(
        "control_overlap",
        float | None,
        "Share of the subspace that a control shares, on targets that the matched controls share on average; from 0.3 on "
        "they contain it and are no control.",
        _SHARE,
    ),
    Column(
        "control_problem", str | None, "Why there are no matched controls, or why they are none; or None.", on=TARGETS
    ),
    Column(
        "mean_shift",
        float | None,
        "Distance from the mean of the activations to the one that the removal leaves, within the subspace; above 1 it puts "
        "in something that no control does. None where the activations don't vary there.",
        "standard deviations",
        TARGETS,
    ),
    _target(
        "effect",
        float | None,
        "Damage beyond the mean damage of the controls; without a chance level, in the unit of the metric.",
    ),
    _target("effect_lo", float | None, "Lower end of its 95 % prediction interval, over control draws and sequences."),
    _target("effect_hi", float | None, "Upper end of it."),
    Column("effect_against", str | None, "The control that the effect is measured from.", on=TARGETS),
    _target(
        "effect_p",
        float | None,
        "Share of the control's draws that cost as much, the subspace counted among them; None for a metric of your own.",
    ),
    _target(
        "effect_p_adjusted",
        float | None,
        "effect_p adjusted for the number of sites, by the largest statistic over them (max-T) or Holm's method.",
    ),
    _target("damage_random", float | None, "Mean damage of random subspaces of equal rank."),
    _target("damage_random_matched", float | None, "Mean damage of random subspaces that remove equal variance."),
    _target("damage_pca", float | None, "Damage of the top principal components."),
    _target(
        "damage_orthogonal_pca", float | None, "Damage of the top principal components orthogonal to the subspace."
    ),
)
GIVEN = (
    _target(
        "association",
        float | None,
        "Mutual information of the variable and the label that the model answers with, as a share of the smaller entropy, "
        "less what chance gives; None for the same label.",
    ),
    Column("given", str | None, "Labels given which the variable was erased.", on=TARGETS),
)
REFIT = (
    Column(
        "refit_score",
        str,
        '"accuracy", or "r2" where the label holds values: what the columns of accuracies hold.',
        on="targets, with refit",
    ),
    _refitted("probe_accuracy", float, "Accuracy of a linear probe before the ablation."),
    _refitted("refit_accuracy", float, "Accuracy of a linear probe fitted after it."),
    _refitted("refit_gap", float, "probe_accuracy − refit_accuracy."),
    _refitted("refit_gap_lo", float | None, "Lower end of its 95 % interval, paired over test groups."),
    _refitted("refit_gap_hi", float | None, "Upper end of it."),
    _refitted("refit_mlp_accuracy", float | None, "Accuracy of a small MLP fitted after it."),
    _refitted("refit_position_accuracy", float, "Accuracy of linear probes fitted after it, one at each position."),
    _refitted("majority", float, "Accuracy of the most frequent class."),
    _refitted("position_baseline", float, "Accuracy of the best guess from the position alone."),
    _refitted("given_baseline", float | None, "Accuracy of the best guess from the labels given; None without them."),
    _refitted("baseline", float, "The largest of them."),
    _refitted(
        "powered",
        bool | None,
        "Whether these probes read a residue of 1.4 standard deviations planted after the ablation; None where they read the "
        "label itself, or where the verdict rests on something else.",
        unit="",
    ),
    _refitted("residue_accuracy", float | None, "Accuracy with which they read it."),
    _refitted(
        "residue_size",
        float | None,
        "The smallest residue tried that they read, along each of its directions; None where they read none.",
        unit="standard deviations of a feature",
    ),
    _refitted(
        "n_needed",
        int | None,
        "Sequences with which they do, estimated; None where no sample tried is enough, or they read the label itself.",
        unit="sequences",
    ),
    _refitted("refit_n_test", int, "Test positions of the probes.", unit="positions"),
    _refitted("readable_before", bool, "Whether any probe reads the label before the ablation.", unit=""),
    _refitted("readable_after", bool, "Whether any probe reads it after.", unit=""),
    _refitted(
        "probe_position_accuracy",
        float | None,
        "As refit_position_accuracy, before the ablation; None where it wasn't needed.",
    ),
    _refitted(
        "probe_mlp_accuracy", float | None, "As refit_mlp_accuracy, before the ablation; None where it wasn't needed."
    ),
)
VERDICT = (
    Column(
        "verdict",
        str,
        '"unread", "floor", "tautological", "inconclusive", "absent", "underpowered", "erased" or "not refitted": see `ablate`.',
        on=TARGETS,
    ),
    Column(
        "needed",
        str,
        'Whether the model needs these directions: "yes", "no" or "can\'t tell": see `ablate`.',
        on=TARGETS,
    ),
)
ABLATION = (*SITE, *CONDITION, *SCORES, *EFFECT, *GIVEN, *REFIT, *VERDICT)
