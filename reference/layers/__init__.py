"""Layers, one file each: the whole layer, and all its tensor-parallel ranks in one process."""
