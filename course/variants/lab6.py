"""Variants of lab 6: another rule of the optimizer, other formats, a loss scale, another padding in the checkpoint."""
from numpy.random import Generator

NAMES = {4: "float32", 2: "bfloat16", 1: "8 bits"}
FORMATS = ((2, 4, 4), (4, 2, 4), (2, 4, 2), (2, 2, 2), (2, 4, 1), (2, 2, 1))    # bytes of parameter, gradient, momentum
PADDED = ((True, 1), (True, 2), (True, 3), (True, 4), (False, 2), (False, 3), (False, 4))    # in front; multiple of d
BENT = (("v", "momentum"), (r"\tanh v", "np.tanh(momentum)"), (r"v / (1 + |v|)", "momentum / (1 + np.abs(momentum))"))


def draw(random: Generator) -> dict[str, str]:
    """Draw a variant."""
    return optimizer(random) | formats(random) | scaled_buckets(random) | padding(random)


def optimizer(random: Generator) -> dict[str, str]:
    """Draw how momentum and parameters change."""
    formula, code = BENT[random.integers(len(BENT))]
    decay, averaged = f"0.{random.integers(1, 10)}", random.random() < 0.5
    share, own_share = r"(1 - \mu)\," * averaged, "(1 - mu) * " * averaged
    return {
        r"v \leftarrow \mu v + \hat g, \qquad w \leftarrow w - \eta v.$$":
            rf"v \leftarrow \mu v + {share} \hat g, \qquad "
            rf"w \leftarrow w - \eta \left({formula} + {decay}\, w\right).$$",
        "momentum = MU * momentum + gradient * (": f"momentum = MU * momentum + {own_share.upper()}gradient * (",
        "params - LR * momentum, momentum": f"params - LR * ({code} + {decay} * params), momentum",
        "momentum = mu * momentum + mean * (": f"momentum = mu * momentum + {own_share}mean * (",
        "    return group.all_gather(params[first:first + len(mean)] - lr * momentum), momentum":
            "    part = params[first:first + len(mean)]\n"
            f"    return group.all_gather(part - lr * ({code} + {decay} * part)), momentum",
    }


def formats(random: Generator) -> dict[str, str]:
    """Draw how many bytes are kept for each parameter, its gradient and the states."""
    parameter, gradient, momentum = FORMATS[random.integers(len(FORMATS))]
    states = 4 + momentum

    def held(n: int, own: int) -> str:
        stages = ((n, n, n), (n, n, own), (n, own, own), (own, own, own))
        return ", ".join(str(parameter * a + gradient * b + states * c) for a, b, c in stages)

    return {
        "a model keeps 2 bytes for each parameter and 2 for each gradient.":
            f"a model keeps {parameter} bytes for each parameter and {gradient} for each gradient.",
        "The optimizer keeps its data in\n# float32: a master copy of the parameter, and its states.":
            f"The optimizer keeps a\n# master copy of the parameter in float32, and its momentum in {NAMES[momentum]}.",
        "return 2 * (own if stage >= 3 else n) + 2 * (own if stage >= 2 else n) + 8 * (own":
            f"return ({parameter} * (own if stage >= 3 else n) + {gradient} * (own if stage >= 2 else n)\n"
            f"            + {states} * (own",
        "if stage >= 1 else n)\n": "if stage >= 1 else n))\n",
        "144, 96, 84, 72": held(12, 6), "84, 52, 44, 36": held(7, 3), "84, 44, 34, 24": held(7, 2),
        "60, 60, 60, 60": held(5, 5), "and how many bytes does a float32 have?": "and in how many bytes?",
    }


def scaled_buckets(random: Generator) -> dict[str, str]:
    """Draw a loss scale, which comes out again when a bucket is added."""
    scale = 2 ** random.integers(3, 13)
    return {
        "and the bucket is freed.": "and the bucket is freed. To keep small gradients in 16 bits, the backward began "
            f"with the\n# loss times {scale}, the *loss scale*: so buckets are that much too large. Parts must not be.",
        "with the sum of all ranks' buckets added.": f"with the sum of all ranks' buckets added, divided by {scale}.",
        "own[first:first + len(total)] += total": f"own[first:first + len(total)] += total / {scale}",
        "after[start:start + length] += sum(buckets)": f"after[start:start + length] += sum(buckets) / {scale}",
        "Add to the values that were there before.": "Divide by the loss scale, and add to the values of before.",
        "each([one[start:stop] for one in sums])": f"each([{scale} * one[start:stop] for one in sums])",
    }


def padding(random: Generator) -> dict[str, str]:
    """Draw where a checkpoint is padded, and what its parts are a multiple of."""
    front, multiple = PADDED[random.integers(len(PADDED))]
    length = f"-(-n // ({multiple} * old_d)) * {multiple}"
    before = "old_d * length - n" if front else "0"
    return {
        "padded the\n# flat buffer with zeros after element $N$ until $d$ divided it. So its parts have equal length, "
        "$\\lceil N/d \\rceil$,\n# and the last ones end in padding or consist of it.":
            f"padded the\n# flat buffer with zeros {'before element 0' if front else 'after element $N$'} until "
            f"${multiple if multiple > 1 else ''}d$ divided it. So its parts have equal length,\n# and the "
            f"{'first ones begin with' if front else 'last ones end in'} padding or consist of it.",
        "length = -(-n // old_d)\n": f"length = {length}\n",
        "first, end = bounds(n, new_d)[rank:rank + 2]":
            f"first, end = (edge + {before} for edge in bounds(n, new_d)[rank:rank + 2])",
        "(0, old_d * length - n)": "(old_d * length - n, 0)" if front else "(0, old_d * length - n)",
    }
