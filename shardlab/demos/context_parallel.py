"""Context parallelism, in a ring and in a GPT's step: `mpirun -np 4 python -m shardlab.demos.context_parallel`.

It shows how the positions of a text are dealt out so that all ranks have the same work, and how keys and values travel
around the ring (Liu et al. 2023). Then it runs a training step in three ways: attention's keys travel, or are gathered,
or heads are exchanged for positions. It shows what each way sends, that a rank keeps 1/c of the activations, and why
the loss must be a sum over all ranks (Megatron's --cp-comm-type has the same names).
"""
from dataclasses import replace
from typing import Any

import numpy as np

from mpi_impl.layers.context_attention import arrived, attend, pass_on
from reference.batches import GPTBatch
from reference.config import CP_COMM_TYPES, ModelConfig, ParallelConfig, round_up
from reference.layers.online_softmax import finish
from reference.models.gpt import gpt_forward
from reference.ops import CoreInputs, attention_core
from reference.parallel.data_parallel import mean_of_means, weighted_loss
from reference.positions import SequencePart, deal, in_order, visible_blocks, work_of_ranks, zigzag
from shardlab.demos.printing import span, traffic_table
from shardlab.demos.runner import Demo, Size, program, run_demo
from shardlab.demos.tiny_gpt import WORDS, apart, check_tensors, textbook_of, tiny_gpt, training_on

SAMPLES, HEADS, HEAD_SIZE = 2, 2, 4
CHUNK = Size("--chunk-length", "context_parallel", "N", least=2, sharded=False,
             help="positions in a chunk, of which a rank has two")

INTRODUCTION = """\
A text may be so long that the activations of all its positions do not fit on one rank, however layers are sharded.
Context parallelism shards the positions themselves: each of {ranks} (processes, each with memory of its own) has
s/c of them, two of 2 c chunks, through the whole model. Norms, MLPs and the loss treat every position by itself, as
long as they know where it is: for rope, position tables, dropout's masks, and the targets at the end of each chunk. The
gradients of all ranks are summed, as those of replicas are. Only attention needs the keys and values of others:

  p2p         keys and values travel around the ring of ranks, block by block, while blocks are computed
  all_gather  every rank gets all keys and values in one go
  a2a         ranks exchange heads for positions: each gets all positions of 1/c of its heads, and back (Ulysses)

In the ring each rank attends to its own keys, while it sends them to the next rank and receives those of the rank
before; then to these, while it passes them on. After c - 1 steps it has seen all, and never had more than its own and
those that were arriving. But softmax needs a sum over all keys. Online softmax keeps three things for each query: the
largest score m so far, the sum l of exp(score - m), and the sum o of exp(score - m) v. When a later block has a larger
m, l and o are scaled down. At the end o / l is attention's result.
"""


@program(CHUNK.parse)
def show(demo: Demo, n: int) -> None:
    demo.introduce(INTRODUCTION)
    s = 2 * demo.n * n
    demo.say(f"Who has which of s = {s} positions, and how many pairs of a query and a key before it, or itself. In "
             "order the last\nrank has nearly twice the mean, and all wait for it. So a rank gets a chunk from the "
             "front, and one from the back:")
    demo.say_each(*(f"{name} {positions(chunks[demo.rank])}: {work_of_ranks(chunks)[demo.rank]} pairs;"
                    for name, chunks in (("in order", in_order(demo.n, s)), ("zigzag", zigzag(demo.n, s)))))
    show_ring(demo, zigzag(demo.n, s))
    model = replace(tiny_gpt(2, heads=round_up(4, demo.n)), max_position_embeddings=s, hidden_dropout=0.1,
                    attention_dropout=0.1)
    batch = batch_of(s)
    show_losses(demo, model, batch)
    show_ways(demo, model, batch)


def positions(chunks: list[slice]) -> str:
    """Return 'positions 0 to 1 and 14 to 15'."""
    return " and ".join(span(chunk.start, chunk.stop, "position") for chunk in chunks).replace("and positions", "and")


def show_ring(demo: Demo, chunks: list[list[slice]]) -> None:
    """Go around the ring once, step by step, and print what each rank does, and what it knows at the end."""
    c, own, s = demo.n, chunks[demo.rank], chunks[0][-1].stop
    q, k, v = np.random.default_rng(1).normal(size=(3, SAMPLES, s, HEADS, HEAD_SIZE))       # identical on every rank
    own_q, own_k, own_v = (deal(x, chunks)[demo.rank] for x in (q, k, v))
    mine = CoreInputs(own_q, own_k, own_v, causal=True, site=None)
    travelling, cells, found = np.stack([mine.k, mine.v]), [], [None] * len(own)
    with demo.phase("step by step"):
        for step in range(c):
            following = pass_on(travelling, demo.ranks, "keys and values") if step < c - 1 else None
            source = (demo.rank - step) % c
            attend(mine, travelling, own, chunks[source], found, demo.ranks)
            work = sum(block.work for block in visible_blocks(own, chunks[source], causal=True))
            cells.append(f"{source}'s {work};" if step else f"own {work};")
            travelling = arrived(following)
    demo.say("\nThe ring, step by step: how many pairs each rank computes with its own keys, with those of the rank "
             "before it, ...\nAnd what it knows at the end of its last query, for the first head: m and l.")
    last: Any = found[-1]
    demo.say_each(*cells, f"m {last.highest[0, 0, -1, 0]:+.3f}, l {last.total[0, 0, -1, 0]:.3f}")
    demo.say_traffic(f"2 b s/c a d = {2 * mine.k.size} elements of keys and values, c - 1 times:")
    whole, _ = attention_core(q, k, v, True)
    demo.equal("attention in a ring", finish(last), whole[:, own[-1]])


def batch_of(s: int) -> GPTBatch:
    """Return texts of s words, of which a third is a question: its tokens are read, but not predicted."""
    words = np.random.default_rng(1).integers(0, WORDS, (SAMPLES, s + 1))
    weights = np.ones((SAMPLES, s), np.int64)
    weights[:, :s // 3] = 0
    return GPTBatch(words[:, :-1], words[:, 1:], weights)


def show_losses(demo: Demo, model: ModelConfig, batch: GPTBatch) -> None:
    """Print each rank's part of the loss: how many tokens count there, and what the mean of the ranks' means would be.
    """
    chunks = zigzag(demo.n, batch.tokens.shape[1])
    losses, _ = gpt_forward(batch.tokens, textbook_of(model).params, model, batch.targets)
    parts, weights = deal(losses, chunks), deal(batch.weights, chunks)
    mine, own = parts[demo.rank], weights[demo.rank]
    right, wrong = weighted_loss(parts, weights)[0], mean_of_means(parts, weights)[0]
    demo.say("The loss. The first third of each text is a question, whose tokens do not count in it:")
    demo.say_each(f"{own.sum()} tokens count,", f"the sum of their losses is {(mine * own).sum():.3f}")
    demo.say(f"So the loss is the sum of all sums over the number of all tokens that count, {right:.6f}. (The mean "
             f"of the ranks'\nmeans is {wrong:.6f}: tokens on ranks with few of them would count for more.)")


def show_ways(demo: Demo, model: ModelConfig, batch: GPTBatch) -> None:
    """Take the same training step in each way, and on one rank; print what is kept and what is sent."""
    c, part = demo.n, batch.at(SequencePart(demo.rank, zigzag(demo.n, batch.tokens.shape[1])))
    loss, _, grads = textbook_of(model).step(batch)
    kept, sent = {}, {}
    for way in CP_COMM_TYPES:
        own = apart(demo.ranks)
        with training_on(own, model, ParallelConfig(context_parallel_size=c, cp_comm_type=way)) as trainer:
            trainer.measured = True
            demo.equal("the loss", trainer.step([part], SAMPLES).loss, loss)
            check_tensors(demo, "every gradient", trainer, trainer.state.gradients.own, grads)
            kept[way], sent[way] = trainer.peaks.activations, traffic_table(own.ledger, group="context")
    with training_on(demo.ranks.split(demo.rank, "alone"), model, ParallelConfig()) as trainer:
        trainer.measured = True
        trainer.step([batch], SAMPLES)
        kept["1/c of one rank's"] = trainer.peaks.activations // c
    demo.say("\nA training step in each way. What a rank keeps for the backward of its layers, in bytes, and 1/c of "
             "what one rank\nwould keep (a ring keeps less, since it computes probabilities again):")
    demo.say_each(*(f"{way} {size:,};" for way, size in kept.items()))
    for way, table in sent.items():
        demo.say(f"\nWhat attention moved, on each rank, in two layers, with {way}:\n{table}")
    demo.say()


if __name__ == "__main__":
    run_demo(show)
