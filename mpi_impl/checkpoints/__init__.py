"""A run on disk, between two steps: our own checkpoints, and Hugging Face's format."""
