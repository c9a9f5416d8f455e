"""GPT, or a stage of it, on one tensor-parallel rank. Its textbook twin is reference/models/gpt.py."""
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.layers.cross_entropy import cross_entropy_backward, cross_entropy_forward
from mpi_impl.layers.embedding import embedding_backward, embedding_forward, logits_backward, logits_forward
from mpi_impl.layers.layer_norm import layer_norm_backward, layer_norm_forward
from reference.models.gpt import GPT, GPTCache, has_embedding, has_head, output_table, stage_rotary


def gpt_forward(x, p: GPT, c, targets, region):
    """Tokens [b, s], or the x [b, s, h] of the stage before -> loss [b, s], or the x [b, s, h] for the next stage."""
    x, embedding, blocks = hidden_forward(x, p, c, region)
    head = None
    if has_head(p, c):
        x, head = head_forward(x, p, c, targets, region)
    return x, GPTCache(embedding, blocks, head)


def gpt_backward(dy, p: GPT, cache, c, grads: GPT, sink, region):
    """dloss [b, s], or dx of the next stage [b, s, h] -> dx [b, s, h], or None for tokens.

    `sink.done(...)` is told which tensors have all that this microbatch gives them.
    """
    if has_head(p, c):
        dy = head_backward(dy, p, cache.head, grads, sink, region)
        sink.done(grads.final_layernorm, output_table(grads))
    for layer in reversed(p.blocks):
        dy = block_backward(dy, p.blocks[layer], cache.blocks[layer], c, grads.blocks[layer], sink, region)
        sink.done(grads.blocks[layer])
    if has_embedding(p):
        embedding_backward(dy, p.embedding, cache.embedding, grads.embedding, region)
        sink.done(grads.embedding)
        return None
    return dy


def gpt_logits(x, p: GPT, c, region):
    """Tokens [b, s], or the x of the stage before -> this rank's logits [b, s, V/t], or the x for the next stage."""
    x, _, _ = hidden_forward(x, p, c, region)
    if not has_head(p, c):
        return x
    normed, _ = layer_norm_forward(x, p.final_layernorm, c.layernorm_epsilon)
    return logits_forward(normed, output_table(p), c.vocab_size, region)[0]


def hidden_forward(x, p: GPT, c, region):
    """All of a stage but the head: -> x [b, s, h] and the caches of embedding and blocks."""
    embedding, blocks = None, {}
    if has_embedding(p):
        x, embedding = embedding_forward(x, p.embedding, region)
    rotary = stage_rotary(x, c)
    for layer, block in p.blocks.items():
        x, blocks[layer] = block_forward(x, block, c, rotary, region)
    return x, embedding, blocks


def head_forward(x, p: GPT, c, targets, region):
    """x [b, s, h] -> loss [b, s], alike on all ranks."""
    normed, norm = layer_norm_forward(x, p.final_layernorm, c.layernorm_epsilon)
    logits, logits_cache = logits_forward(normed, output_table(p), c.vocab_size, region)
    loss, loss_cache = cross_entropy_forward(logits, targets, region.group)
    return loss, (norm, logits_cache, loss_cache)


def head_backward(dloss, p: GPT, cache, grads: GPT, sink, region):
    """dloss [b, s] -> dx [b, s, h], alike on all ranks."""
    norm, logits_cache, loss_cache = cache
    dlogits = cross_entropy_backward(dloss, loss_cache)
    dnormed = logits_backward(dlogits, output_table(p), logits_cache, output_table(grads), sink, region)
    return layer_norm_backward(dnormed, p.final_layernorm, norm, grads.final_layernorm)
