"""One tensor-parallel rank's part of each layer. Each file's twin in reference/layers holds the tensors' declarations.

`region` is what happens at the edges of the tensor-parallel region (comm/mappings.py): outside, arrays are alike on all
ranks, or under sequence parallelism each rank has its positions, and s stands for as many. `sink(grad, x, dy)` means
grad += x^T dy, now or when it is due; other gradients are added to `grads`, views of a flat buffer, at once.
"""
