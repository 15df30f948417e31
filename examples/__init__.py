"""Recipes: complete experiments that a reader can run, copy and change; installed as ``probelens.examples``.

A recipe is a module with a dataclass ``Config``, a dict ``PRESETS`` of changes to it, and two functions.
``run(config, progress) -> Path`` runs what the run folder ``config.out`` lacks, writes its ``RunRecord``, rows and report,
and returns the folder; it raises an InputError for settings that can't be used or a folder that holds another run, and a
ProbelensError where a cell failed, after reporting the others. ``report(config, record) -> Path`` writes rows and report
again from saved results and returns the report's path; a StoreError says that no cell is finished. A recipe without
``report`` can only be run again.

A recipe in a folder of its own, ``recipe.py``, has ``Config`` and ``PRESETS`` in ``settings.py`` beside it, which loads no
torch: ``probelens list`` reads these alone.
"""

RECIPES: dict[str, str] = {
    "quickstart": "probelens.examples.quickstart",
    "paper-formal": "probelens.examples.refit_the_probe.formal.recipe",
    "paper-pretrain": "probelens.examples.refit_the_probe.pretraining.recipe",
    "paper-pretrained": "probelens.examples.refit_the_probe.pretrained.recipe",
    "paper-code-depth": "probelens.examples.refit_the_probe.code_depth.recipe",
}
