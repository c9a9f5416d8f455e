"""One tensor-parallel rank's part of each layer. Each file's twin in reference/layers holds the tensors' declarations.

`region` is what happens at the edges of the tensor-parallel region (comm/mappings.py). `sink(grad, x, dy)` means
grad += x^T dy, now or when it is due; other gradients are added to `grads`, views of a flat buffer, at once.
"""
