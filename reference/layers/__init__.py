"""The layers of a transformer in the textbook: whole, and on t ranks. Every kind of layer is listed here.

Of those with one name a model has the first that its config chooses; GPT's are last.
"""
from reference.layers import (attention, experts, gated_mlp, grouped_attention, layer_norm, mlp, rms_norm,
                              squared_relu_mlp)
from reference.layers.layer import LAYERS

LAYERS.update({kind.LAYER.tensors: kind.LAYER for kind in (grouped_attention, attention, gated_mlp, squared_relu_mlp,
                                                           mlp, experts, rms_norm, layer_norm)})
