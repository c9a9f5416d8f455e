"""Ways to share a model's work that leave its layers as they are."""
