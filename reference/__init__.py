"""The textbook: a transformer and its splits in plain NumPy, all ranks in one process, written to be read."""
