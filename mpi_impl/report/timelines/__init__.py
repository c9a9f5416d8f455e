"""Timelines of ranks: recorded by a trace, written for a viewer, drawn beside their prediction."""
