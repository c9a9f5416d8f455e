"""Collectives over a list with one array per rank, and the operators f and g."""
