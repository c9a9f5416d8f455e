"""The notebook extension: `%load_ext shardlab.notebook` adds the magic `%%ranks` and displays figures."""
from shardlab.notebook.ranks import load_ipython_extension

__all__ = ["load_ipython_extension"]
