"""Text from a model, one token after another."""
