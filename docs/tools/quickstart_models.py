"""Put the models of a run of the quickstart into the package, with their checksums.

probelens run quickstart --trained none --out RUN
python docs/tools/quickstart_models.py RUN
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys

from probelens.examples.trained import FOLDER
from probelens.experiments import Store

SETTINGS = ("arch", "seed", "length", "steps")


def main(run: str) -> None:
    """Copy each cell's model and training, and write ``models.json``."""
    store, out = Store(run), []
    for key in sorted(store.keys()):
        about = store.config(key)
        names = {"model": f"{about['arch']}.safetensors", "training": f"{about['arch']}-training.safetensors"}
        for what, name in names.items():
            shutil.copyfile(store.cell(key) / f"{what}.safetensors", FOLDER / name)
        sums = {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in names.values()}
        command = f"probelens run quickstart --trained none --archs {about['arch']}"
        out.append({"settings": {k: about[k] for k in SETTINGS}, "sha256": sums, "command": command})
    out.sort(key=lambda each: each["settings"]["arch"])
    (FOLDER / "models.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
