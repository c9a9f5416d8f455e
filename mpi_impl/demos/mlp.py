"""The demo of a sharded MLP, under its old address: `mpirun -np 8 python -m mpi_impl.demos.mlp`."""
from runpy import run_module

if __name__ == "__main__":
    run_module("shardlab.demos.mlp", run_name="__main__")
