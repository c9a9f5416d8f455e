"""The demos of the layers and the collectives: on any number of ranks their output is complete, ordered and right."""
import importlib
import re

import numpy as np
import pytest

from mpi_impl.launching.pool import RankAssertion, RankFailure
from reference.config import ExpertsConfig, ModelConfig, option, round_up
from reference.errors import UserError
from reference.layers.experts import experts_tensors
from reference.layers.router import route
from reference.params import initialize
from tests.deep import every_other_deep
from tests.launching import launch
from tests.planted import Bug, planted_run

DEMOS = ("collectives", "mlp", "attention", "embedding", "cross_entropy", "sequence_parallel", "llama",
         "ring_attention", "context_parallel", "experts")
SIZES = (1, 2, 3, 8)
EXACT = 8       # bytes of an element: all compute in float64, or with whole numbers as long


def show(group, name, argv=()):
    importlib.import_module(f"mpi_impl.demos.{name}").show(group, argv)


def output_of(ranks, capsys, name, n, *argv):
    """Return the lines that a demo prints on n ranks."""
    capsys.readouterr()
    ranks.run(n, show, name, argv)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 120 for line in lines)
    check = next(at for at, line in enumerate(lines) if line.startswith("The check against"))
    return [*lines[:check], " ".join(lines[check:])]        # the last sentence may take several lines


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", DEMOS)
def test_all_ranks_speak_in_order(ranks, capsys, name, n):
    """Where one rank has a line of its own, all have one, in rank order; the last line is the check's."""
    lines = output_of(ranks, capsys, name, n)
    speakers = [int(found[1]) for line in lines if (found := re.match(r"  rank (\d+): *\S", line))]
    assert speakers == list(range(n)) * (len(speakers) // n) and len(speakers) >= 2 * n
    for at, line in enumerate(lines):
        if line.startswith("  rank 0:"):        # nothing stands between the first rank and the last, but their own
            turn = [one for one in lines[at:] if not one.startswith("          ")][:n]
            assert [int(one.split(":")[0].split()[1]) for one in turn] == list(range(n))
    assert re.fullmatch(r"The check against reference/, which computes everything whole, in one process: .+ are the "
                        rf"same on {n} ranks?, to (\de-\d\d of the largest element|the last bit)\.", lines[-1])
    assert all(len(line) <= 120 and line == line.rstrip() for line in lines[:-1])
    assert len(lines) <= 57 + 5 * n             # a screen, or little more


# ---- who owns what --------------------------------------------------------------------------------------------------

OWNED = [       # demo, what is sharded, its number on n ranks, how many lists name it
    ("collectives", "element", lambda n: round_up(4, n), 2),
    ("mlp", "column", lambda n: 4 * round_up(8, n), 1),
    ("mlp", "row", lambda n: 4 * round_up(8, n), 1),
    ("attention", "head", lambda n: round_up(4, n), 1),
    ("attention", "column", lambda n: 4 * round_up(4, n), 1),
    ("attention", "row", lambda n: 4 * round_up(4, n), 1),
    ("llama", "column", lambda n: 3 * round_up(4, n), 1),
    ("embedding", "row", lambda n: 7, 1),
    ("cross_entropy", "token", lambda n: round_up(16, n), 2),
    ("sequence_parallel", "position", lambda n: round_up(8, n), 1),
    ("sequence_parallel", "head", lambda n: round_up(4, n), 1),
    ("sequence_parallel", "column", lambda n: 16 * round_up(4, n), 1),
    ("experts", "expert", lambda n: 2 * n, 1),
]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name, what, whole, lists", OWNED, ids=[f"{name}: {what}s" for name, what, *_ in OWNED])
def test_slices_tile_the_whole(ranks, capsys, name, what, whole, lists, n):
    """The ranks name their pieces in rank order, without overlap or gap."""
    lines = [line for line in output_of(ranks, capsys, name, n) if line.startswith("  rank ") and "%" not in line]
    owned = [found for line in lines if (found := span_in(line, what)) is not None]
    assert len(owned) == lists * n
    for first in range(0, len(owned), n):
        assert sum(owned[first:first + n], []) == list(range(whole(n)))


def span_in(line, what):
    """Return the numbers that a line names as its rank's own; None if it names none."""
    if re.search(rf"\bno {what}s\b", line):
        return []
    found = re.search(rf"\b{what}s? (\d+)(?: to (\d+))?(?=[ ,:;])", line)
    return found and list(range(int(found[1]), int(found[2] or found[1]) + 1))


# ---- messages -------------------------------------------------------------------------------------------------------


def all_reduce(elements, n):
    return 2 * elements * (n - 1) / n * EXACT


def half_of_it(elements, n):
    return elements * (n - 1) / n * EXACT


def collectives_sends(n):
    N = round_up(4, n)
    return [("broadcast", half_of_it(N, n)), ("reduce_scatter", half_of_it(N, n)), ("all_gather", half_of_it(N, n)),
            ("all_reduce", all_reduce(N, n))] + [("send", half_of_it(N, n))] * 2 * (n > 1)     # scatter's, the ring's


def sequence_parallel_sends(n):
    h = 4 * round_up(4, n)
    x = 2 * round_up(8, n) * h                                               # b s h
    gather, scatter = ("all_gather", half_of_it(x, n)), ("reduce_scatter", half_of_it(x, n))
    return [*[("all_reduce", all_reduce(x, n))] * 4, *[gather, scatter] * 2, *[gather, gather, scatter] * 2,
            ("all_reduce", all_reduce(6 * h, n))]                            # of two norms 4 h, of two biases 2 h


def ring_attention_sends(n):
    kv = 2 * 4 * 2 * 4 * (n - 1) * EXACT                                     # 2 b s/c a d, c - 1 times
    return [("send", kv)] * 4 * (n > 1)


def context_parallel_sends(n):
    x = 2 * 2 * 4 * 4 * round_up(4, n)                                       # b s/c h, in two layers
    gathered = half_of_it(2 * n * x, n)
    return [*[("send", 2 * (n - 1) * x * EXACT)] * 3, *[("all_gather", gathered)] * 2, ("reduce_scatter", gathered),
            *[("all_to_all", half_of_it(x, n))] * 8] * (n > 1)


def experts_sends(n):
    """Rank 0 sends the copies of its own tokens for experts of others, and returns those of others' tokens for its own.
    """
    c = ModelConfig(1, 8, 1, 1, 6, init_method_std=0.5, experts=ExpertsConfig(2 * n, 2, moe_ffn_hidden_size=16))
    router = initialize(experts_tensors(c), seed=1, dtype=np.float64).router
    x, _ = np.random.default_rng(1).normal(size=(2, n, 6, 8))
    chosen = route(x @ router, c.experts).ids // 2                           # the ranks of the experts
    there, back = 8 * EXACT * (chosen[0] != 0).sum(), 8 * EXACT * (chosen[1:] == 0).sum()
    return [("all_gather", half_of_it(n * 2 * n, n)), ("all_to_all_rows", there), ("all_to_all_rows", back),
            ("all_to_all_rows", there), ("all_to_all_rows", back), ("all_reduce", all_reduce(8 * 2 * n, n))]


def llama_sends(n):
    """List the messages: of each branch one forward and one backward, and the gradients of copies, if there are any."""
    h, groups = 4 * round_up(4, n), 1 if n == 3 else 2
    copies = max(1, n // groups)
    shared = [("all_reduce", all_reduce(h * 2 * 4, copies))] * (copies > 1)
    return [("all_reduce", all_reduce(2 * 4 * h, n))] * 4 + shared


SENT = {
    "llama": llama_sends,
    "collectives": collectives_sends,
    "mlp": lambda n: [("all_reduce", all_reduce(2 * 3 * round_up(8, n), n))] * 2,
    "attention": lambda n: [("all_reduce", all_reduce(2 * 4 * 4 * round_up(4, n), n))] * 2,
    "embedding": lambda n: [("all_reduce", all_reduce(13 * 4, n))],
    "cross_entropy": lambda n: [*[("all_reduce", all_reduce(6, n))] * 3,
                                ("all_gather", half_of_it(6 * round_up(16, n), n))],
    "sequence_parallel": sequence_parallel_sends,
    "ring_attention": ring_attention_sends,
    "context_parallel": context_parallel_sends,
    "experts": experts_sends,
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", DEMOS)
def test_the_table_is_the_formula(ranks, capsys, name, n):
    """Every line of the table of messages has the operation, and the bytes of the paper's formula."""
    lines = output_of(ranks, capsys, name, n)
    start = next(at for at, line in enumerate(lines) if line.startswith("phase"))
    rows = []
    for line in lines[start + 1:]:
        if not (cells := re.split(" {2,}", line))[-1].replace(",", "").isdigit():
            break
        rows.append((cells[1], cells[-1]))
    assert rows == [(operation, f"{sent:,.0f}") for operation, sent in SENT[name](n)]


# ---- the output of each demo ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8])
def test_collectives_can_be_followed(ranks, capsys, n):
    """The arrays before and after are those of mental arithmetic; in the ring each rank sends the sum of the piece that
    the previous rank has sent and its own.
    """
    text = "\n".join(output_of(ranks, capsys, "collectives", n))
    N = round_up(4, n)
    xs = [[10 * rank + i + 1 for i in range(N)] for rank in range(n)]
    total, piece = [sum(column) for column in zip(*xs)], N // n
    pieces = [total[rank * piece:(rank + 1) * piece] for rank in range(n)]
    assert numbers_after(text, "Broadcast", n) == [x + xs[0] for x in xs]
    assert [line[N:][-piece:] for line in numbers_after(text, "Reduce-scatter", n)] == pieces
    assert [line[-N:] for line in numbers_after(text, "All-gather", n)] == [total] * n
    assert numbers_after(text, "All-reduce", n) == [x + total for x in xs]
    ring = [[line[i:i + piece] for i in range(0, N, piece)] for line in numbers_after(text, "The ring", n)]
    for rank in range(n):
        assert ring[rank][-1] == pieces[rank]
        for step in range(n - 1):
            own = xs[rank][(rank - step - 2) % n * piece:][:piece]
            assert ring[rank][step + 1] == [a + b for a, b in zip(ring[rank - 1][step], own)]


def numbers_after(text, heading, n):
    """Return the numbers in the ranks' lines that follow a heading."""
    lines = text[text.index(f"\n{heading}"):].split("\n")
    ours = [line for line in lines if line.startswith("  rank ")][:n]
    return [[int(one) for one in re.findall(r"\d+", line.split(":", 1)[1])] for line in ours]


@pytest.mark.parametrize("n", SIZES)
def test_every_heads_attention_adds_up_to_one(ranks, capsys, n):
    """Each head is shown once, in order; its weights add up to 1."""
    lines = [line for line in output_of(ranks, capsys, "attention", n) if "%" in line]
    assert [int(re.search(r"head (\d+)", line)[1]) for line in lines] == list(range(round_up(4, n)))
    assert all(abs(sum(map(int, re.findall(r"(\d+)%", line))) - 100) <= 2 for line in lines)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("sentence", ["the cat sat on the mat and the dog sat on the cat", "to be or not to be", "so"])
def test_every_word_is_found_once(ranks, capsys, sentence, n):
    """Below the text just one rank's line has the word of each place; that rank owns it; and the padding is named."""
    lines, words = output_of(ranks, capsys, "embedding", n, "--sentence", sentence), sentence.split()
    at = next(at for at, line in enumerate(lines) if line.strip() == sentence)
    found = [line.split()[2:] for line in lines[at + 1:at + 1 + n]]
    assert [[one for one in place if one != "."] for place in zip(*found, strict=True)] == [[word] for word in words]
    start = next(at for at, line in enumerate(lines) if line.startswith("Who owns what"))
    owned = [line.split(":")[2].strip().split(", ") for line in lines[start + 1:start + 1 + n]]
    vocabulary = sorted(set(words))
    assert sum(owned, []) == vocabulary + ["(padding)"] * (round_up(len(vocabulary), n) - len(vocabulary))
    assert all(set(line) - {"."} == {one for one in own if one != "(padding)"} for line, own in zip(found, owned))
    told_last = re.findall(r"(\S+) +[-+.\d ]+, from (\d+) place", "\n".join(lines))
    places = {word: int(count) for word, count in told_last}
    assert places == {word: words.count(word) for word in vocabulary}


@pytest.mark.parametrize("n", SIZES)
def test_the_loss_follows_from_the_printed_numbers(ranks, capsys, n):
    """It follows from the maximum of maxima and the sum of sums; one rank has the target; gradients add up to 0."""
    lines = output_of(ranks, capsys, "cross_entropy", n)
    each = [line for line in lines if re.match(r"  rank \d+: largest logit", line)]
    everyone = next(line for line in lines if line.startswith("  all:"))
    highest, total, picked = (float(re.search(rf"{what} ([+-]?[\d.]+)", everyone)[1])
                              for what in ("largest logit", "sum of exp", "target"))
    assert highest == max(float(re.search(r"largest logit (\S+),", line)[1]) for line in each)
    assert total == pytest.approx(sum(float(re.search(r"sum of exp (\S+),", line)[1]) for line in each), abs=1e-2)
    assert [float(found[1]) for line in each if (found := re.search(r"target ([+-]\S+)", line))] == [picked]
    first_losses = [float(line.split()[5]) for line in lines if "loss [2, 3]" in line]
    assert first_losses == [float(everyone.split()[-1])] * n
    if n >= 4:                                  # else not all gradients are shown
        start = next(at for at, line in enumerate(lines) if line.startswith("Backward"))
        gradients = [float(one) for line in lines[start + 1:start + 1 + n] for one in re.findall(r"[+-]\d\.\d+", line)]
        assert len(gradients) == round_up(16, n) and sum(gradients) == pytest.approx(0, abs=1e-2)


@pytest.mark.parametrize("n", SIZES)
def test_sequence_parallelism_keeps_less(ranks, capsys, n):
    """Sharded by positions, everything outside the regions takes 1/t of the bytes; the bytes sent are the formulas'."""
    lines = output_of(ranks, capsys, "sequence_parallel", n)
    start = next(at for at, line in enumerate(lines) if "sharded by positions  bytes" in line)
    x = 2 * round_up(8, n) * 4 * round_up(4, n)
    table = [[int(cell.replace(",", "")) for cell in re.split(" {2,}", line) if cell.replace(",", "").isdigit()]
             for line in lines[start + 1:start + 8]]
    assert table == [[size, size // n] for size in (8 * x, 8 * x, x, 8 * x, 8 * x, x, 34 * x)]
    told_last = re.search(r"f and g ([\d,]+) bytes; what is in their places ([\d,]+), as much.* again: ([\d,]+) more.* "
                          r"summed: ([\d,]+) more", " ".join(lines[start:]))
    formulas = [4 * all_reduce(x, n), 8 * half_of_it(x, n), 2 * half_of_it(x, n), all_reduce(24 * round_up(4, n), n)]
    assert list(told_last.groups()) == [f"{sent:,.0f}" for sent in formulas]


@pytest.mark.parametrize("n", [3, 8])
def test_copies_of_a_head_of_keys_get_one_gradient(ranks, capsys, n):
    """The sum of their parts; and the wrong cut of gate and up gives far other results."""
    lines = output_of(ranks, capsys, "llama", n)
    arrows = [line.split(": ")[1].split("  ->  ") for line in lines if "  ->  " in line]
    copies = 3 if n == 3 else 4
    assert len(arrows) == n
    for first in range(0, n, copies):
        parts, sums = zip(*arrows[first:first + copies])
        assert len(set(parts)) == copies and len(set(sums)) == 1
        total = sum(np.array(part.split()[:4], float) for part in parts)
        assert np.abs(total - np.array(sums[0].split()[:4], float)).max() < 1e-3 * copies
    (off,) = [int(found[1]) for line in lines if (found := re.search(r"Z is off by (\d+)%", line))]
    assert off > 50


@pytest.mark.parametrize("n", [1, 3, 4, 8])
def test_the_picture_shows_who_holds_what_the_lines_above_say(ranks, capsys, n):
    lines = output_of(ranks, capsys, "llama", n)
    said = [re.findall(r"(\d+)(?: to (\d+))?", re.sub("^.*:|on . ranks", "", line))
            for line in lines if re.match(" +rank .*of gate and up$", line)]
    held = [[range(int(first), int(last or first) + 1) for first, last in row] for row in said]

    def drawn(kind: int) -> list[str]:
        return ["=".join(str(rank) for rank, row in enumerate(held) if i in row[kind])
                for i in range(max(row[kind][-1] for row in held) + 1)]

    pictures = [line.partition(f"  {name} ")[2].split() for name in ("heads of queries", "heads of keys and values",
                                                                     "columns of gate and up")
                for line in lines if line.startswith(f"  {name} ")]
    assert len(held) == n and pictures == [drawn(0), drawn(1), 2 * ["".join(drawn(2))]]


# ---- the checks can fail --------------------------------------------------------------------------------------------

MAPPINGS, LEFT = "mpi_impl.comm.mappings", "return self.group.all_reduce(partial, reason)"
BUGS = [        # demo, what its check says, the bug
    ("collectives", "reduce-scatter differs", Bug("mpi_impl.comm.transports.mpi", "split_in_pieces(x, ",
                                                  "split_in_pieces(x[::-1], ")),
    ("collectives", "all-reduce differs", Bug("mpi_impl.comm.transports.mpi", "ready(buffer), OPERATIONS[op])",
                                              "ready(buffer), MPI.MAX)")),
    ("collectives", "scatter differs", Bug("mpi_impl.demos.collectives", "post_send(pieces[i], i, i,",
                                           "post_send(pieces[0], i, i,")),
    ("collectives", "gather differs", Bug("mpi_impl.demos.collectives", "return [x, *arrived]",
                                          "return [*arrived, x]")),
    ("collectives", "the ring differs", Bug("mpi_impl.demos.collectives", "pieces[incoming] += arrived",
                                            "pieces[incoming] = arrived")),
    ("mlp", "Y differs", Bug(MAPPINGS, LEFT, "return partial")),
    ("mlp", "dX differs", Bug(MAPPINGS, "return self.group.all_reduce(dx, reason)", "return dx")),
    ("attention", "Y differs", Bug(MAPPINGS, LEFT, "return partial")),
    ("attention", "the attention of every head differs", Bug("mpi_impl.demos.attention", "[ranks.rank]\n    x, dy",
                                                     "[ranks.rank - 1]\n    x, dy")),
    ("attention", "every weight's gradient differs", Bug("mpi_impl.layers.attention", "sink(grads.w_out, context, dy)",
                                                         "sink(grads.w_out, context, 2 * dy)")),
    ("llama", "every weight's gradient differs", Bug("mpi_impl.demos.llama", 'all_reduce(dw_kv, "gradients of copies")',
                                                     'all_reduce(dw_kv.copy(), "gradients of copies")')),
    ("llama", "Z differs", Bug("mpi_impl.layers.gated_mlp", "a, act_cache = swiglu(z)",
                               "a, act_cache = swiglu(z[..., ::-1, :].copy())")),
    ("embedding", "X differs", Bug("mpi_impl.layers.embedding", "lookup(ids, p.word) * held[..., None]",
                                   "lookup(ids, p.word)")),
    ("embedding", "every word's gradient differs",
     Bug("mpi_impl.layers.embedding", "lookup_backward(dx * held[..., None],", "lookup_backward(dx,")),
    ("cross_entropy", "every loss differs", Bug(
        "mpi_impl.layers.cross_entropy", 'group.all_reduce(total, "loss: sum of exp")', "total")),
    ("cross_entropy", "the first one by hand differs", Bug("mpi_impl.demos.cross_entropy", "targets[0, 0] - first)",
                                                           "targets[0, 0])")),
    ("sequence_parallel", "every weight's gradient differs", Bug("mpi_impl.demos.sequence_parallel",
                                                                 "if tensor.split is None:", "if False:")),
    ("sequence_parallel", "what is sent differs", Bug(MAPPINGS, 'f"{reason}, again"', "reason")),
    ("ring_attention", "Y differs", Bug("reference.online_softmax", "one.context * mine + other.context * its",
                                        "one.context + other.context")),
    ("ring_attention", "dK differs", Bug("mpi_impl.layers.context_attention", "dkv += others", "dkv[0] -= others[0]")),
    ("context_parallel", "the loss differs", Bug("reference.batches", "take(x, part.chunks) for x in self))",
                                                 "x[:, :x.shape[1] // 3] for x in self))")),
    ("context_parallel", "every gradient differs", Bug("mpi_impl.layers.context_attention", "dkv += others", "pass")),
    ("sequence_parallel", "Y differs", Bug("mpi_impl.layers.block", "region.positions(x))", "slice(0, x.shape[1]))")),
]


@pytest.mark.parametrize("name, sentence, bug", every_other_deep(BUGS),
                         ids=[f"{name}: {what}" for name, what, _ in BUGS])
def test_the_check_can_fail(ranks, name, sentence, bug):
    """A bug in a layer, a region or the demo raises AssertionError on the ranks, with a sentence that names it."""
    with pytest.raises(RankAssertion, match=f"{sentence} from the textbook's by"):
        ranks.run(3, planted_run, bug, show, name)


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, arguments, sentence", [
    ("collectives", "--elements 4", "number of ranks is 3, but must divide --elements, which is 4"),
    ("collectives", "--elements 100000000000", "the ranks' arrays would take about"),
    ("mlp", "--hidden-size 1000000", "the ranks' arrays would take about"),
    ("attention", "--num-attention-heads 100000", "--num-attention-heads is 100,000, but must be at most 10,000"),
    ("embedding", "--hidden-size 10000000000000000000", "--hidden-size: 10000000000000000000 has more than 15 digits"),
    ("cross_entropy", "--vocab-size 2000000000", "the ranks' arrays would take about"),
    ("sequence_parallel", "--seq-length 10000000", "the ranks' arrays would take about"),
    ("collectives", "--elements 0", "--elements is 0, but must be at least 1"),
    ("mlp", "--hidden-size 5", "The number of ranks is 3, but must divide 4 hidden_size, which is 20"),
    ("mlp", "--hidden-size 0", "--hidden-size is 0, but must be at least 1"),
    ("attention", "--num-attention-heads 4", "number of ranks is 3, but must divide --num-attention-heads, which is 4"),
    ("attention", "--num-attention-heads -3", "--num-attention-heads is -3, but must be at least 1"),
    ("embedding", "--hidden-size 0", "--hidden-size is 0, but must be at least 1"),
    ("embedding", "--sentence=", "--sentence has no words"),
    ("cross_entropy", "--vocab-size 16", "number of ranks is 3, but must divide --vocab-size, which is 16"),
    ("cross_entropy", "--vocab-size 0", "--vocab-size is 0, but must be at least 1"),
    ("sequence_parallel", "--seq-length 8", "number of ranks is 3, but must divide --seq-length, which is 8"),
    ("sequence_parallel", "--seq-length 0", "--seq-length is 0, but must be at least 1"),
    ("ring_attention", "--chunk-length 0", "--chunk-length is 0, but must be at least 1"),
    ("context_parallel", "--chunk-length 100000000", "the ranks' arrays would take about"),
    *[(name, "--no-such-thing 1", f"mpi_impl.demos.{name} has no option --no-such-thing") for name in DEMOS],
    ("mlp", "--hidden-size eight", "invalid int value: 'eight'"),
])
def test_a_wrong_option_gets_a_sentence(ranks, name, arguments, sentence):
    with pytest.raises(RankFailure, match=f"UserError: .*{sentence}"):
        ranks.run(3, show, name, arguments.split())


@pytest.mark.parametrize("name, arguments", [
    ("collectives", "--elements 24"), ("mlp", "--hidden-size 6"), ("attention", "--num-attention-heads 27"),
    ("llama", "--num-attention-heads 9"),
    ("embedding", "--hidden-size 9"), ("cross_entropy", "--vocab-size 3"), ("sequence_parallel", "--seq-length 3"),
    ("ring_attention", "--chunk-length 5"), ("context_parallel", "--chunk-length 1")])
def test_other_sizes(ranks, capsys, name, arguments):
    """The results are right with the user's own sizes, too, and lines that are too long are shortened."""
    lines = output_of(ranks, capsys, name, 3, *arguments.split())
    assert lines[-1].startswith("The check against reference/") and all(len(line) <= 120 for line in lines[:-1])


SHARDED_SIZES = {"collectives": "ELEMENTS", "mlp": "HIDDEN_SIZE", "attention": "NUM_HEADS", "llama": "NUM_HEADS",
                 "cross_entropy": "VOCAB_SIZE", "sequence_parallel": "SEQ_LENGTH"}


@pytest.mark.parametrize("name", SHARDED_SIZES)
def test_the_default_is_the_first_size_that_the_ranks_can_shard(name):
    """It is accepted, and no smaller size from the least on is."""
    size = getattr(importlib.import_module(f"mpi_impl.demos.{name}"), SHARDED_SIZES[name])
    for n in (1, 3, 6, 16, 24):
        default = size.parse([], n)
        assert size.parse([option(size.name), str(default)], n) == default >= size.least
        for smaller in range(size.least, default):
            with pytest.raises(UserError, match="The number of ranks"):
                size.parse([option(size.name), str(smaller)], n)


def test_the_program():
    """Started as the docstrings say: status 0, and a sentence and status 2 where the options are wrong."""
    done = launch(2, "-m", "mpi_impl.demos.attention")
    assert (done.returncode, done.stderr) == (0, "") and "\nThe check against" in done.stdout
    wrong = launch(2, "-m", "mpi_impl.demos.attention", "--num-attention-heads", "3")
    assert (wrong.returncode, wrong.stdout) == (2, "") and wrong.stderr.startswith("error: The number of ranks is 2")
