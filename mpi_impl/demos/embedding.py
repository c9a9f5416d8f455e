"""The table of tokens, sharded over all ranks: `mpirun -np 4 python -m mpi_impl.demos.embedding`.

It shows which rank owns which tokens (here whole words), what each looks up in a sentence, and the all-reduce that
combines the lookups (Shoeybi et al. 2019, section 3).
"""
from collections.abc import Sequence

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.demos.printing import (Check, count, first_elements, indent, say, say_aligned, say_each, shape, span,
                                     traffic_table)
from mpi_impl.demos.sizes import check_size
from mpi_impl.launch.entry import ArgumentParser, run
from mpi_impl.layers.embedding import embedding_backward, embedding_forward
from reference.config import ModelConfig
from reference.errors import UserError
from reference.layers import embedding as textbook
from reference.params import initialize, split, tree_map

SENTENCE = "the cat sat on the mat and the dog sat on the cat"

INTRODUCTION = """\
A model computes with numbers, so every token that it knows has a row of h numbers; here a token is a word. Together
they are a table E of V rows, for V words, and to embed a text is to look up the rows of its words. V is large (50,257
for GPT-2), and so is E [V, h]. Split it by rows: {ranks} (processes, each with memory of its own) own V/t words each,
where t is the number of ranks. If V does not divide by t, rows of words that do not exist follow at the end: padding.

A rank looks up the words that it owns, and returns zeros for all others. For every word all but one of the ranks'
results are zero, so their sum is the word's row. g, an all-reduce (a sum over the ranks, of which every rank gets the
result), combines the lookups. For b texts of s words that is a sum of b s h numbers; gathering the table on every rank
would send V h numbers. (If a rank returned any other row where it should return zero, the sum would be wrong.)

Backward, every rank has the whole dX, the gradient of all rows that were looked up. It adds up those of the words
that it owns, at all their positions in the text, and has nothing to send.
"""


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    text, h = parse_options(argv)
    vocabulary = sorted(set(text))
    say(ranks, INTRODUCTION.format(ranks=count(ranks.size)))
    c = ModelConfig(num_layers=1, hidden_size=h, num_attention_heads=1, vocab_size=len(vocabulary),
                    max_position_embeddings=len(text), init_method_std=0.5, make_vocab_size_divisible_by=1)
    tensors = textbook.Embedding(textbook.word_tensor(c), None)      # positions have a table, too: replicated
    whole = initialize(tensors, seed=1, dtype=np.float64)
    mine = split(whole, tensors, ranks.size)[ranks.rank]
    tokens = np.array([[vocabulary.index(word) for word in text]])   # [b, s], identical on every rank
    dx = np.random.default_rng(1).normal(size=(*tokens.shape, h))

    n = len(mine.word)
    start, end = (min(rank * n, len(vocabulary)) for rank in (ranks.rank, ranks.rank + 1))
    own = vocabulary[start:end]
    say(ranks, f"Who owns what: V = {len(vocabulary)} words, padded to {n * ranks.size}, E {shape(whole.word)}")
    say_aligned(ranks, f"{span(start, end, 'row')} of E {shape(mine.word)}:",
                ", ".join([*own, *["(padding)"] * (n - len(own))]))

    with ranks.ledger.phase("forward"):
        x, cache = embedding_forward(tokens, mine, TensorParallelRegion(ranks))
    ids, held, *_ = cache
    say(ranks, "\nForward. The text, and the words of it that each rank has in its own rows:")
    say(ranks, indent(" " * len(f"rank {ranks.size - 1}: "), in_columns(text, text)))
    say_each(ranks, in_columns([word if found else "." for word, found in zip(text, held[0])], text))
    say(ranks, f"The first word, {text[0]!r}, as each rank returns it; and after g the same on every rank, its row:")
    say_each(ranks, f"{first_elements(mine.word[ids[0, 0]] * held[0, 0])}  ->  {first_elements(x[0, 0])}")

    grads = tree_map(np.zeros_like, mine)
    with ranks.ledger.phase("backward"):
        embedding_backward(dx, cache, grads, TensorParallelRegion(ranks))
    say(ranks, "\nBackward, from a random dX. A word's gradient is the sum over the places where it occurs:")
    say_each(ranks, gradients(own, grads.word, text))
    say(ranks, f"\nWhat moved, on each rank. Of N = b s h elements an all-reduce sends 2 N (t-1)/t, here with t = "
               f"{ranks.size}; backward nothing:\n{traffic_table(ranks.ledger)}\n")

    check = Check()
    whole_x, whole_cache = textbook.embedding_forward(tokens, whole)
    whole_grads = textbook.embedding_backward(dx, whole, whole_cache)
    check.equal("X", x, whole_x)
    check.equal("every word's gradient", grads.word, split(whole_grads, tensors, ranks.size)[ranks.rank].word)
    check.conclude(ranks)


def in_columns(words: Sequence[str], text: Sequence[str]) -> str:
    """Return the words as a line, each below its word of the text."""
    return " ".join(word.ljust(len(above)) for word, above in zip(words, text)).rstrip()


def gradients(own: Sequence[str], grads, text: Sequence[str]) -> str:
    """Return a line for each of a rank's words."""
    wide = max(map(len, text))
    return "\n".join(f"{word:{wide}} {first_elements(grad)}, from {count(text.count(word), 'place')}"
                     for word, grad in zip(own, grads)) or "padding alone, which occurs nowhere"


def parse_options(argv: Sequence[str] | None) -> tuple[list[str], int]:
    """Return the words of the text, and h. Raises UserError."""
    parser = ArgumentParser(prog="mpi_impl.demos.embedding",
                            description="Show how the table of tokens is sharded over the ranks.")
    parser.add_argument("--sentence", default=SENTENCE, metavar="WORDS",
                        help="the text; its words are the vocabulary (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=4, metavar="H", help="numbers of a word (default: 4)")
    options = parser.parse_args(argv)
    check_size("hidden_size", options.hidden_size, 8 * len(options.sentence.split()) * options.hidden_size)
    if not options.sentence.split():
        raise UserError("--sentence has no words. Give it at least one, as in --sentence 'to be or not to be'.")
    return options.sentence.split(), options.hidden_size


if __name__ == "__main__":
    run(lambda: show(world()))
