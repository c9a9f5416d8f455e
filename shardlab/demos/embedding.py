"""The table of tokens, sharded over all ranks: `mpirun -np 4 python -m shardlab.demos.embedding`.

It shows which rank owns which tokens (here whole words), what each looks up in a sentence, and the all-reduce that
combines the lookups (Shoeybi et al. 2019, section 3).
"""
import numpy as np

from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.layers.embedding import embedding_backward, embedding_forward
from mpi_impl.runtime.tables import aligned, count
from reference.config import ModelConfig
from reference.errors import UserError
from reference.layers import embedding as textbook
from reference.params import initialize, split, tree_map
from shardlab.demos.printing import first_elements, shape, span
from shardlab.demos.runner import Arguments, Demo, parser_of, program, run_demo

HIDDEN_SIZE = 4
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


def parse_text(argv: Arguments, n: int) -> list[str]:
    """Return the words of the text. Raises UserError."""
    parser = parser_of("embedding")
    parser.add_argument("--sentence", default=SENTENCE, metavar="WORDS",
                        help="the text; its words are the vocabulary (default: %(default)s)")
    if text := parser.parse_args(argv).sentence.split():
        return text
    raise UserError("There is no word in --sentence. Give it at least one, as in --sentence 'to be or not to be'.")


@program(parse_text)
def show(demo: Demo, text: list[str]) -> None:
    demo.introduce(INTRODUCTION)
    vocabulary = sorted(set(text))
    V = len(vocabulary)
    c = ModelConfig(1, HIDDEN_SIZE, 1, V, len(text), init_method_std=0.5, make_vocab_size_divisible_by=1)
    tensors = textbook.Embedding(textbook.word_tensor(c), None)      # positions have a table, too: replicated
    whole = initialize(tensors, seed=1, dtype=np.float64)
    mine = split(whole, tensors, demo.n)[demo.rank]
    tokens = np.array([[vocabulary.index(word) for word in text]])   # [b, s], identical on every rank
    dx = np.random.default_rng(1).normal(size=(*tokens.shape, HIDDEN_SIZE))
    n = len(mine.word)
    start, end = (min(rank * n, V) for rank in (demo.rank, demo.rank + 1))
    own = vocabulary[start:end]
    demo.say(f"Who owns what: V = {V} words, padded to {n * demo.n}, E {shape(whole.word)}")
    demo.say_each(f"{span(start, end, 'row')} of E {shape(mine.word)}:",
                  ", ".join([*own, *["(padding)"] * (n - len(own))]))

    region, grads = TensorParallelRegion(demo.ranks), tree_map(np.zeros_like, mine)
    with demo.phase("forward"):
        x, cache = embedding_forward(tokens, mine, region)
    with demo.phase("backward"):
        embedding_backward(dx, cache, grads, region)
    ids, held, *_ = cache
    demo.say(f"\nForward. The words that each rank has in its own rows, of the text:\n  {' '.join(text)}")
    demo.say_each(" ".join(word if there else "." * len(word) for word, there in zip(text, held[0])))
    demo.say(f"The first word, {text[0]!r}, as each rank returns it; and after g the same on every rank, its row:")
    demo.say_each(f"{first_elements(mine.word[ids[0, 0]] * held[0, 0])}  ->  {first_elements(x[0, 0])}")
    demo.say("\nBackward, from a random dX. A word's gradient is the sum over the places where it occurs:")
    demo.say_each(aligned([[word, first_elements(grad), f"from {count(text.count(word), 'place')}"]
                           for word, grad in zip(own, grads.word)] or [["padding alone, which occurs nowhere"]]))
    demo.say_all_reduces()

    whole_x, whole_cache = textbook.embedding_forward(tokens, whole)
    demo.equal("X", x, whole_x)
    whole_grads = textbook.embedding_backward(dx, whole, whole_cache)
    demo.equal("every word's gradient", grads, split(whole_grads, tensors, demo.n)[demo.rank])


if __name__ == "__main__":
    run_demo(show)
