"""Variants of lab 4: other terms of the loss, another mark of ignored tokens, another token among equals."""
from numpy.random import Generator

TERMS = (       # of lse and m: its formula, its code, and that of its slope
    (r"(\mathrm{{lse}} - {m})^2", "(lse - {m}) ** 2", "2 * (lse - {m})"),
    (r"\sqrt{{1 + (\mathrm{{lse}} - {m})^2}}", "np.sqrt(1 + (lse - {m}) ** 2)",
     "(lse - {m}) / np.sqrt(1 + (lse - {m}) ** 2)"),
    (r"|\mathrm{{lse}} - {m}|", "abs(lse - {m})", "np.sign(lse - {m})"),
)


def draw(random: Generator) -> dict[str, str]:
    """Draw a variant."""
    middle = int(random.integers(2, 10))
    formula, value, slope = (text.format(m=middle) for text in TERMS[random.integers(len(TERMS))])
    ignored, highest, others = -int(random.integers(2, 90)), random.random() < 0.5, random.random() < 0.5
    found = {
        r"\zeta\, \mathrm{lse}^2$$": rf"\zeta\, {formula}$$",
        "pulled to 0, so that": f"pulled to {middle}, so that",
        "zeta * lse ** 2\n": f"zeta * {value}\n",
        "zeta * lse * lse,": f"zeta * {value},",
        "(1 + 2 * zeta * lse) * np": f"(1 + zeta * {slope}) * np",
        "(1 + 2 * zeta * lse)[..., None]": f"(1 + zeta * {slope})[..., None]",
        "$-100$": f"${ignored}$", "targets != -100": f"targets != {ignored}", "IGNORED = -100": f"IGNORED = {ignored}",
        "and -100 is no token": f"and {ignored} is no token",
    }
    if highest:
        found |= {
            "it is the one with the lowest id": "it is the one with the highest id",
            'There is no\n# `group.all_reduce(x, "min")`, and you do not need one.': "A rank may have\n# no tokens.",
            "    ids, none = start + np.arange(logits.shape[-1]), 2 ** 40\n"
            "    lowest = np.where(logits == highest[..., None], ids, none).min(axis=-1, initial=none)\n"
            '    return -group.all_reduce(-lowest, "max")\n':
                "    ids = np.where(logits == highest[..., None], start + np.arange(logits.shape[-1]), -1)\n"
                '    return group.all_reduce(ids.max(axis=-1, initial=-1), "max")\n',
            "its id, the lowest if": "its id, the highest if",
            "[logits.argmax(-1)] * n": "[P - 1 - logits[..., ::-1].argmax(-1)] * n",
            "which id is the lowest?": "which id is the highest?",
        }
    if others:
        found |= {
            r"\frac{\varepsilon}{V} \sum_v \mathrm{nll}(v)":
                r"\frac{\varepsilon}{V - 1} \sum_{v \neq t} \mathrm{nll}(v)",
            r"$1 - \varepsilon + \varepsilon/V$ and" "\n" r"#   $\varepsilon/V$.":
                "$1 - \\varepsilon$ and $\\varepsilon/(V - 1)$\n#   for each of the others.",
            "+ eps / V * exists ": "+ eps / (V - 1) * (exists & (np.arange(logits.shape[-1]) != targets[..., None])) ",
            "np.where(ids == targets[..., None], 1 - eps, 0.0) + np.where(ids < V, eps / V, 0.0)":
                "np.where(ids == targets[..., None], 1 - eps, np.where(ids < V, eps / (V - 1), 0.0))",
            "The mean is over all V tokens, not the rank's;": "The mean is over all V - 1 others, not the rank's;",
        }
    return found
