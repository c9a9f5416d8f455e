"""Demos, each of one idea on any number of ranks: `python -m mpi_impl.launch -n 4 -m shardlab.demos.memory`."""
import ast
from pathlib import Path

# In the order in which to look at them.
DEMOS = ("collectives", "mlp", "attention", "embedding", "cross_entropy", "sequence_parallel", "llama",
         "context_parallel", "pipeline", "stale_weights", "zero", "experts", "memory", "deadlock", "train")


def docstring(demo: str) -> str:
    """Read a demo's docstring without importing the demo: that would start MPI."""
    source = Path(__file__).with_name(f"{demo}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def title(demo: str) -> str:
    """Return the docstring's first line, without the command at its end."""
    return docstring(demo).split("\n")[0].split(": `")[0]
