"""One rank's part of each model, whole or a stage of it."""
