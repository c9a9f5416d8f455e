"""Variants of lab 5: ends of the model that cost more, another order of microbatches, dearer messages, other stages."""
from numpy.random import Generator

from course.variants.choices import CURVES

LAYERS, STAGES = [1] * 20 + [4] * 10 + [1] * 10, 8      # of the largest hidden case


def draw(random: Generator) -> dict[str, str]:
    """Draw a variant."""
    return ends(random) | order(random) | messages(random) | stages(random)


def ends(random: Generator) -> dict[str, str]:
    """Draw what the embedding and the logits cost, which belong to the first stage and the last."""
    embedding, logits = (int(cost) for cost in random.integers(4, 16, size=2))
    costs = [LAYERS[0] + embedding, *LAYERS[1:-1], LAYERS[-1] + logits]
    best = next(most for most in range(max(costs), sum(costs) + 1) if stages_of(costs, most) <= STAGES)
    add = f"    costs[0] += {embedding}\n    costs[-1] += {logits}\n"
    return {
        "at least one each. The slowest": "at least one each. The first\n# stage also has the embedding, which costs "
            f"{embedding}, and the last one the logits, which cost {logits}. The slowest",
        "    upto = [0]\n": f"    costs = [*costs]\n{add}    upto = [0]\n",
        "def highest_cost(costs, sizes):\n": "def highest_cost(costs, sizes):\n"
            f"    costs = np.array(costs, float)\n{add}",
        "best=10)": f"best={best})",
        "equal numbers of layers are not equal costs,": "equal numbers of layers are not equal costs, the first "
            "and the last stage have more than layers,",
    }


def stages_of(costs: list[int], most: int) -> int:
    """Return how many stages are needed if none may cost more than `most`."""
    stages, left = 1, most
    for cost in costs:
        if cost > left:
            stages, left = stages + 1, most
        left -= cost
    return stages


def order(random: Generator) -> dict[str, str]:
    """Draw with which microbatch a rank begins, and whether their numbers rise or fall."""
    first, step = int(random.integers(1, 5)), int(random.choice((1, -1)))
    numbers = f"[({first} {'+' if step > 0 else '-'} i) % m for i in range(m)]"
    four = [(first + step * i) % 4 for i in range(4)]
    return {
        "Microbatches come in order, 0, 1, 2, ..., in both directions.": "Microbatches come in this order in both "
            f"directions:\n# number ${first} \\bmod m$ first, then the numbers {'after' if step > 0 else 'before'} it, "
            "modulo $m$.",
        "`0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3`": "`" + " ".join(f"0{kind}{four[i]}" for kind, i in zip(
            "FFBFBFBB", (0, 1, 0, 2, 1, 3, 2, 3))) + "`",
        'forward = [("F", rank, i) for i in range(m)]\n':
            f'order = {numbers}\n        forward = [("F", rank, i) for i in order]\n',
        '        for i in range(m):\n            actions += [("B", rank, i), *forward':
            '        for i in range(m):\n            actions += [("B", rank, order[i]), *forward',
        "expect(order == sorted(order),": f"expect(order == {numbers},",
        "it should be 0, 1, ...\"": f"it should be {{{numbers}}}\"",
    }


def messages(random: Generator) -> dict[str, str]:
    """Draw how much longer a gradient's message takes than an activation's."""
    longer = random.integers(2, 17)
    both = longer + 1
    return {
        "and a message to another rank takes `wire`.": f"and a message to another rank\n    takes `wire`; backward, "
            f"where gradients have more bytes, {longer} times `wire`.",
        "ended[need] + sent * wire)": f"ended[need] + sent * wire * (1 if action[0] == \"F\" else {longer}))",
        "a message takes $w$. In": f"a message takes $w$\n# forward and ${longer} w$ backward. In",
        r"+ 2 w (q - r),$$": rf"+ {both} w (q - r),$$",
        "2 * wire * (q - r)": f"{both} * wire * (q - r)",
        "check_fastest([2, 3, 4, 5, 4, 3, 2, 9], 8, [11, 12, 9, 8, 8, 7, 7, 5], best=13.5)":
            f"check_fastest([2, 3, 4, 5, {random.integers(2, 8)}], 8, [7, 8, 6, 5, 4])",
    }


def stages(random: Generator) -> dict[str, str]:
    """Draw what a stage computes."""
    formula, code, slope = CURVES[random.integers(len(CURVES))]
    return {
        r"y = \tanh(x W_s)": f"y = {formula.format(z='x W_s')}",
        "np.tanh(x @ w)": code.format(z="x @ w"),
        "(1 - y * y)": f"({slope.format(y='y')})",
        "np.tanh(inputs[-1] @ w)": code.format(z="inputs[-1] @ w"),
        "(1 - inputs[stage + 1] ** 2)": f"({slope.format(y='inputs[stage + 1]')})",
    }
