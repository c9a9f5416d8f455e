"""Layers on one tensor-parallel rank. Each file's twin in reference/layers holds the tensors' declarations.

`region` is the behaviour at the edges of the tensor-parallel region (comm/regions.py): outside, arrays are identical
on every rank, or with sequence parallelism each rank has its own positions, and s counts only those. `sink(grad, x,
dy)` means grad += x^T dy, now or later; other gradients are added to `grads`, views of a flat buffer, immediately.
"""
from mpi_impl.layers import (attention, experts, gated_mlp, grouped_attention, layer_norm, mlp, rms_norm,
                             squared_relu_mlp)
from mpi_impl.layers.layer import LAYERS

LAYERS.update({kind.LAYER.tensors: kind.LAYER for kind in (grouped_attention, attention, gated_mlp, squared_relu_mlp,
                                                           mlp, experts, rms_norm, layer_norm)})
