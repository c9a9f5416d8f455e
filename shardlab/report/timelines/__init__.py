"""Timelines of ranks: recorded by a trace, written for a viewer, drawn next to their prediction."""
