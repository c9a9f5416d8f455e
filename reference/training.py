"""Training in one process: the run that every sharded run must equal."""
from math import sqrt

import numpy as np

from reference.dropout import Dropout
from reference.models.gpt import gpt_backward, gpt_forward, gpt_tensors
from reference.optimizer import adam_update, clip_coefficient, learning_rate, sum_of_squares
from reference.params import initialize, leaves, tree_map


def loss_and_gradients(tokens, targets, p, c, dropout=None):
    """The mean loss over all b s positions, a float, and its gradients, as a GPT. tokens, targets [b, s].

    `dropout` is a Dropout, or None where nothing is dropped.
    """
    losses, cache = gpt_forward(tokens, p, c, targets, dropout)
    dloss = np.full_like(losses, 1 / losses.size)   # every position weighs the same
    _, grads = gpt_backward(dloss, p, cache, c)
    return float(losses.mean()), grads


class Trainer:
    """A GPT, its Adam moments, and one step after another over whole global batches."""

    def __init__(self, model, optimizer, seed, dtype):
        """`model` is a ModelConfig, `optimizer` an OptimizerConfig."""
        self.model, self.optimizer, self.seed = model, optimizer, seed
        self.tensors = gpt_tensors(model)
        self.params = initialize(self.tensors, seed, dtype)
        self.m = tree_map(np.zeros_like, self.params)
        self.v = tree_map(np.zeros_like, self.params)
        self.iteration = 0

    def step(self, tokens, targets):
        """One step on the global batch, tokens and targets [B, s] -> loss, norm before clipping, clipped gradients."""
        self.iteration += 1
        dropout = Dropout(self.model, self.seed, self.iteration)
        loss, grads = loss_and_gradients(tokens, targets, self.params, self.model, dropout)
        norm = sqrt(sum(sum_of_squares(grad) for _, grad in leaves(grads)))
        clip = clip_coefficient(norm, self.optimizer.clip_grad)
        grads = tree_map(lambda grad: grad * clip, grads)
        lr = learning_rate(self.optimizer, self.iteration)
        tree_map(lambda param, grad, m, v, tensor: adam_update(param, grad, m, v, self.iteration, lr, tensor.decay,
                                                               self.optimizer),
                 self.params, grads, self.m, self.v, self.tensors)
        return loss, norm, grads
