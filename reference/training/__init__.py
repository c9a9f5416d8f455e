"""A training step in one process."""
