"""Variants of lab 8: another numbering of the ranks, slope below zero, decay of the weights, and inventory."""
from numpy.random import Generator

ORDERS = ("tpd", "dtp", "dpt", "ptd", "pdt")    # the groups, those whose ranks are neighbours first
NAMES = {"t": "tensor-parallel ranks", "d": "replicas", "p": "stages"}
INDICES = {"t": "shard", "d": "replica", "p": "stage"}


def draw(random: Generator) -> dict[str, str]:
    """Draw a variant."""
    slope, decay = f"0.{random.integers(5, 45):02d}", f"0.000{random.integers(1, 10)}"
    order = ORDERS[random.integers(len(ORDERS))]
    return numbering(order) | inventory(random, order) | {
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
    }


def inventory(random: Generator, order: str) -> dict[str, str]:
    """Draw bytes for what is held, and durations for the bubble."""
    parameter, element, forward, backward = random.integers((6, 1, 2, 4), (19, 5, 10, 20))
    both, stages = forward + backward, [rank // 2 ** order.index("p") % 2 for rank in range(8)]
    return {
        "how many elements each rank holds at most: its parameters, as many gradients, and for each layer of each\n"
        "#   microbatch": f"how many bytes each rank holds at most: {parameter} for each of its parameters, with\n"
            f"#   gradient and optimizer, and {element} for each element kept: for each layer of each microbatch",
        "held.append(2 * own + min": f"held.append({parameter} * own + {element} * min",
        "found.append(2 * sum(array.size for array in shard.values()) + most * cache)":
            f"found.append({parameter} * sum(array.size for array in shard.values()) + {element} * most * cache)",
        "[160, 160, 160, 160, 144, 144, 144, 144]": str([int(64 * parameter + element * (32 - 16 * stage))
                                                         for stage in stages]),
        '"held": elements of each rank, "bubble": a fraction': '"held": bytes of each rank, "bubble": a time',
        "which fraction of the step each rank idles, with GPipe or 1F1B, if a forward takes 1 and a backward 2 on":
            f"how long each rank idles in a step, with GPipe or 1F1B, if a forward takes {forward} and a backward "
            f"{backward} on",
        '"bubble": (p - 1) / (m + p - 1)}': f'"bubble": {both} * (p - 1)}}',
        "and the bubble of its timeline beside yours.": "and the bubble of its timeline, which is a fraction of "
            "the\n#    step, beside yours, which is a time.",
        "check_bubble(CASES[0], 1 / 3)": f"check_bubble(CASES[0], {both})",
        "Times(1.0, 2.0, 0.0)": f"Times({forward}.0, {backward}.0, 0.0)",
        "return 1 - 3 * m / played": f"return played - {both} * m",
        "Return the idle fraction of GPipe": "Return the idle time of GPipe",
    }
