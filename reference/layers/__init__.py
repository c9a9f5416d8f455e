"""The layers of a transformer in the textbook: whole, and on t ranks. Every kind of layer is listed here."""
from reference.layers import attention, experts, gated_mlp, grouped_attention, layer_norm, mlp, rms_norm
from reference.layers.layer import LAYERS

LAYERS.update({kind.LAYER.tensors: kind.LAYER for kind in (attention, grouped_attention, mlp, gated_mlp, experts,
                                                           layer_norm, rms_norm)})
