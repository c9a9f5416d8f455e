"""The cost of a run in parameters, FLOPs, bytes and seconds, as the papers' formulas have it."""
