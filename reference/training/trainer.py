"""Training in one process: the run that every sharded run must equal."""
import numpy as np

from reference.batches import number_of_tokens
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.models.model import model_backward, model_forward, model_tensors
from reference.optimizers.adam import clip_coefficient, learning_rate, sum_of_squares
from reference.optimizers.muon import update_whole
from reference.params import initialize, leaves, tree_map
from reference.precision import rounded
from reference.random.dropout import Dropout


def loss_and_gradients(batch, p, c, dropout=None, auxiliary=None):
    """Compute the loss over a batch and its gradients: the sum over heads of their weighted means.

    For batches and their weights see reference/batches.py. c is a ModelConfig, p its parameters; `dropout` is a
    Dropout, or None where nothing is dropped. The losses of experts are in the gradients, but not in the loss: they
    are noted in `auxiliary`, if that is given.
    """
    auxiliary = auxiliary or auxiliary_losses(batch)
    losses, cache = model_forward(None, p, c, batch, LayerContext(dropout, auxiliary=auxiliary))
    shares = [weights / max(weights.sum(), 1) for weights in batch.weights_of_heads(c.heads)]
    dlosses = tuple(share.astype(loss.dtype) for share, loss in zip(shares, losses))
    _, grads = model_backward(dlosses, p, cache, c)
    return sum((loss * share).sum() for loss, share in zip(losses, shares)), grads


def auxiliary_losses(batch):
    """Return the AuxiliaryLosses of a global batch."""
    return AuxiliaryLosses(len(batch.tokens), number_of_tokens(batch))


class Trainer:
    """A model and its optimizer's moments, trained one global batch at a time.

    In mixed precision it is the limit that 16 bits approximate: the model computes in float32, with the master weights
    rounded to the 16-bit format, and nothing else rounded. So no gradient overflows, and the loss needs no scale.
    """

    def __init__(self, model, optimizer, seed, precision):
        """Initialize from a ModelConfig, an OptimizerConfig and a Precision."""
        self.model, self.optimizer, self.seed, self.form = model, optimizer, seed, precision.form
        self.tensors = model_tensors(model)
        self.params = self.in_format(initialize(self.tensors, seed, precision.main))     # the master weights
        self.m = tree_map(np.zeros_like, self.params)
        self.v = tree_map(np.zeros_like, self.params)       # of Muon's matrices it stays 0
        self.iteration = self.updates = 0
        self.auxiliary = 0       # the last step's losses of experts, [2], if there are any

    def step(self, batch, skipped=False):
        """Do one step on the global batch; return loss, norm before clipping and clipped gradients.

        A step that is `skipped`, because gradients overflowed in 16 bits elsewhere, changes no weights.
        """
        self.iteration += 1
        dropout = Dropout(self.model, self.seed, self.iteration)
        auxiliary = auxiliary_losses(batch)
        loss, grads = loss_and_gradients(batch, self.in_format(self.params), self.model, dropout, auxiliary)
        self.auxiliary = auxiliary.total
        norm = np.sqrt(sum(sum_of_squares(grad) for _, grad in leaves(grads)))
        clip = clip_coefficient(norm, self.optimizer.clip_grad)
        grads = tree_map(lambda grad: grad * clip, grads)
        if not skipped:
            self.update(grads)
        return loss, norm, grads

    def update(self, grads):
        """Move the weights by Adam, or the matrices by Muon and all else by Adam."""
        self.updates += 1
        lr = learning_rate(self.optimizer, self.updates)
        tree_map(lambda param, grad, m, v, tensor: update_whole(param, grad, m, v, tensor, self.updates, lr,
                                                                self.optimizer),
                 self.params, grads, self.m, self.v, self.tensors)

    def in_format(self, params):
        """Round parameters to the model's format."""
        return tree_map(lambda x: rounded(x, self.form), params)
