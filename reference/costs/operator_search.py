"""A search that chooses for each operator of a GPT what is split over each axis of a mesh of devices.

A plan (plans.py) splits all operators by the same rules. Here each has its own choice, as in FlexFlow (Jia et al. 2018,
1807.05358, section 4): a word with a letter for each axis, one for the devices of a server and one for the servers.

    s  samples      Weights are held whole, and their gradients are summed.
    p  positions    Likewise. Attention's core cannot: a position needs the keys and values of others.
    f  features     of an operator without weights, such as heads of the core. Norms cannot: they need whole tokens.
    c  columns      of a matrix, or of the embedding: features of the output.
    r  rows         of a matrix: features of the input; of the embedding: tokens. The output is a partial sum.
    .  nothing      Every device of the axis computes the same.

A tensor's layout is such a word, too, where + is a partial sum. Between two operators collectives change the layout in
which one writes into that in which the other reads, and backward that of the gradient. So Megatron's g is the change
from + to . that follows rows. Its f is the same change backward, before columns: there the gradient of the input is a
partial sum.
"""
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import product
from math import exp, gcd, prod
from operator import add
from random import Random
from typing import NamedTuple

from reference.config import ModelConfig
from reference.costs.hardware import Hardware, RankGroup, collective_time
from reference.errors import UserError

Choices = dict[str, str]    # a word for each operator, by name
Table = tuple[tuple, dict]  # some operators' names; and by their words a list of costs

# What becomes of a choice in the layouts of what an operator reads and writes, of the gradients of both, and of a
# device's gradients of weights, where . stands for its own shard.
READS, WRITES, INPUT_GRADIENT, OUTPUT_GRADIENT, WEIGHT_GRADIENT = (
    str.maketrans("spfcr", letters) for letters in ("spf.f", "spff+", "spf+f", "spff.", "++..."))

# All operators: whether each layer has one; rows of weights, if any, and columns; the letters of its choice; its share
# of the layer's passes of a kind (Passes); Megatron's letter (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022,
# section 4.2.2); and what it reads. What enters the first layer is laid out as what leaves each layer, add_2's output.
GPT = list(map(str.split, """\
embedding    0   V  1h  spcr  1     embedding  r
norm_1       1  0h  1h  sp    0.25  outside    p  add_2
qkv          1  1h  3h  spcr  0.25  inside     c  norm_1
core         1  0h  1h  sf    1     scores     f  qkv
out          1  1h  1h  spcr  0     inside     r  core
add_1        1  0h  1h  spf   0.25  outside    p  out add_2
norm_2       1  0h  1h  sp    0.25  outside    p  add_1
up           1  1h  4h  spcr  0     inside     c  norm_2
activation   1  0h  4h  spf   0.75  inside     f  up
down         1  4h  1h  spcr  0     inside     r  activation
add_2        1  0h  1h  spf   0.25  outside    p  embedding down add_1
final_norm   0  0h  1h  sp    0.25  outside    p  add_2
head         0  1h   V  spcr  0     inside     c  final_norm
loss         0  0h   V  spf   1     logits     f  head
""".splitlines()))


class Operator(NamedTuple):
    """An operator, forward and backward."""

    inputs: list[str]       # names of the operators that write what it reads
    choices: list[str]      # words
    times: int              # that it occurs, always with the same choice
    rows: int               # of its weights, [rows, columns]; 0: it has none
    columns: int            # of its output, for each token
    kernels: float          # seconds on one device, without products of weights; n devices that split it take 1/n


class Cost(NamedTuple):
    """The cost of some operators and tensors, and the choices that it is for."""

    seconds: float          # of a step
    memory: float = 0.0     # bytes of a device's weights, gradients and optimizer states
    choices: tuple = ()     # (name, word) of each operator


def sums(tables: list[Table], choices: Choices) -> list[Cost]:
    """Return the sums of one cost from each table, for these choices. Impossible choices have none."""
    costs = (costs.get(tuple(choices[name] for name in names), []) for names, costs in tables)
    return [reduce(lambda x, y: Cost(*map(add, x, y)), some) for some in product(*costs)]


@dataclass
class OperatorGraph:
    """Operators that compute this many tokens in a step, on a mesh of devices with these axes, the fastest first."""

    operators: dict[str, Operator]
    tokens: int
    axes: tuple[RankGroup, ...]
    hardware: Hardware

    def split(self, word: str, letters: str) -> int:
        """Return the number of devices over which a word splits any of these."""
        return prod(axis.ranks for axis, letter in zip(self.axes, word) if letter in letters)

    @cached_property
    def costs(self) -> list[Table]:
        """Return the cost of each operator for its choice, and of each tensor for those of its writer and its reader.

        Their sum is the cost of a step, in which only the sums of gradients overlap with computing.
        """
        tables: list[Table] = []
        for name, one in self.operators.items():
            tables.append(((name,), {(word,): [self.operator_cost(name, word)] for word in one.choices}))
            for other in one.inputs:
                writer = self.operators[other]
                tables.append(((other, name), {words: [self.tensor_cost(writer, one, *words)]
                                               for words in product(writer.choices, one.choices)}))
        return tables

    def operator_cost(self, name: str, word: str) -> Cost:
        """Return the cost of an operator: kernels, the gradients' sum, Adam's step, and three products for a matrix.

        A weight has 16 bytes, with its gradient and Adam's three numbers (parallel/model_states.py).
        """
        one, hardware = self.operators[name], self.hardware
        rows, columns = one.rows // self.split(word, "r"), one.columns // self.split(word, "c")
        gradients = self.change(rows * columns, word.translate(WEIGHT_GRADIENT), "." * len(word))
        seconds = (one.kernels / self.split(word, "spfc") + gradients * (1 - hardware.hidden)
                   + rows * columns * hardware.optimizer / hardware.bandwidth)
        if rows and one.inputs:
            seconds += 3 * hardware.product(self.tokens // self.split(word, "sp"), rows, columns)
        return Cost(one.times * seconds, 16 * one.times * rows * columns, ((name, word),))

    def tensor_cost(self, writer: Operator, reader: Operator, written: str, read: str) -> Cost:
        """Return the cost of a tensor between two operators: its changes of layout, forward and backward."""
        elements = self.tokens * writer.columns
        forward = self.change(elements, written.translate(WRITES), read.translate(READS))
        backward = self.change(elements, read.translate(INPUT_GRADIENT), written.translate(OUTPUT_GRADIENT))
        return Cost(min(writer.times, reader.times) * (forward + backward))

    def change(self, elements: int, before: str, after: str) -> float:
        """Return the seconds of a tensor's change to a layout without partial sums.

        First each device takes its shard of what it has whole. Then, on the first axis first, partial sums are reduced
        and scattered, and shards exchanged; and in the opposite order shards are gathered. So an all-reduce over all
        axes sends between servers only what a reduce-scatter inside them has left to a device.
        """
        axes, seconds = list(zip(self.axes, before, after)), 0.0
        local = elements * self.hardware.element_bytes / prod(
            axis.ranks for axis, x, y in axes if x != "+" and x + y != "..")
        for axis, x, y in axes:
            if x == "+":
                seconds += collective_time(self.hardware, "reduce_scatter", axis, local)
                local /= axis.ranks
            elif x != y and "." not in x + y:
                seconds += collective_time(self.hardware, "all_to_all", axis, local)
        for axis, x, y in reversed(axes):
            if y == "." != x:
                local *= axis.ranks
                seconds += collective_time(self.hardware, "all_gather", axis, local)
        return seconds if elements else 0.0


def gpt_graph(c: ModelConfig, b: int, n: int, hardware: Hardware) -> OperatorGraph:
    """Return the graph of a GPT that takes b samples in a step, in one microbatch, on n devices.

    Their mesh has an axis inside servers, and one between them if one does not hold all devices. All layers have the
    same choices, and a choice gives all devices pieces of one size. The seconds are those of
    layer_time.py and step_time.py, without a layer's overhead, which no choice changes, and with the final norm. Not
    counted are biases, the norms' weights, the table of positions, the sums of a loss that is split, and the memory of
    activations; and the head has a matrix of its own. Raises UserError for another model.
    """
    h, a, s = c.hidden_size, c.num_attention_heads, c.max_position_embeddings
    if c.architecture != "gpt" or c.experts or c.ffn_size != 4 * h or c.groups * c.head_size != h:
        raise UserError("The search over operators knows only GPTs that have an MLP of 4h columns, and a head of keys "
                        "for each head of queries. Leave --operators out.")
    inside = gcd(n, hardware.server)
    axes = (RankGroup(inside, 1, n), RankGroup(n // inside, inside, n))[:1 + (inside < n)]
    graph = OperatorGraph({}, b * s, axes, hardware)
    numbers = {"V": c.vocab_size} | {f"{n}h": n * h for n in range(5)}
    forward, backward = hardware.attention
    for name, repeated, rows, columns, letters, share, kind, _, *inputs in GPT:
        k, m = numbers[rows], numbers[columns]
        pieces = {"s": b, "p": s, "f": m, "c": m, "r": k}
        kernels = hardware.stream(graph.tokens * {"scores": a * s, "logits": m}.get(kind, h),
                                  float(share) * sum(getattr(hardware.passes, kind)))
        if name == "core":
            pieces["f"] = a
            kernels += 4 * graph.tokens * s * h / hardware.peak * (1 / forward + 2 / backward)
        words = [word for word in map("".join, product("." + letters, repeat=len(axes)))
                 if all(pieces[letter] % graph.split(word, letter) == 0 for letter in letters)]
        graph.operators[name] = Operator(inputs, words, c.num_layers if int(repeated) else 1, k, m, kernels)
    return graph


def megatron_choices(graph: OperatorGraph) -> Choices:
    """Return Megatron's choices: tensor and sequence parallelism on the first axis, and replicas on the others."""
    return {line[0]: line[7] + "s" * len(graph.axes[1:]) for line in GPT}


# ---- searches -------------------------------------------------------------------------------------------------------


def fastest_of_each_size(graph: OperatorGraph) -> list[Cost]:
    """Return the fastest choices of all, then the fastest of those that take less memory, and so on to the smallest.

    This is dynamic programming, and exact, in a graph that is connected. One operator after another leaves it, and for
    all choices of its neighbours its best are kept (the eliminations of Jia et al. 2018, 1802.04924). In a chain the
    neighbours are the next operator, and the one whose output bypasses it.
    """
    tables = graph.costs
    for name in graph.operators:
        touching = [table for table in tables if name in table[0]]
        neighbours = *sorted({other for names, _ in touching for other in names} - {name}), name
        options: dict = defaultdict(list)
        for words in product(*(graph.operators[other].choices for other in neighbours)):
            options[words[:-1]] += sums(touching, dict(zip(neighbours, words)))
        kept = {words: frontier(costs) for words, costs in options.items()}
        tables = [(neighbours[:-1], kept)] + [table for table in tables if name not in table[0]]
    return kept[()]


def frontier(costs: list[Cost]) -> list[Cost]:
    """Return the costs, from the fastest to the smallest, without those that are both slower and larger."""
    kept = [min(costs)]
    for cost in sorted(costs):
        if cost.memory < kept[-1].memory:
            kept.append(cost)
    return kept


def random_walk(graph: OperatorGraph, start: Cost, limit: float, beta: float, steps: int, random: Random) -> Cost:
    """Return the fastest choices of a walk from those of `start`. All take at most `limit` bytes of a device.

    A step proposes another choice for one operator. If that is slower by x seconds, it is accepted with the probability
    exp(-beta x): Metropolis and Hastings' algorithm (Jia et al. 2018, 1807.05358, section 6).
    """
    best = now = start
    for _ in range(steps):
        name = random.choice(list(graph.operators))
        cost, = sums(graph.costs, dict(now.choices) | {name: random.choice(graph.operators[name].choices)})
        if cost.memory <= limit and random.random() < exp(min(0, beta * (now.seconds - cost.seconds))):
            now = cost
            best = min(best, now)
    return best
