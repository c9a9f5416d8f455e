"""Demos, each of one idea on any number of ranks: `python -m mpi_impl.launch -n 4 -m mpi_impl.demos.memory`."""

# In the order in which to look at them.
DEMOS = ("collectives", "mlp", "attention", "embedding", "cross_entropy", "sequence_parallel", "llama",
         "ring_attention", "context_parallel", "pipeline", "zero", "experts", "memory", "deadlock", "train")
