"""The model of a ModelConfig, GPT or BERT: a trainer calls these functions, and need not know which model it trains."""
from reference.batches import BERTBatch, ChoiceBatch, ClassBatch, GPTBatch, SpanBatch
from reference.layer_context import TRAINING
from reference.models.bert import bert_backward, bert_forward, bert_tensors
from reference.models.gpt import gpt_backward, gpt_forward, gpt_tensors
from reference.models.stage import has_embedding, has_head

TUNED = {"choice": ChoiceBatch, "entailment": ClassBatch, "paraphrase": ClassBatch, "span": SpanBatch}


def batch_type(c):
    """Return the type of the model's batches."""
    return GPTBatch if c.architecture == "gpt" else TUNED.get(c.heads[0], BERTBatch)


def sequences_of(c):
    """Return the number of sequences in a sample."""
    return TUNED[c.heads[0]].sequences() if c.heads[0] in TUNED else 1


def model_tensors(c, layers=None):
    """Declare the tensors of the stage that has these layers, a range; of the whole model without one."""
    return (gpt_tensors if c.architecture == "gpt" else bert_tensors)(c, layers)


def model_forward(x, p, c, batch, context=TRAINING):
    """Map the x [b, s, h] of the stage before, if there is one, to the loss of each head, or to the x for the next."""
    if c.architecture == "bert":
        return bert_forward(x, p, c, batch, context)
    y, cache = gpt_forward(batch.tokens if has_embedding(p) else x, p, c, batch.targets, context)
    return (y,) if has_head(p, c) else y, cache


def model_backward(dy, p, cache, c):
    """Map the gradients of the losses, or dx of the next stage, to dx [b, s, h], or None for tokens; and return the
    gradients of the parameters.
    """
    if c.architecture == "bert":
        return bert_backward(dy, p, cache, c)
    return gpt_backward(dy[0] if has_head(p, c) else dy, p, cache, c)
