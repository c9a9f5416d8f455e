"""The ways in which arrays get from rank to rank, and in `choice.py` the choice of one."""
