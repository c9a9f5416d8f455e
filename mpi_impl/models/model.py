"""The model of a ModelConfig, GPT or BERT, on one tensor-parallel rank. Its textbook twin is reference/models/model.py.
"""
from mpi_impl.models.bert import bert_backward, bert_forward
from mpi_impl.models.gpt import gpt_backward, gpt_forward
from reference.layer_context import TRAINING
from reference.models.stage import has_embedding, has_head


def model_forward(x, p, c, batch, region, context=TRAINING):
    """Map the x [b, s, h] of the stage before, if there is one, to the loss of each head, or to the x for the next."""
    if c.architecture == "bert":
        return bert_forward(x, p, c, batch, region, context)
    y, cache = gpt_forward(batch.tokens if has_embedding(p) else x, p, c, batch.targets, region, context)
    return (y,) if has_head(p, c) else y, cache


def model_backward(dy, p, cache, c, grads, sink, region):
    """Map the gradients of the losses, or dx of the next stage, to dx [b, s, h], or None for tokens."""
    if c.architecture == "bert":
        return bert_backward(dy, p, cache, c, grads, sink, region)
    return gpt_backward(dy[0] if has_head(p, c) else dy, p, cache, c, grads, sink, region)
