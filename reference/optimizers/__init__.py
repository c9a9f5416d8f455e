"""Optimizers: Adam, and Muon for matrices."""
