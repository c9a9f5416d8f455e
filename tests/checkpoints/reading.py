"""A helper for tests on a checkpoint's files: it spoils one."""

import json
import shutil
from pathlib import Path


def with_a_layer_too_few(folder, to) -> Path:
    """Copy a folder in Hugging Face's layout; the copy's config.json says that the model has a layer more."""
    to = shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (name,) = {"n_layer", "num_hidden_layers"} & config.keys()
    (to / "config.json").write_text(json.dumps(config | {name: config[name] + 1}))
    return to
