"""Sharding that is derived: layers written once, on whole arrays with named axes, and a layout on a mesh of ranks."""
