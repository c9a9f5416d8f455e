"""Predict what a run will send and hold: a rank runs its own code on arrays without data, among imagined ranks."""
