"""Reports of a run: before its first step, during the run, and at its end, next to the formulas."""
