"""The ways in which arrays get from rank to rank, and in `choice.py` the choice of one."""

BACKENDS = ("nccl", "mpi", "staged")     # between GPUs; without --distributed-backend, the first that is possible
