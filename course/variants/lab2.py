"""Variants of lab 2: another activation, other heads on a rank, a scaled sum, and another unit in which to count."""
from numpy.random import Generator

from course.variants.choices import PARTS, RANKS

ACTIVATIONS = (     # of u: its name, formula, code, and the code of its slope
    ("cubed ReLU", r"\max(u, 0)^3", "np.maximum(u, 0) ** 3", "3 * np.maximum(u, 0) ** 2"),
    ("softplus", r"\log(1 + e^u)", "np.logaddexp(0, u)", "1 / (1 + np.exp(-u))"),
    ("hyperbolic tangent", r"\tanh u", "np.tanh(u)", "1 - np.tanh(u) ** 2"),
    ("arctangent", r"\arctan u", "np.arctan(u)", "1 / (1 + u * u)"),
    ("SiLU", r"u / (1 + e^{-u})", "u / (1 + np.exp(-u))", "(1 + np.exp(-u) * (1 + u)) / (1 + np.exp(-u)) ** 2"),
    ("snake", r"u + \sin^2 u", "(u + np.sin(u) ** 2)", "1 + np.sin(2 * u)"),
    ("softsign", r"u / (1 + |u|)", "u / (1 + np.abs(u))", "1 / (1 + np.abs(u)) ** 2"),
    ("bell", r"e^{-u^2}", "np.exp(-u * u)", "-2 * u * np.exp(-u * u)"),
)
UNITS = (("float32", 4), ("bfloat16", 2), ("float64", 8))


def draw(random: Generator) -> dict[str, str]:
    """Draw a variant."""
    name, formula, value, slope = ACTIVATIONS[random.integers(len(ACTIVATIONS))]
    which = random.integers(len(PARTS))
    part, inverse = PARTS[which], RANKS[which]
    unit, size = UNITS[random.integers(len(UNITS))]
    by, layers, ranks, a, F = (random.integers(low, high) for low, high in ((2, 10), (2, 13), (5, 8), (2, 6), (9, 16)))
    return {
        "the squared\n# ReLU, $\\max(u, 0)^2$ (So et al. 2021, [arXiv 2109.08668](https://arxiv.org/abs/2109.08668))":
            f"the\n# {name}, ${formula}$",
        "np.maximum(u, 0) ** 2": value,
        "2 * np.maximum(u, 0)": slope,

        "the first ranks have one more.": "the first parts have one more. Of\n# the $p$ parts of each, a rank takes "
            f"number `({part}) % p`, counted from 0.",
        "for rank in range(n)": f"for rank in [({part}) % n for rank in range(n)]",
        "group.size)[group.rank]": f"group.size)[({part.replace('rank', 'group.rank')}) % group.size]",
        "    widths = [(one": f"    shards = [shards[({inverse}) % len(shards)] for part in range(len(shards))]\n"
                              "    widths = [(one",
        "all of Q stands left of all of K. And": "which rank has the first heads? And all of Q stands left of all of "
                                                 "K. And",

        r"$$Y = X + \mathrm{Attention}(N) + \mathrm{MLP}(N) + \beta,":
            rf"$$Y = X + \tfrac{{1}}{{{by}}} \left(\mathrm{{Attention}}(N) + \mathrm{{MLP}}(N) + \beta\right),",
        "# $\\beta$ and without $X$.": f"# $\\beta$, without $X$, and without the factor $1/{by}$.",
        'p["W_out"], dy, d)': f'p["W_out"], dy / {by}, d)',
        'x + both + p["bias"]': f'x + (both + p["bias"]) / {by}',
        '"bias": dy.sum((0, 1))': f'"bias": dy.sum((0, 1)) / {by}',
        'g(group, partial) + shard["bias"]': f'(g(group, partial) + shard["bias"]) / {by}',
        "g_backward(group, dy), n": f"g_backward(group, dy / {by}), n",
        '"bias": dy.sum(axis=(0, 1))': f'"bias": dy.sum(axis=(0, 1)) / {by}',
        "(8, 3, 13), (5, 4, 3)": f"(8, 3, {F}), ({ranks}, {a}, 3)",

        "How many elements does a rank send for one layer,": f"How many bytes does a rank send for {layers} layers, "
            f"in {unit},",
        "Return the elements that a rank sends for one layer.": f"Return the bytes that a rank sends for {layers} "
            f"layers, in {unit}.",
        "return regions * 2": f"return {size * layers} * regions * 2",
        "expect_equal(found, [right], f\"what a rank of {p} sends for {block},": f"expect_equal(found, [{size * layers}"
            f" * right], f\"how many bytes a rank of {{p}} sends for {layers} layers, each {{block}},",
        "how many regions are there, and": f"how many bytes has an element in {unit}, how many regions are there, and",
    }
