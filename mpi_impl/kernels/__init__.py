from reference.ops import (ACTIVATIONS, attention_core, attention_core_backward, layer_norm, layer_norm_backward, linear, lookup, lookup_backward, rotary_angles, rotate, rotate_backward, rows)
def accumulate(grad, x, dy):
    grad += rows(x).T @ rows(dy)
