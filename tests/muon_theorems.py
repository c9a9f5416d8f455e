"""Muon by its definition, with singular values: the formulas of reference/optimizers/muon.py know none."""
from collections.abc import Iterator

import numpy as np

from reference.models.model import model_tensors
from reference.optimizers.adam import OptimizerConfig
from reference.optimizers.muon import is_matrix, muon_update, orthogonalized
from reference.params import leaves
from tests.cases import Case, close


def muon_is_its_definition(case: Case, nesterov=False):
    """Check two updates of every matrix of a model: each is the momentum with other singular values, and a factor that
    makes outputs as large as inputs.
    """
    c = OptimizerConfig(0.1, 10, weight_decay=0.5, optimizer="muon", muon_use_nesterov=nesterov,
                        muon_scale_mode="unit_rms_norm")
    for name, tensor in leaves(model_tensors(case.model)):
        if not is_matrix(tensor):
            continue
        param, momentum, m = case.array(name, *tensor.shape), 0.0, np.zeros(tensor.shape)
        expected = param.copy()
        for step in range(2):
            grad = case.array(f"{name} {step}", *tensor.shape)
            muon_update(param, grad, m, tensor, 0.1, c, orthogonalized)
            momentum = 0.95 * momentum + 0.05 * grad
            ahead = 0.95 * momentum + 0.05 * grad if nesterov else momentum
            expected *= 1 - 0.1 * 0.5
            for at in places_of_matrices(name, ahead):
                expected[at] -= 0.1 * update_by_definition(ahead[at])
        close(m, momentum)
        close(param, expected, 1e-5)            # eps is in the norm


def places_of_matrices(name: str, x) -> Iterator[tuple]:
    """Yield an index of each matrix of a weight, [rows, columns] or [rows, heads, columns of a head]."""
    for expert in [(i,) for i in range(len(x))] if ".experts." in name else [()]:
        several = x[expert].ndim > 2 and not name.endswith("w_q")
        yield from ((*expert, slice(None), i) for i in range(x[expert].shape[1])) if several else [expert]


def update_by_definition(x):
    """Return U p(S) V^T for x [rows, columns, ...], where p is five rounds of the polynomial."""
    u, s, v = np.linalg.svd(x.reshape(len(x), -1), full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (np.sqrt(v.shape[1] / len(u)) * (u * s) @ v).reshape(x.shape)
