"""Variants of lab 3: a bent latent, other heads on a rank, a way around attention, other factors."""
from numpy.random import Generator

from course.variants.choices import CURVES, PARTS

LATENTS = (*CURVES, (r"\tanh({z})", "np.tanh({z})", "1 - {y} ** 2"))
POWERS = (("1", ""), ("2", "^2"), ("1 / 3", "^{1/3}"), ("1 / 4", "^{1/4}"), ("-1 / 2", "^{-1/2}"), ("3 / 2", "^{3/2}"))


def draw(random: Generator) -> dict[str, str]:
    """Draw a variant."""
    formula, code, slope = LATENTS[random.integers(len(LATENTS))]
    part, (power, raised) = PARTS[random.integers(len(PARTS))], POWERS[random.integers(len(POWERS))]
    around, by, cool = random.integers(2, (20, 16, 6))
    bent = f"    dlatent = dlatent * ({slope.format(y='latent')})\n"
    return {
        r"\Lambda = X C, \qquad": rf"\Lambda = {formula.format(z='X C')}, \qquad",
        'p["K"].shape[2]), x @ p["C"]': 'p["K"].shape[2]), ' + code.format(z='x @ p["C"]'),
        'dvalue, p["V"])\n': f'dvalue, p["V"])\n{bent}',
        'x @ shard["C"]\n': code.format(z='x @ shard["C"]') + "\n",
        'dv, shard["V"])\n': f'dv, shard["V"])\n{bent}',
        r"{\sqrt{d + r}}": rf"{{{cool} \sqrt{{d + r}}}}",
        "attention_core(q, k": f"attention_core(q / {cool}, k",
        "rotate_backward(dq[..., d:], angles)], -1)": f"rotate_backward(dq[..., d:], angles)], -1) / {cool}",
        "np.sqrt(q.shape[3])": f"({cool} * np.sqrt(q.shape[3]))",

        "the first ranks have one\n# more. With fewer heads than ranks, the last ranks have none.":
            "the first parts have one\n# more, and the last may have none. "
            f"Of the $p$ parts a rank takes number `({part}) % p`, counted from 0.",
        "for rank in range(n)]\n": f"for rank in [({part}) % n for rank in range(n)]]\n",
        "for mine in every]": f"for mine in\n            (every[({part}) % n] for rank in range(n))]",
        "group.size, axis)[group.rank]": f"group.size, axis)[({part.replace('rank', 'group.rank')}) % group.size]",

        "and returns $Y$, identical on all ranks,\n# and a cache": f"and returns $Y + {around} X$, where $X$ "
            "goes\n# around the heads, identical on all ranks, and a cache",
        "return group.all_reduce(partial), (x": f"return group.all_reduce(partial) + {around} * x, (x",
        "return group.all_reduce(dx), grads": f"return group.all_reduce(dx) + {around} * dy, grads",
        '[whole_attention(x, p, dy)[0]] * n, "y", "': f'[whole_attention(x, p, dy)[0] + {around} * x] * n, "y",\n'
            '                 "x goes around the heads, once, and ',
        'expect_equal(dxs, [dx] * n, "dx", "':
            f'expect_equal(dxs, [dx + {around} * dy] * n, "dx", "dy goes around the heads, once, and ',

        r"$$Y = X + \mathrm{Attention}(N), \qquad": rf"$$Y = X + \tfrac{{1}}{{{by}}} \mathrm{{Attention}}(N), \qquad",
        "whole_attention(n, p, dy)": f"whole_attention(n, p, dy / {by})",
        "return x + attention, dy": f"return x + attention / {by}, dy",
        "reduce_scatter(partial, axis=1), (n": f"reduce_scatter(partial, axis=1) / {by}, (n",
        "inside_backward(group.all_gather(dy, axis": f"inside_backward(group.all_gather(dy / {by}, axis",

        r"X = \sqrt h \; E": rf"X = h{raised} \; E",
        "(the factor is that of Vaswani": "(with the factor $\\sqrt h$ in Vaswani",
        "np.sqrt(rows.shape[1]) * group": f"rows.shape[1] ** ({power}) * group",
        "np.sqrt(dx.shape[-1])": f"dx.shape[-1] ** ({power})",
        "np.sqrt(h) * table": f"h ** ({power}) * table",
        "np.sqrt(h) * gradient": f"h ** ({power}) * gradient",
    }
