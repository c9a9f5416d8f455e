"""Context parallelism, in a GPT's training step: `mpirun -np 4 python -m shardlab.demos.context_parallel`.

It runs the same step three times, on ranks of which each has its own positions of every text: attention's keys travel
around a ring, or are gathered, or heads are exchanged for positions. It shows what each way sends, that a rank keeps
1/c of the activations, and why the loss must be a sum over all ranks (Megatron's --cp-comm-type has the same names).
"""
from dataclasses import replace
from string import ascii_lowercase

import numpy as np

from reference.batches import GPTBatch
from reference.config import CP_COMM_TYPES, ModelConfig, ParallelConfig, round_up
from reference.models.gpt import gpt_forward
from reference.parallel.data_parallel import mean_of_means, weighted_loss
from reference.positions import SequencePart, deal, zigzag
from shardlab.demos.printing import traffic_table
from shardlab.demos.ring_attention import positions
from shardlab.demos.runner import Demo, Size, program, run_demo
from shardlab.demos.tiny_gpt import WORDS, apart, check_tensors, textbook_of, tiny_gpt, training_on

SHOWN = 96      # positions that are drawn
SAMPLES = 2
CHUNK = Size("--chunk-length", "context_parallel", "N", least=2, help="positions in a chunk, of which a rank has two",
             numbers=lambda c, n: 8 * SAMPLES * round_up(4, c) * (2 * c * n)**2)

INTRODUCTION = """\
With context parallelism {ranks} (processes, each with memory of its own) have the same texts and the same weights,
but each has different positions: two of 2 c chunks. All but attention works as if these positions were the whole text,
as long as it knows where they are: for rope, position tables, dropout's masks, and the targets at the end of each
chunk. The gradients of all ranks are summed, as those of replicas are. Attention needs the keys and values of others:

  p2p         keys and values travel around the ring of ranks, block by block, while blocks are computed
  all_gather  every rank gets all keys and values in one go
  a2a         ranks exchange heads for positions: each gets all positions of 1/c of its heads, and back (Ulysses)
"""


@program(CHUNK.parse)
def show(demo: Demo, n: int) -> None:
    demo.introduce(INTRODUCTION)
    c = demo.n
    s = 2 * c * n
    model = replace(tiny_gpt(2, heads=round_up(4, c)), max_position_embeddings=s, hidden_dropout=0.1,
                    attention_dropout=0.1)
    batch, textbook = batch_of(s), textbook_of(model)
    show_losses(demo, model, batch, textbook.params)

    loss, _, grads = textbook.step(batch)
    activations, sent = {}, {}
    for way in CP_COMM_TYPES:
        own = apart(demo.ranks)
        with training_on(own, model, ParallelConfig(context_parallel_size=c, cp_comm_type=way)) as trainer:
            trainer.measured = True
            part = batch.at(SequencePart(demo.rank, zigzag(c, s)))
            demo.equal("the loss", trainer.step([part], SAMPLES).loss, loss)
            check_tensors(demo, "every gradient", trainer, trainer.state.gradients.own, grads)
            activations[way], sent[way] = trainer.peaks.activations, traffic_table(own.ledger, group="context")
    with training_on(demo.ranks.split(demo.rank, "alone"), model, ParallelConfig()) as trainer:
        trainer.measured = True
        trainer.step([batch], SAMPLES)
        whole = trainer.peaks.activations
    demo.say("\nA training step in each way. What a rank keeps for the backward of its layers, in bytes, and 1/c of "
             "what one rank\nwould keep (a ring keeps less, since it computes probabilities again):")
    demo.say_aligned(*(f"{way} {kept:,};" for way, kept in activations.items()), f"1/c of one rank's {whole // c:,}")
    for way, table in sent.items():
        demo.say(f"\nWhat attention moved, on each rank, in two layers, with {way}:\n{table}")
    demo.say("")


def batch_of(s: int) -> GPTBatch:
    """Return texts of s words, of which a third is a question: its tokens are read, but not predicted."""
    words = np.random.default_rng(1).integers(0, WORDS, (SAMPLES, s + 1))
    weights = np.ones((SAMPLES, s), np.int64)
    weights[:, :s // 3] = 0
    return GPTBatch(words[:, :-1], words[:, 1:], weights)


def show_losses(demo: Demo, model: ModelConfig, batch: GPTBatch, params) -> None:
    """Print each rank's part of the loss: how many tokens count there, and what the mean of the ranks' means would be.
    """
    chunks = zigzag(demo.n, batch.tokens.shape[1])
    losses, _ = gpt_forward(batch.tokens, params, model, batch.targets)
    parts, weights = deal(losses, chunks), deal(batch.weights, chunks)
    mine, own = parts[demo.rank], weights[demo.rank]
    right, wrong = weighted_loss(parts, weights)[0], mean_of_means(parts, weights)[0]
    demo.say(ranks_of_positions(chunks, batch.tokens.shape[1]))
    demo.say("Who has what. The first third of each text is a question, whose tokens do not count in the loss:")
    demo.say_aligned(f"{positions(chunks[demo.rank])};", f"{own.sum()} tokens count,",
                     f"the sum of their losses is {(mine * own).sum():.3f}")
    demo.say(f"So the loss is the sum of all sums over the number of all tokens that count, {right:.6f}. (The mean "
             f"of the ranks'\nmeans is {wrong:.6f}: tokens on ranks with few of them would count for more.)")


def ranks_of_positions(chunks: list[list[slice]], s: int) -> str:
    """Draw the text's positions in order, each as the letter of its rank."""
    order = sorted((chunk.start, rank, chunk.stop - chunk.start) for rank, own in enumerate(chunks) for chunk in own)
    drawn = "".join(ascii_lowercase[rank % len(ascii_lowercase)] * n for _, rank, n in order)
    shown = drawn if s <= SHOWN else f"{drawn[:SHOWN]} ..."
    return (f"The ranks of the positions, from the text's first to its last, a for rank 0:\n\n  {shown}\n\n"
            "A token attends to those before it, so later positions are more work: each rank has an early and a late "
            "chunk.\n")


if __name__ == "__main__":
    run_demo(show)
