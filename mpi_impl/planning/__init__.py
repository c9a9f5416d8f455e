"""Choosing how to share a model out over a cluster, before it is there: what fits, how long it takes, and why."""
