"""Whole models, and any contiguous range of a model's layers."""
