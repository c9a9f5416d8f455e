"""Context parallelism, in a GPT's training step: `mpirun -np 4 python -m mpi_impl.demos.context_parallel`.

It runs the same step three times, on ranks of which each has its own positions of every text: attention's keys travel
around a ring, or are gathered, or heads are exchanged for positions. It shows what each way sends, that a rank keeps
1/c of the activations, and why the loss must be a sum over all ranks (Megatron's --cp-comm-type has the same names).
"""
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.demos.printing import Check, count, say, say_aligned, traffic_table
from mpi_impl.demos.ring_attention import positions
from mpi_impl.demos.sizes import check_size
from mpi_impl.launch.entry import ArgumentParser, run
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import CP_COMM_TYPES, ModelConfig, ParallelConfig, round_up
from reference.models.gpt import gpt_forward
from reference.optimizer import OptimizerConfig
from reference.parallel.data_parallel import mean_of_means, weighted_loss
from reference.params import leaves
from reference.positions import SequencePart, deal, zigzag
from reference.precision import Precision
from reference.training import trainer as training

SHOWN = 96      # positions that are drawn
SAMPLES, HEAD_SIZE, CHUNK, WORDS, SEED = 2, 4, 2, 11, 1

INTRODUCTION = """\
With context parallelism {ranks} (processes, each with memory of its own) have the same texts and the same weights,
but each has different positions: two of 2 c chunks. All but attention works as if these positions were the whole text,
as long as it knows where they are: for rope, position tables, dropout's masks, and the targets at the end of each
chunk. The gradients of all ranks are summed, as those of replicas are. Attention needs the keys and values of others:

  p2p         keys and values travel around the ring of ranks, block by block, while blocks are computed
  all_gather  every rank gets all keys and values in one go
  a2a         ranks exchange heads for positions: each gets all positions of 1/c of its heads, and back (Ulysses)
"""


class Stepped(NamedTuple):
    """The results of a training step on this rank."""

    loss: float
    grads: Any
    activations: int        # bytes
    sent: Ledger            # by the context group


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="mpi_impl.demos.context_parallel", description="Show training in which each rank has "
                            "its own positions.")
    parser.add_argument("--chunk-length", type=int, metavar="N", default=CHUNK,
                        help=f"positions in a chunk, of which a rank has two (default: {CHUNK})")
    n, c = parser.parse_args(argv).chunk_length, ranks.size
    a, s = round_up(4, c), 2 * c * n
    check_size("chunk_length", n, 8 * SAMPLES * a * s**2)
    say(ranks, INTRODUCTION.format(ranks=count(c)))
    model = ModelConfig(2, a * HEAD_SIZE, a, WORDS, s, init_method_std=0.2, make_vocab_size_divisible_by=1)
    batch, textbook = batch_of(s), training.Trainer(model, OPTIMIZER, SEED, Precision("float64"))
    show_losses(ranks, model, batch, textbook.params)

    loss, _, grads = textbook.step(batch)
    found = {way: step(ranks, model, batch, way) for way in CP_COMM_TYPES}
    whole = step(ranks.split(ranks.rank, "alone"), model, batch, "p2p")
    say(ranks, "\nA training step in each way. What a rank keeps for the backward of its layers, in bytes, and 1/c of "
               "what one rank\nwould keep (a ring keeps less, since it computes probabilities again):")
    say_aligned(ranks, *(f"{way} {one.activations:,};" for way, one in found.items()),
                f"1/c of one rank's {whole.activations // c:,}")
    sent = Ledger()
    for one in found.values():
        sent.add(one.sent)
    say(ranks, f"\nWhat attention moved, on each rank, in two layers:\n{traffic_table(sent)}\n")

    check = Check()
    for one in found.values():
        check.equal("the loss", one.loss, loss)
        check.equal("every gradient", flat(one.grads), flat(grads))
    check.conclude(ranks)


OPTIMIZER = OptimizerConfig(1e-3, 10, clip_grad=0.0)


def batch_of(s: int) -> GPTBatch:
    """Return texts of s words, of which a third is a question: its tokens are read, but not predicted."""
    words = np.random.default_rng(SEED).integers(0, WORDS, (SAMPLES, s + 1))
    weights = np.ones((SAMPLES, s), np.int64)
    weights[:, :s // 3] = 0
    return GPTBatch(words[:, :-1], words[:, 1:], weights)


def show_losses(ranks: Group, model: ModelConfig, batch: GPTBatch, params) -> None:
    """Print each rank's part of the loss: how many tokens count there, and what the mean of the ranks' means would be.
    """
    chunks = zigzag(ranks.size, batch.tokens.shape[1])
    losses, _ = gpt_forward(batch.tokens, params, model, batch.targets)
    parts, weights = deal(losses, chunks), deal(batch.weights, chunks)
    mine, own = parts[ranks.rank], weights[ranks.rank]
    right, wrong = weighted_loss(parts, weights)[0], mean_of_means(parts, weights)[0]
    say(ranks, ranks_of_positions(chunks, batch.tokens.shape[1]))
    say(ranks, "Who has what. The first third of each text is a question, whose tokens do not count in the loss:")
    say_aligned(ranks, f"{positions(chunks[ranks.rank])};", f"{own.sum()} tokens count,",
                f"the sum of their losses is {(mine * own).sum():.3f}")
    say(ranks, f"So the loss is the sum of all sums over the number of all tokens that count, {right:.6f}. (The mean "
               f"of the ranks'\nmeans is {wrong:.6f}: tokens on ranks with few of them would count for more.)")


def ranks_of_positions(chunks: list[list[slice]], s: int) -> str:
    """Draw the text's positions in order, each as the letter of its rank."""
    drawn = np.empty(s, "<U1")
    for rank, own in enumerate(chunks):
        for chunk in own:
            drawn[chunk] = ascii_lowercase[rank % len(ascii_lowercase)]
    shown = "".join(drawn) if s <= SHOWN else f"{''.join(drawn[:SHOWN])} ..."
    return (f"The ranks of the positions, from the text's first to its last, a for rank 0:\n\n  {shown}\n\n"
            "A token attends to those before it, so later positions are more work: each rank has an early and a late "
            "chunk.\n")


def step(ranks: Group, model: ModelConfig, batch: GPTBatch, way: str) -> Stepped:
    """Do one training step on these ranks, each with its own positions."""
    topology = connect(ranks, ParallelConfig(context_parallel_size=ranks.size, cp_comm_type=way))
    try:
        trainer, before = Trainer(ModelState(model, topology, SEED, Precision("float64")), OPTIMIZER), Ledger()
        before.add(ranks.ledger)
        trainer.measured = True
        chunks = zigzag(ranks.size, batch.tokens.shape[1])
        result = trainer.step([batch.at(SequencePart(ranks.rank, chunks))], SAMPLES)
        grads = trainer.state.layout.views(trainer.state.gradients.own.flat)
        return Stepped(result.loss, grads, trainer.peaks.activations, sent_since(before, ranks.ledger, way))
    finally:
        disconnect(topology)


def sent_since(before: Ledger, ledger: Ledger, way: str) -> Ledger:
    """Return what a context group has sent, with the way in the name of the phase."""
    found = Ledger()
    for entry, total in ledger.totals.items():
        if entry.group == "context" and total != before.totals.get(entry, (0, 0)):
            old = before.totals.get(entry, (0, 0))
            found.totals[entry._replace(phase=f"{way}: {entry.phase}")] = total._replace(
                calls=total.calls - old[0], elements=total.elements - old[1])
    return found


def flat(tree):
    """Return all elements of a tree in one array."""
    return np.concatenate([np.ravel(x) for _, x in leaves(tree)])


if __name__ == "__main__":
    run(lambda: show(world()))
