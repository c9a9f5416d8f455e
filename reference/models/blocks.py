"""The blocks of a stage: one for each of its layers, or, with `share_layers`, one that all layers use.

ALBERT (Lan et al. 2019, section 3.1) has the parameters of one layer, and computes with them L times. A shared block is
used in every layer, so its gradient is the sum of what the layers would get as blocks of their own. With several stages
each has a copy, and the copies' gradients are summed, as those of a tied word table are.
"""
from reference.layers.block import block_tensors
from reference.params import Shared, tree_map


def blocks_tensors(c, layers):
    """Declare the blocks of these layers."""
    if c.share_layers:
        return Shared(tuple(layers), block_tensors(c, layers[0]))
    return {layer: block_tensors(c, layer) for layer in layers}


def gradients_of_blocks(blocks, of_layers):
    """Return the gradients of the blocks, a tree like them, from those of each layer."""
    if isinstance(blocks, Shared):
        return Shared(blocks.layers, sum_of_trees([of_layers[layer] for layer in blocks]))
    return {layer: of_layers[layer] for layer in blocks}


def join_blocks(parts):
    """Return the blocks of all layers from those of ranks that hold different layers; of a shared one the first copy.
    """
    layers = sorted(layer for blocks in parts for layer in blocks)
    first = next(blocks for blocks in parts if layers[0] in blocks)
    if isinstance(first, Shared):
        return Shared(tuple(layers), first.shared)
    return {layer: blocks[layer] for layer in layers for blocks in parts if layer in blocks}


def sum_of_trees(trees):
    """Add up trees of one form, leaf by leaf."""
    return tree_map(lambda *each: sum(each[1:], each[0]), *trees)
