"""One file a layer: whole, and with all tensor-parallel ranks in one process. `split` in reference/params.py cuts."""
