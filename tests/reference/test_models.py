"""Whole models: the formulas of BERT's papers, and who attends to whom."""
import numpy as np
from hypothesis import given, strategies as st

from reference.layer_context import LayerContext
from reference.layers.block import block_backward, block_forward, block_tensors
from reference.models.bert import bert_forward, bert_tensors, classifier_of
from reference.models.gpt import gpt_forward, gpt_logits, gpt_tensors
from reference.ops import ACTIVATIONS
from tests import textbook_theorems as theorems
from tests.strategies import ANY_MODEL, cases, close

ONE_RANK = dict(sizes=st.just(1), architectures=("bert",))


@given(cases(sizes=st.just(1)))
def test_logits_and_loss_are_of_the_same_model(case):
    c, p, batch = case.model, case.params(gpt_tensors(case.model)), case.batch("", case.b)
    losses, _ = gpt_forward(batch.tokens, p, c, batch.targets)
    for loss, logits, targets in zip(losses, gpt_logits(batch.tokens, p, c), batch.targets, strict=True):
        close(loss, log_loss(logits, targets))


# ---- the papers' formulas, written out ------------------------------------------------------------------------------


@given(cases(**ONE_RANK, position_embedding_type="learned_absolute", llama=False))
def test_losses_follow_from_the_formulas(case):
    """The formulas see each sample by itself, without its padding, so they need no mask.

    The norm that Devlin et al. put behind a residual sum is here the first norm of the next branch; the first of them
    is the norm of the embeddings' sum.
    """
    c, batch = case.model, case.batch("", case.b)
    p = case.params(bert_tensors(c))
    losses = dict(zip(c.heads, bert_forward(None, p, c, batch)[0], strict=True))
    encoded = [(original if c.apply_residual_connection_post_layernorm else rearranged)(embedded(*sample, p), p, c)
               for sample in zip(batch.tokens, batch.token_types, batch.lengths, strict=True)]
    if "lm" in losses:
        for i, x in enumerate(encoded):
            to_predict = np.flatnonzero(batch.weights[i, :len(x)])
            formula = log_loss(words(x, p, c), batch.targets[i, :len(x)])
            close(losses["lm"][i, to_predict], formula[to_predict], 1e-10)
        assert (losses["lm"] != 0).sum(1).max() <= c.most_predicted(case.s)
    if "sop" in losses:
        close(losses["sop"], log_loss(np.stack([first(x, p, p.binary_head) for x in encoded]), batch.swapped), 1e-10)
    if "span" in losses:
        close(losses["span"], np.stack([log_loss((x @ p.span_head.w + p.span_head.b).T, answer)
                                        for x, answer in zip(encoded, batch.answers, strict=True)]), 1e-10)
    for head in losses.keys() - {"lm", "sop", "span"}:
        scores = np.stack([first(x, p, classifier_of(p, head)) for x in encoded]).reshape(len(batch.answers), -1)
        close(losses[head], log_loss(scores, batch.answers), 1e-10)


def embedded(tokens, token_types, n, p):
    """Map tokens, token_types [s] -> [n, h], for n real tokens."""
    e = p.embedding
    return e.word[tokens[:n]] + e.position[:n] + e.token_type[token_types[:n]]


def original(x, p, c):
    """Compute the blocks with layer norms after the sums (Devlin et al. 2018; Vaswani et al. 2017, section 3.1)."""
    x = norm(x, p.blocks[0].input_layernorm, c)
    for layer, block in p.blocks.items():
        x = norm(x + attention(x, block.attention), block.post_attention_layernorm, c)
        behind = p.final_layernorm if layer == c.num_layers - 1 else p.blocks[layer + 1].input_layernorm
        x = norm(x + mlp(x, block.mlp, c), behind, c)
    return x


def rearranged(x, p, c):
    """Compute the blocks with layer norms inside the branches (Shoeybi et al. 2019, figure 7)."""
    for block in p.blocks.values():
        x = x + attention(norm(x, block.input_layernorm, c), block.attention)
        x = x + mlp(norm(x, block.post_attention_layernorm, c), block.mlp, c)
    return norm(x, p.final_layernorm, c)


def norm(x, p, c):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + c.layernorm_epsilon) * p.weight + p.bias


def attention(x, p):
    """Map [n, h] -> [n, h]."""
    q, k, v = np.einsum("nh,hcad->cnad", x, p.w_qkv) + p.b_qkv[:, None]
    scores = np.exp(np.einsum("iad,jad->aij", q, k) / np.sqrt(q.shape[-1]))
    return np.einsum("aij,jad->iad", scores / scores.sum(-1, keepdims=True), v).reshape(len(x), -1) @ p.w_out + p.b_out


def mlp(x, p, c):
    return activated(x @ p.w_in + p.b_in, c) @ p.w_out + p.b_out


def activated(x, c):
    return ACTIVATIONS[c.activation][0](x)[0]


def words(x, p, c):
    """Map [n, h] -> logits [n, V]."""
    head = p.lm_head
    return norm(activated(x @ head.dense.w + head.dense.b, c), head.layernorm, c) @ p.embedding.word.T + head.bias


def first(x, p, classifier):
    """Map [n, h] -> logits of a head that reads [CLS]."""
    return np.tanh(x[0] @ p.pooler.w + p.pooler.b) @ classifier.w + classifier.b


def log_loss(logits, targets):
    """Map logits [n, V], targets [n] -> loss [n]."""
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(targets)), targets]


# ---- who sees whom --------------------------------------------------------------------------------------------------


@given(cases(sizes=st.just(1), architectures=ANY_MODEL, layernorm_epsilon=0.1))
def test_a_position_attends_to_all_real_positions_and_itself(case):
    """In one layer, a position's loss has a gradient by each position that it attends to, and by no other.

    So a later token changes the loss of an earlier one, and a sample of [CLS] alone attends to itself. A GPT's position
    attends to earlier ones.
    """
    c, p, x = case.model, case.params(block_tensors(case.model)), case.x()
    lengths, at = theorems.lengths_of(case), np.arange(case.s)
    y, cache = block_forward(x, p, c, LayerContext(rotary=theorems.rotary_of(case), lengths=lengths))
    for i in at:
        dx, _ = block_backward(np.where((at == i)[:, None], case.x("dy"), 0), p, cache, c)
        others = at < i if lengths is None else at < lengths[:, None]
        np.testing.assert_array_equal(abs(dx).max(-1) > 0, np.broadcast_to(others | (at == i), (case.b, case.s)))


# ---- what counts ----------------------------------------------------------------------------------------------------
