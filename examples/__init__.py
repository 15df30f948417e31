"""Recipes: complete experiments that a reader can run, copy and change; installed as ``probelens.examples``.

A recipe is a module with a dataclass ``Config``, a dict ``PRESETS`` of changes to it, and a function
``run(config, progress) -> Path`` that writes a run folder (``config.out``) with its ``RunRecord``. With a function
``report(config, record) -> Path`` it can make the report again from the saved results.
"""

RECIPES: dict[str, str] = {
    "quickstart": "probelens.examples.quickstart",
    "paper-formal": "probelens.examples.refit_the_probe.formal.recipe",
    "paper-pretrain": "probelens.examples.refit_the_probe.pretraining.recipe",
    "paper-pretrained": "probelens.examples.refit_the_probe.pretrained.recipe",
    "paper-code-depth": "probelens.examples.refit_the_probe.code_depth.recipe",
}
