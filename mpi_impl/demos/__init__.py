"""A door: `mpirun -np 8 python -m mpi_impl.demos.mlp`; the demo is in `shardlab/demos/`."""
