"""Variants of lab 8: another numbering of the ranks, another slope below zero, a decay of the weights."""
from numpy.random import Generator

ORDERS = ("tpd", "dtp", "dpt", "ptd", "pdt")    # the groups, those whose ranks are neighbours first
NAMES = {"t": "tensor-parallel ranks", "d": "replicas", "p": "stages"}
INDICES = {"t": "shard", "d": "replica", "p": "stage"}


def draw(random: Generator) -> dict[str, str]:
    """Draw a variant."""
    slope, decay = f"0.{random.integers(5, 45):02d}", f"0.000{random.integers(1, 10)}"
    return numbering(ORDERS[random.integers(len(ORDERS))]) | {
        r"\max(0, x_l A_l) B_l": rf"\max({slope}\, x_l A_l, x_l A_l) B_l",
        "np.maximum(xs[-1] @ A, 0)": f"np.maximum(xs[-1] @ A, {slope} * (xs[-1] @ A))",
        "np.maximum(x @ A, 0)": f"np.maximum(x @ A, {slope} * (x @ A))",
        "(hidden[l] > 0)": f"np.where(hidden[l] > 0, 1, {slope})",
        "(hidden > 0)": f"np.where(hidden > 0, 1, {slope})",

        "trains with plain SGD, a step for\n# each global batch:": "trains with SGD and weight decay, a step for each\n"
            f"# global batch: $w \\leftarrow w - \\eta\\,(g + {decay}\\, w)$, where $\\eta$ is the learning rate. Here",
        "value - learning_rate * grads[name]": f"value - learning_rate * (grads[name] + {decay} * value)",
        "is every weight moved, by its own gradient?": "is every weight moved, by its own gradient and decay?",
    }


def numbering(order: str) -> dict[str, str]:
    """Number the ranks in this order of groups."""
    a, b, c = order
    at = {a: f"rank % {a}", b: f"rank // {a} % {b}", c: f"rank // ({a} * {b})"}
    stage = {a: lambda rank: rank % 2, b: lambda rank: rank // 2 % 2, c: lambda rank: rank // 4}["p"]

    def number(group: str) -> str:
        """Return the code of the ranks of this group, with i for its index."""
        index = INDICES | {group: "i"}
        return f"[{index[a]} + {a} * ({index[b]} + {b} * {index[c]}) for i in range({group})]"

    return {
        "Neighbours are tensor-parallel, since these send the most; then come the replicas, then the stages:\n"
        r"# $\text{rank} = i_t + t \, (i_d + d \, i_p)$.":
            f"Here neighbours are {NAMES[a]}; then come the {NAMES[b]}, then the {NAMES[c]}:\n"
            rf"# $\text{{rank}} = i_{a} + {a} \, (i_{b} + {b} \, i_{c})$.",
        "rank % t, rank // t % d, rank // (t * d)": f"{at['t']}, {at['d']}, {at['p']}",
        "([i + t * (replica + d * stage) for i in range(t)], [shard + t * (i + d * stage) for i in range(d)],\n"
        "            [shard + t * (replica + d * i) for i in range(p)])":
            f"({number('t')}, {number('d')},\n            {number('p')})",
        "[160, 160, 160, 160, 144, 144, 144, 144]": str([144 if stage(rank) else 160 for rank in range(8)]),
    }
