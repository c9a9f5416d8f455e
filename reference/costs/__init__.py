"""What a run costs in parameters, FLOPs, bytes and seconds: the papers' formulas, and a model of our machine."""
