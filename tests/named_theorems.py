"""Theorems about programs with named axes (reference/named/), on all ranks in lists or on real ones: what a layout
derives is the textbook's whole layer, and sends what the machine's layer sends.
"""
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpi_impl import kernels
from mpi_impl.comm.mesh import RankMesh
from mpi_impl.layers import block, cross_entropy, embedding, layer
from reference.comm.ring import RING
from reference.config import ModelConfig
from reference.layers import block as textbook_block, embedding as textbook_embedding
from reference.layers.attention import Attention
from reference.layers.block import Block
from reference.layers.cross_entropy import cross_entropy_backward, cross_entropy_forward
from reference.layers.gated_mlp import GatedMLP
from reference.layers.grouped_attention import GroupedAttention
from reference.layers.layer import declare, layer_backward, layer_forward
from reference.layers.layer_norm import LayerNorm
from reference.layers.mlp import MLP
from reference.named import layers
from reference.named.mesh import Mesh
from reference.named.program import ACTIVATION, CONSTANT, WEIGHT, Program
from tests.cases import Case, close
from tests.rank_theorems import Share

AXES: dict[type, dict[str, str]] = {
    MLP: dict(w_in="h f", b_in="f", w_out="f h", b_out="h"), GatedMLP: dict(w_in="h n f", w_out="f h"),
    Attention: dict(w_q="h g r d", b_q="g r d", w_kv="h n g d", b_kv="n g d", w_out="g r d h", b_out="h"),
    GroupedAttention: dict(w_q="h g r d", w_kv="h n g d", w_out="g r d h"), LayerNorm: dict(weight="h", bias="h")}


@dataclass(frozen=True)
class NamedCase:
    """A layout on a mesh, and the elements of each named axis on a rank."""

    mesh: dict[str, int]
    layout: dict[str, str]
    local: dict[str, int]
    seed: int = 0
    exact: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the named axes. The features are those of all heads, and each position has a key."""
        sizes = {axis: n * prod(self.mesh[m] for of, m in self.layout.items() if of == axis or (of, axis) == ("h", "d"))
                 for axis, n in self.local.items()}
        return sizes | dict(h=sizes["g"] * sizes["r"] * sizes["d"], z=sizes["s"], n=2)

    def textbook(self, grouped: bool) -> Case:
        """Return the textbook's case with these sizes: GPT's layers, or Llama's."""
        n = self.sizes
        llama = dict(num_query_groups=n["g"], kv_channels=n["d"], swiglu=True, add_bias_linear=False) if grouped else {}
        model = ModelConfig(1, n["h"], n["g"] * n["r"], n["V"], n["s"], ffn_hidden_size=n["f"],
                            make_vocab_size_divisible_by=1, hidden_dropout=0.0, attention_dropout=0.0, **llama)
        case = Case(self.mesh.get("t", 1), model, n["b"], n["s"], self.seed,
                    sequence_parallel=self.layout.get("s") == "t", keep_gathered_inputs=True)
        return case.exactly() if self.exact else case


class Layer(NamedTuple):
    """A layer of both kinds: derived, and the textbook's whole one with the numbers for it."""

    program: Program
    values: dict         # of arrays from outside: Named -> whole array
    y: Any               # the result, as a Named,
    expected: Any        # and whole
    dy: Any              # what comes to it from above
    gradients: dict      # Named -> whole gradient


class Writer:
    """A program whose arrays from outside get the textbook's numbers."""

    def __init__(self, case: NamedCase):
        self.p, self.values, self.gradients = Program(case.mesh, case.layout, case.sizes), {}, {}

    def array(self, name, axes, value, gradient=None, role=ACTIVATION):
        x = self.p.array(name, axes, CONSTANT if gradient is None else role)
        self.values[x] = value
        if gradient is not None:
            self.gradients[x] = gradient
        return x

    def weights(self, p, grads):
        """Declare the tensors of a tree with the gradients in another."""
        if isinstance(p, Block):
            return {name: self.weights(one, getattr(grads, name)) for name, one in vars(p).items()}
        values, gradients = ({name: x for name, x in cut_to_heads(tree, self.p.sizes).items() if x is not None}
                             for tree in (p, grads))
        return {name: self.array(name, AXES[type(p)][name], x, gradients[name], WEIGHT) for name, x in values.items()}


def cut_to_heads(tree, n):
    """Return the tensors of a layer, or their gradients, with an axis for each name."""
    g, r, d = n["g"], n["r"], n["d"]
    if isinstance(tree, Attention):
        return dict(w_q=tree.w_qkv[:, 0].reshape(-1, g, r, d), w_kv=tree.w_qkv[:, 1:], b_kv=tree.b_qkv[1:],
                    b_q=tree.b_qkv[0].reshape(g, r, d), w_out=tree.w_out.reshape(g, r, d, -1), b_out=tree.b_out)
    if isinstance(tree, GroupedAttention):
        return dict(w_q=tree.w_q.reshape(-1, g, r, d), w_kv=tree.w_kv, w_out=tree.w_out.reshape(g, r, d, -1))
    return vars(tree)


def layer_of(name: str, case: NamedCase) -> Layer:
    """Write a layer, and compute it as the textbook does."""
    written, textbook = Writer(case), case.textbook(grouped=name in ("grouped attention", "gated mlp"))
    c, x, dy, p = textbook.model, textbook.x(), textbook.x("dy"), written.p
    if name == "embedding":
        ids = textbook.ids("tokens", textbook.b, textbook.s)
        tree = textbook.params(textbook_embedding.embedding_tensors(c))
        expected, cache = textbook_embedding.embedding_forward(ids, tree)
        grads = textbook_embedding.embedding_backward(dy, tree, cache)
        tokens = written.array("tokens", "b s V", np.eye(c.vocab_size)[ids])
        y = layers.embedding(p, tokens, dict(word=written.array("word", "V h", tree.word, grads.word, WEIGHT),
                                             position=written.array("position", "s h", tree.position, grads.position,
                                                                    WEIGHT)))
    elif name == "loss":
        word, ids = textbook.array("word", c.vocab_size, c.hidden_size), textbook.ids("targets", textbook.b, textbook.s)
        dy = textbook.array("dloss", textbook.b, textbook.s)
        logits, kept = textbook_embedding.logits_forward(x, word, c.vocab_size)
        expected, cache = cross_entropy_forward(logits, ids)
        dx, dword = textbook_embedding.logits_backward(cross_entropy_backward(dy, cache), word, kept)
        y = layers.loss(p, written.array("x", "b s h", x, dx), written.array("word", "V h", word, dword, WEIGHT),
                        written.array("targets", "b s V", np.eye(c.vocab_size)[ids]),
                        written.array("ones", "V", np.ones(c.vocab_size)))
    else:
        forward, backward, tensors = WHOLE[name](c)
        tree = textbook.params(tensors)
        expected, cache = forward(x, tree)
        dx, grads = backward(dy, tree, cache)
        past = [written.array("past", "s z", np.tril(np.ones((c.max_position_embeddings,) * 2)))]
        y = WRITTEN[name](p, written.array("x", "b s h", x, dx), written.weights(tree, grads),
                          *(past if name in ("attention", "grouped attention", "block") else []))
    return Layer(p, written.values, p.rest(y), expected, dy, written.gradients)


def one_layer(kind: str) -> Callable:
    return lambda c: (lambda x, p: layer_forward(x, p, c), lambda dy, p, cache: layer_backward(dy, p, cache, c),
                      declare(kind, c))


def norm(c):
    return (lambda x, p: layer_forward(x, p, c.layernorm_epsilon), layer_backward, declare("norm", c))


def whole_block(c):
    return (lambda x, p: textbook_block.block_forward(x, p, c),
            lambda dy, p, cache: textbook_block.block_backward(dy, p, cache, c), textbook_block.block_tensors(c))


WHOLE: dict[str, Callable] = {
    "mlp": one_layer("mlp"), "gated mlp": one_layer("mlp"), "attention": one_layer("attention"),
    "grouped attention": one_layer("attention"), "norm": norm, "block": whole_block}
WRITTEN: dict[str, Callable] = {
    "mlp": layers.mlp, "gated mlp": layers.gated_mlp, "attention": layers.attention,
    "grouped attention": layers.attention, "norm": layers.layer_norm, "block": layers.block}
NAMES = [*WHOLE, "embedding", "loss"]


def derived_is_the_textbook(mesh: Mesh, name: str, case: NamedCase, wrap=lambda x: x) -> list:
    """Check each rank's piece of the result and of every gradient; return the messages, forward and backward."""
    program, values, y, expected, dy, gradients = layer_of(name, case)
    arrays, caches = mesh.forward(program, values)
    for mine, piece in zip(arrays[y], mesh.deal(expected, y), strict=True):
        close(mine, piece)
    forward = list(mesh.messages)
    mesh.messages.clear()
    found = mesh.backward(program, caches, {y: mesh.deal(dy, y)})
    for x, whole in gradients.items():
        for mine, piece in zip(found[x], mesh.deal(whole, x), strict=True):
            close(mine, piece)
    return [forward, mesh.messages]


# ---- on real ranks --------------------------------------------------------------------------------------------------


def derived_on_ranks_is_the_textbook(group, name: str, case: NamedCase) -> None:
    """Check it on one real rank of the mesh; that it holds, of all arrays, what lists have for it; and that the ledger
    has the messages, and no others.
    """
    places = dict(zip(case.mesh, np.unravel_index(group.rank, tuple(case.mesh.values()))))
    groups = {m: group.split(int(group.rank - places[m] * prod(list(case.mesh.values())[i + 1:])), m)
              for i, m in enumerate(case.mesh)}
    program, values, *_ = layer_of(name, case)
    mine, ours = (mesh.forward(program, values)[0] for mesh in (RankMesh(groups), Mesh(case.mesh)))
    for named, (x,) in mine.items():
        close(x, ours[named][group.rank])
    before = sent(group.ledger)
    messages = derived_is_the_textbook(RankMesh(groups), name, case)
    counted = Counter[tuple[str, str]]()
    for operation, _, m, elements in sum(messages, []):
        counted[operation, m] += elements
    assert counted == sent(group.ledger) - before
    for one in groups.values():
        one.free()


def sent(ledger) -> Counter:
    """Return the elements in the ledger by operation and group."""
    counted = Counter[tuple[str, str]]()
    for entry, total in ledger.totals.items():
        counted[entry.operation, entry.group] += total.elements
    return counted


def machine_sends_what_is_derived(group, name: str, case: NamedCase) -> None:
    """Compare the ledger of the machine's layer on t ranks, forward and backward, with the messages of the program.

    The sums of gradients of weights that all ranks hold, in sequence parallelism, are ModelState's, and not compared.
    There the derived loss is of each rank's own positions: what is all-reduced by hand is reduce-scattered forward and
    gathered backward. So of the loss the traffic of both ways is compared, in a ring.
    """
    mesh, textbook = Mesh(case.mesh), case.textbook(grouped=name in ("grouped attention", "gated mlp"))
    messages = derived_is_the_textbook(mesh, name, case)
    weights = {name for kind in AXES.values() for name in kind}
    derived = [Counter[str](), Counter[str]()]
    for counted, phase in zip(derived, messages):
        for operation, of, _, elements in phase:
            counted[operation] += elements * (of not in weights)
    found, before = [], sent(group.ledger)
    backward = machine_forward(group, name, textbook)
    for run in (lambda: None, backward):
        run()
        found.append(Counter[str]())
        for (operation, _), elements in (sent(group.ledger) - before).items():
            found[-1][operation] += elements
        before = sent(group.ledger)
    if name == "loss" and textbook.sequence_parallel:
        found, derived = ([sum(RING[operation](elements, group.size) for phase in phases
                               for operation, elements in phase.items())] for phases in (found, derived))
    assert found == derived, f"the machine sends {found}, derived is {derived}"


def machine_forward(group, name: str, case: Case) -> Callable:
    """Run the machine's forward of a layer on t ranks; return what runs its backward."""
    c, x, dy = case.model, case.x(), case.x("dy")
    if name in ("embedding", "loss"):
        tensors = textbook_embedding.embedding_tensors(c)
        share, ids = Share(group, tensors, case.params(tensors), case), case.ids("tokens", case.b, case.s)
    if name == "embedding":
        _, cache = embedding.embedding_forward(ids, share.p, share.region)
        return lambda: embedding.embedding_backward(share.outside(dy), cache, share.grads, share.region)
    if name == "loss":
        logits, kept = embedding.logits_forward(share.outside(x), share.p.word, c.vocab_size, share.region)
        _, cache = cross_entropy.cross_entropy_forward(logits, ids, group)
        return lambda: embedding.logits_backward(
            cross_entropy.cross_entropy_backward(case.array("dloss", case.b, case.s), cache), share.p.word, kept,
            share.grads.word, kernels.accumulate, share.region)
    one, tensors = (block, textbook_block.block_tensors(c)) if name == "block" else (layer, WHOLE[name](c)[2])
    forward, backward = (getattr(one, f"{one.__name__.rpartition('.')[2]}_{way}") for way in ("forward", "backward"))
    share = Share(group, tensors, case.params(tensors), case)
    _, cache = forward(share.outside(x), share.p, c, share.region)
    return lambda: backward(share.outside(dy), share.p, cache, c, share.grads, kernels.accumulate, share.region)
