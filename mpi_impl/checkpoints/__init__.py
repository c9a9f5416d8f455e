"""A run on disk, between two steps: our own checkpoints, and weights as others have them."""
