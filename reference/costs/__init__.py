"""The cost of a run in parameters, FLOPs, bytes and seconds: the papers' formulas, and an inventory of our machine."""
