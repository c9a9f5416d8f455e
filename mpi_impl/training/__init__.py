"""A training step on ranks: batches, the trainer, the optimizer, and the proof against the textbook."""
