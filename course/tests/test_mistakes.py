"""Mistakes in the labs' answers: each loses the right points, with a message that explains it."""
from copy import deepcopy
from functools import cache

import pytest

from course.grading.answers import answers_of
from course.grading.sandbox import functions_of
from course.tests import submissions
from course.tests.hostile import Submission
from course.tests.submissions import (LAB1, LAB2, LAB3, LAB4, LAB5, LAB6, LAB7, LAB8, checks_of, marks_of, plant,
                                      solution)
from tests.deep import one_fast_of

# By lab: the answer, the text in it that another one replaces, the checks that fail, and what they say ("a|b").
MISTAKES: dict[str, dict[str, tuple[str, str, str, str, str]]] = {}
MISTAKES[LAB1] = {
    "passes x to the rank before": (
        "pass_on", "exchange(x, (group.rank + 1) % group.size, (group.rank - 1)",
        "exchange(x, (group.rank - 1) % group.size, (group.rank + 1)", "pass_on", "rank r passes its array on"),
    "joins chunks as they came": (
        "all_gather", "[chunks[rank] for rank in range(group.size)]", "list(chunks.values())",
        "all_gather all_gather_cost", "expected"),
    "only where chunks are even": (
        "reduce_scatter", "chunks = np.array_split(x, group.size)", "chunks = np.split(x, group.size)",
        "reduce_scatter reduce_scatter_cost", "equal"),
    "shape forgotten": ("all_reduce", ".reshape(x.shape)", "", "all_reduce", "shape"),
    "added the other way round": (
        "all_reduce_in_order", "group.receive(before) + x ",
        "group.receive(before) * 1.0000000000000003 + x ", "in_order in_order_cost", "order"),
}
MISTAKES[LAB2] = {
    "splits Q, K, V and U as one matrix": (
        "shard", "np.hstack([*(mine(one, 1, d) for one in (Q, K, V)), mine(U, 1)])", 'mine(whole["W_in"], 1)',
        "shard", "four matrices side by side"),
    "splits Q, K and V by columns, not by heads (hidden)": (
        "shard", "mine(one, 1, d)", "mine(one, 1)", "shard", "by heads"),
    "joins shard by shard": (
        "join", "np.hstack([np.hstack(parts) for parts in zip(*columns)])",
        'np.hstack([one["W_in"] for one in shards])', "join", "all of Q stands left"),
    "f's backward adds nothing up": (
        "f_and_g", "return group.all_reduce(dx)", "return dx", "f", "only a part"),
    "g's backward adds up": (
        "f_and_g", "return dy", "return group.all_reduce(dy)", "g", "may not be used here"),
    "the slope of ReLU, not of its square": (
        "inside", "(2 * np.maximum(u, 0))", "(u > 0)", "inside_backward",
        "line by line"),
    "every rank adds x and the bias": (
        "block", 'x + g(group, partial) + shard["bias"]', 'g(group, x + partial + shard["bias"])', "block_forward",
        "in the sum once"),
    "the norm's backward before the sum": (
        "block", 'norm_backward(f_backward(group, dn), shard["gain"], unit)\n    return dy + dx',
        'norm_backward(dn, shard["gain"], unit)\n    return dy + f_backward(group, dx)', "block_backward",
        "the gradient of 'gain' is not right"),
    "no gradient past the region": ("block", "return dy + dx", "return dx", "block_backward", "gone past the region"),
    "sends what is needed, and returns something else": (
        "block", "return dy + dx", "return 0 * (dy + dx)", "block_backward block_cost", "far from the right result"),
    "a rank without heads and columns stays away (hidden)": (
        "block", "    partial, kept",
        '    if not shard["W_out"].size:\n        return x + shard["bias"], (n, unit, [])\n    partial, kept',
        "block_forward block_backward", "needs all ranks"),
    "two all-reduces backward": (
        "block", "f_backward(group, dn)", "f_backward(group, dn / 4) + f_backward(group, 3 * dn / 4)",
        "block_cost", "for the backward"),
    "what an early f sends, once for both norms (hidden)": (
        "sent", "regions * 2 * elements", "2 * (regions * elements - 2 * h * (early and not parallel))", "sent",
        "how many regions"),
}
ATTENTION_BACKWARD = "attention_backward attention_cost"
SEQUENCE_BACKWARD = "sequence_backward sequence_cost"
MISTAKES[LAB3] = {
    "splits the latent, too": (
        "shard", '(("Q", 1),', '(("C", 1), ("Q", 1),', "shard", "needs all of the others"),
    "only where heads are even (hidden)": (
        "shard", "np.array_split(whole", "np.split(whole", "shard", "equal division"),
    "takes what is sharded by heads for partial (hidden)": (
        "is_partial", '("C", "R", "x")', '("C", "R", "x", "K", "V")', "is_partial", "one rank's heads only"),
    "forgets the rope key (hidden)": (
        "is_partial", '("C", "R", "x")', '("C", "x")', "is_partial", "is_partial('R')"),
    "the rope key is not turned": (
        "inside", 'rope(x @ shard["R"])[', '(x @ shard["R"])[', "inside inside_backward",
        "rope turns the last r columns"),
    "the rope key's gradient is not turned back": (
        "inside", "rope(dk[..., -r:].sum(axis=1), -1)", "rope(dk[..., -r:].sum(axis=1))",
        "inside_backward", "rank 0 of 2: the gradient of 'R'"),
    "the last head's gradient of the rope key": (
        "inside", "dk[..., -r:].sum(axis=1)", "dk[:, -1:, :, -r:].sum(axis=1)",
        "inside_backward", "all heads share the rope key"),
    "the latent's gradient from the keys alone": (
        "inside", ' + np.einsum("basd,cad->bsc", dv, shard["V"])', "", "inside_backward",
        "into keys and values"),
    "own heads' gradient of the latent alone": (
        "attention", 'group.all_reduce(np.hstack([grads["C"], grads["R"]]))', 'np.hstack([grads["C"], grads["R"]])',
        ATTENTION_BACKWARD, "some are partial"),
    "adds up what is complete": (
        "attention", "    return group.all_reduce(dx), grads",
        '    grads["K"] = group.all_reduce(grads["K"])\n    return group.all_reduce(dx), grads', ATTENTION_BACKWARD,
        "complete already"),
    "a rank without heads stays away (hidden)": (
        "attention", "    both = group", '    if not shard["O"].size:\n        return dy * 0, grads\n    both = group',
        ATTENTION_BACKWARD, "needs all ranks"),
    "a token that occurs twice counts once": (
        "embed", "np.add.at(drows, tokens[here] - mine[:1], dx[here] * np.sqrt(dx.shape[-1]))",
        "drows[tokens[here] - mine[:1]] += dx[here] * np.sqrt(dx.shape[-1])", "embedding_backward", "twice"),
    "pad learns": ("embed", " & (tokens != pad)", "", "embedding_backward", "pad has none"),
    "scaled before the sum, too": (
        "embed", "x[here] = rows", "x[here] = np.sqrt(rows.shape[1]) * rows", "embedding", "expected"),
    "tokens as if they divided (hidden)": (
        "embed", "np.array_split(np.arange(V), group.size)[group.rank]\n    drows",
        "np.arange(V)[group.rank * (V // group.size):][:-(-V // group.size)]\n    drows", "embedding_backward",
        "its rows"),
    "the norm's gradients of own positions": (
        "sequence", 'np.cumsum([one.shape[1] for one in partial.values()])[:-1], axis=1)\n',
        'np.cumsum([one.shape[1] for one in partial.values()])[:-1], axis=1)\n    sums[2:] = dgain, dshift\n',
        SEQUENCE_BACKWARD, "over all positions"),
    "the latent's gradient of own heads (of all positions)": (
        "sequence", 'return dy + dx, {**grads, **summed}',
        'summed["C"] = grads["C"]\n    return dy + dx, {**grads, **summed}', SEQUENCE_BACKWARD,
        "all heads that read it"),
}
LOSS = "loss extreme"
MISTAKES[LAB4] = {
    "every rank subtracts its own maximum": (
        "log_sum_exp", 'group.all_reduce(logits.max(axis=-1, initial=-np.inf), "max")',
        "logits.max(axis=-1, initial=-np.inf)", "log_sum_exp", "the same number"),
    "nothing is subtracted": (
        "log_sum_exp", 'group.all_reduce(logits.max(axis=-1, initial=-np.inf), "max")', "np.zeros(logits.shape[:2])",
        "log_sum_exp", "got inf|got nan"),
    "a rank without tokens stays away (hidden)": (
        "predict", "    highest =", "    if not logits.size:\n        return np.zeros(logits.shape[:2])\n    highest =",
        "predict", "which needs all ranks"),
    "the last of those with the largest logit (hidden)": (
        "predict", "return -group.all_reduce(-lowest, \"max\")",
        "return group.all_reduce(np.where(lowest == none, -1, lowest), \"max\")", "predict", "is the lowest"),
    "the mean over the rank's tokens": (
        "loss_forward", "eps / V, 0.0", "eps / max(len(ids), 1), 0.0", f"backward {LOSS}", "not the rank's"),
    "zero times minus infinity (hidden)": (
        "loss_forward", "(wanted * np.where(ids < V, logits, 0))", "(wanted * logits)", "extreme", "got nan"),
    "ignored tokens have a loss": (
        "loss_forward", "np.where(counts, lse - picked + zeta * lse * lse, 0.0)", "lse - picked + zeta * lse * lse",
        LOSS, "-100 is no token"),
    "sends what is needed, and returns something else": (
        "loss_forward", "np.where(counts, lse - picked + zeta * lse * lse, 0.0)", "0 * lse", f"{LOSS} cost",
        "far from the right result"),
    "no gradient of the z-loss": (
        "loss_forward", " * (1 + 2 * zeta * lse)[..., None]", "", "backward", "in every term"),
    "the mean of the ranks' means": (
        "mean_loss", "group.all_reduce(np.array([loss[counts].sum(), counts.sum()]))",
        "group.all_reduce(np.array([loss[counts].mean(), 1]))", "mean", "on all ranks together"),
    "no token counts anywhere (hidden)": (
        "mean_loss", "total / max(number, 1), counts / max(number, 1)", "total / number, counts / number",
        "mean", "And if there are none"),
}
MISTAKES[LAB5] = {
    "the last stage takes what is left": (
        "distribute", "return best[p][len(costs)][1]", "each = len(costs) // p\n    return [each] * (p - 1) + "
        "[len(costs) - each * (p - 1)]", "distribute", "can be reached"),
    "one forward more ahead": (
        "one_f_one_b", "actions = forward[:most]", "most += 1\n        actions = forward[:most]",
        "one_f_one_b", "should be a backward"),
    "only the next rank looked at": (
        "smallest_in_flight", "range(r + 1, p):", "range(r + 1, min(r + 2, p)):",
        "smallest_in_flight", "on all ranks behind it"),
    "the division rounded up as it is (hidden)": (
        "smallest_in_flight", " - 1e-9", "", "smallest_in_flight", "are enough on rank 0"),
    "a short last group": (
        "interleaved", "range(first, first + p) for", "range(first, min(first + p, m)) for",
        "interleaved_time", "microbatches 6 and 7"),
    "GPipe, interleaved": (                        # valid, but dear in memory
        "interleaved", "most = 2 * (p - 1 - rank) + (v - 1) * p + 1", "most = m * v + p * v",
        "interleaved", "in flight"),
    "backwards from the first stage on": (
        "interleaved", "in reversed(stages)", "in stages", "interleaved interleaved_time",
        "in a cycle"),
    "weights' gradients not summed": (
        "play", "dws[stage] += dw", "dws[stage] = dw", "play play_interleaved", "weight of stage"),
    "a rank's neighbour is one stage on": (        # which is so as long as a rank has one stage
        "play", "elsewhere = 0 <= to < stages and to % group.size != rank", "elsewhere = 0 <= to < group.size",
        "play_interleaved", "rank"),
}
ZERO_STEPS = "zero1 zero1_cost zero2"      # what the helper `update` is part of
MISTAKES[LAB6] = {
    "a shape's sizes added up": (
        "layout", "int(np.prod(shape))", "int(np.sum(shape))", "layout", "from_flat"),
    "the last rank takes the rest (hidden)": (
        "layout", "[rank * (n // d) + min(rank, n % d) for rank in range(d + 1)]",
        "[rank * (n // d) for rank in range(d)] + [n]",
        "bounds", "one more"),
    "a mean of means (hidden)": (
        "zero1_step", "group.reduce_scatter(gradient * samples), samples,", "group.reduce_scatter(gradient), 1,",
        "zero1", "weight each gradient with its samples"),
    "the norm of the own part": (
        "zero1_step", "np.sqrt(group.all_reduce((mean * mean).sum()))", "np.sqrt((mean * mean).sum())", ZERO_STEPS,
        "the same number on all ranks"),
    "scaled to the norm, even where it is small": (
        "zero1_step", "(min(1, clip / norm) if norm > 0 else 1)", "clip / max(norm, 1e-300)",
        "zero1 zero2", "norm"),
    "a whole gradient on every rank": (                 # right, but it sends more
        "zero1_step", "group.reduce_scatter(gradient * samples)",
        "np.array_split(group.all_reduce(gradient * samples), group.size)[group.rank]", "zero1_cost",
        "are enough"),
    "the bucket laid at the part's beginning": (
        "take_bucket", "first = start + mine.start - ends[group.rank]", "first = 0",
        "take_bucket take_bucket_cost", "overlap"),
    "no samples, no part in the step (hidden)": (
        "zero1_step", "return update(group, params, momentum, group",
        "if not samples:\n        return params, momentum\n    return update(group, params, momentum, group",
        "zero1", "which needs all ranks"),
    "all of the bucket to everyone": (                  # right, but it sends more
        "take_bucket", "group.exchange(bucket[piece(to)], to, (group.rank - k) % group.size)",
        "group.exchange(bucket, to, (group.rank - k) % group.size)[mine]", "take_bucket_cost", "are enough"),
    "the sum taken for the mean": (
        "zero2_step", "return update(group, params, momentum, own, samples,",
        "return update(group, params, momentum, own, 1,", "zero2", "not yet a mean"),
    "parts that are not padded (hidden)": (
        "plan", "pieces = [(file, max(first - file * length, 0), min(end - file * length, length)) for file in "
        "range(old_d)]", "old = bounds(n, old_d)\n    pieces = [(file, max(first - old[file], 0), "
        "min(end, old[file + 1]) - old[file]) for file in range(old_d)]", "plan", "where does a file begin"),
}
MISTAKES[LAB7] = {
    "one rank proves nothing": (
        "diagnose_columns", '"ranks": 2', '"ranks": 1', "diagnose_columns", "the broken function is right"),
    "another rule (hidden)": (
        "diagnose_columns", '["conjugate"]', '["once"]', "diagnose_columns", "not what this function breaks"),
    "the weight's gradient summed, too": (
        "columns", "x.T @ dy\n", "group.all_reduce(x.T @ dy)\n", "columns", "to dw of a column"),
    "a blind gradient that sees": (
        "diagnose_gathered", "np.ones((2, 4))", "random.normal(size=(2, 4))", "diagnose_gathered",
        "With your blind dy the broken function is wrong"),
    "a blind gradient of zeros": (
        "diagnose_gathered", "np.ones((2, 4))", "np.zeros((2, 4))", "diagnose_gathered", "without zeros"),
    "the rank times its own columns (hidden)": (
        "gathered", "np.array_split(dy, group.size, axis=1)[group.rank]",
        "dy[:, group.rank * w.shape[1]:][:, :w.shape[1]]", "gathered", "one more than it has"),
    "a vocabulary that divides": (
        "diagnose_lookup", "size=(3, 2)),\n            \"dy\"", "size=(4, 2)),\n            \"dy\"",
        "diagnose_lookup", "the broken function is right"),
    "as if it were padded (hidden)": (
        "lookup", "group.rank * (V // group.size) + min(group.rank, V % group.size)",
        "group.rank * -(-V // group.size)", "lookup", "the ranks before this one"),
    "no maximum at all (hidden)": (
        "loss", 'shifted = logits - group.all_reduce(logits.max(axis=1), op="max")[:, None]', "shifted = logits",
        "loss", "the largest logit"),
    "no samples, no all-reduce (hidden)": (
        "average", "return [", "if samples == 0:\n        return [gradient]\n    return [", "average",
        "which needs all ranks"),
}
MISTAKES[LAB8] = {
    "as many replicas as stages (hidden)": (
        "places", "rank // (t * d)", "rank // (t * p)", "places", "do all ranks"),
    "whole arrays around the ring": (
        "sum_among", "chunks = [chunk.copy() for chunk in np.array_split(np.asarray(x).reshape(-1), k)]",
        "chunks = None\n    whole = sent = np.array(x)\n    for _ in range(k - 1):\n"
        "        sent = group.exchange(sent, after, before)\n        whole = whole + sent\n    return whole",
        "sum_among_cost", "are enough"),
    "f does not sum": (
        "step", 'sum_among(group, da @ shard["A"][l].T, tensor)', 'da @ shard["A"][l].T', "step", "missing"),
    "the input's gradient lost beside the layer": (
        "step", "dx = dx + sum_among", "dx = sum_among", "step", "the gradient|'A'|'E'"),
    "the mean of a microbatch": (
        "step", "dz /= samples", "dz /= len(z)", "step", "gradient"),
    "the loss of the last stage alone": (
        "step", "sum_among(group, parts.pop(), pipeline)[0]", "parts.pop()[0]", "step", "the loss|sent"),
    "GPipe's caches": (
        "predict", "min(m, p - stage)", "m", "held", "in flight"),
    "the bubble against the useful time": (
        "predict", "(p - 1) / (m + p - 1)", "(p - 1) / m", "bubble", "does nothing"),
    "two sums forgotten": (
        "predict", "m * 2 * (L // p) * ring", "m * (L // p) * ring", "sent", "what was counted"),
    "one microbatch": ("train", '"m": 4', '"m": 1', "train", "larger than a fifth"),
    "the slowest bucket": ("measured", '"chosen": 1024', '"chosen": 16384', "measured", "You chose 16384"),
    "one run repeated": ("measured", "[14.55, 4.18, 2.57]", "[3, 3, 3]", "measured", "were they measured"),
}

@pytest.fixture(autouse=True)
def three_steps(monkeypatch):
    """Let lab 8 train for three steps, in which nobody learns much, since forty take seconds."""
    monkeypatch.setattr(submissions, "solution", shortened)


@cache
def shortened(lab: str):
    """Return the instructor's notebook, with a short training run."""
    notebook = deepcopy(solution(lab))
    for cell in notebook.cells:
        cell.source = cell.source.replace("STEPS = 40 ", "STEPS = 3 ").replace("ABOVE = 0.35 ", "ABOVE = 9.0 ")
    return notebook


@pytest.mark.parametrize("lab, mistake", [case for lab, rows in MISTAKES.items()
                                          for case in one_fast_of(len(rows), [(lab, mistake) for mistake in rows])])
def test_a_mistake_loses_its_points(lab, mistake):
    """If it is called "... (hidden)", the part of a check that students see passes."""
    answer, old, new, lost, phrases = MISTAKES[lab][mistake]
    submission = Submission(lab, plant(lab, answer, old, new), lost, phrases)
    found = submission.marks()
    assert submission.fault(found) == ""
    assert not mistake.endswith("(hidden)") or all(found[check].said.startswith("passed") for check in checks_of(lost))


# ---- whole answers ----

FOR_ALL = """
def all_reduce_in_order(group, x):
    if group.rank > 0:
        group.send(x, 0)
        return group.receive(0)
    for rank in range(1, group.size):
        x = x + group.receive(rank)
    for rank in range(1, group.size):
        group.send(x, rank)
    return x
"""       # no more than a ring sends, all ranks together, and the bits are right
KEEPS_ALL_OF_N = ("    partial, kept = inside(group.all_gather(n, axis=1), shard)",
                  "    n = group.all_gather(n, axis=1)\n    partial, kept = inside(n, shard)",
                  "group.all_gather(n, axis=1), shard, kept)", "n, shard, kept)")
RECEIVES_COMPUTES_SENDS = """
    come = {("F", 0, i): x for i, x in enumerate(xs)} | {("B", stages - 1, i): dy for i, dy in enumerate(dys)}
    caches, dws = {}, {stage: np.zeros_like(w) for stage, w in weights.items()}
    for kind, stage, i in schedule[group.rank]:
        if (kind, stage, i) not in come:
            come[kind, stage, i] = group.receive((stage - 1 if kind == "F" else stage + 1) % group.size)
        if kind == "F":
            y, caches[stage, i] = stage_forward(weights[stage], come[kind, stage, i])
        else:
            y, dw = stage_backward(weights[stage], caches.pop((stage, i)), come[kind, stage, i])
            dws[stage] += dw
        to = stage + 1 if kind == "F" else stage - 1
        if 0 <= to < stages:
            group.send(y, to % group.size)
    return {"ys": {}, "dxs": {}, "dws": dws}
"""         # the player that suggests itself
GATHERS_LOGITS = """
import numpy as np
def loss(group, logits, targets, dloss, first):
    z = group.all_gather(logits, axis=1)
    e = np.exp(z - z.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    at = np.arange(len(z)), targets
    grad = p.copy()
    grad[at] -= 1
    return (np.log(e.sum(1)) - (z - z.max(1, keepdims=True))[at],
            (dloss[:, None] * grad)[:, first:first + logits.shape[1]])
"""


def broken_functions() -> dict[str, str]:
    """Return what lab 7 asks to repair, as answers."""
    names: dict = {}
    for cell in solution(LAB7).cells:
        if "broken_" in cell.metadata.get("nbgrader", {}).get("grade_id", ""):
            exec(cell.source, names)
    return {name: names[f"BROKEN_{name.upper()}"] for name in ("columns", "gathered", "lookup", "loss")}


def ends_in(lab: str, answer: str, start: str, body: str) -> dict[str, str]:
    """Return the solution of an answer with this body in place of its own from `start` on."""
    source = answers_of(solution(lab))[answer]
    return {answer: source[:source.index(start)] + body}


GRADS = 'group.all_reduce(np.hstack([grads["C"], grads["R"]]))'
WASTE = {**plant(LAB8, "step", "    names = sorted(grads)\n",
                 "    ranks = t * p * d\n    group.exchange(np.zeros(900), (group.rank + 1) % ranks, "
                 "(group.rank - 1) % ranks)\n    names = sorted(grads)\n"),
         **plant(LAB8, "predict", "sent.append(", "sent.append(900 + ")}
SUBMISSIONS = {
    "one rank does the work for all": Submission(LAB1, {"all_reduce_in_order": FOR_ALL}, "in_order_cost",
                                                 "are enough"),
    "keeps all of n": Submission(LAB3, plant(LAB3, "sequence", *KEEPS_ALL_OF_N), "sequence_cost", "for the backward"),
    "adds up half of the gradients twice": Submission(
        LAB3, plant(LAB3, "attention", GRADS, f"sum({GRADS[:-1]} / 2) for _ in range(2))"),
        "attention_cost", "for the backward"),
    "keeps the logits": Submission(
        LAB4, {**plant(LAB4, "loss_forward", ", 0.0), slope\n", ", 0.0), (slope, logits)\n"),
               **plant(LAB4, "loss_backward", "* cache", "* cache[0]")}, "cost", "for the backward"),
    "receives, computes, sends": Submission(
        LAB5, ends_in(LAB5, "play", "    arrived = {", RECEIVES_COMPUTES_SENDS),
        "play play_interleaved",
        "rank 0 waits to send to rank 1.\nrank 1 waits to send to rank 0.\nThey wait in a cycle: 0 -> 1 -> 0"),
    "all logits gathered, which is right but too dear": Submission(LAB7, {"loss": GATHERS_LOGITS}, "loss",
                                                                  "are enough"),
    "broken functions as answers": Submission(LAB7, broken_functions(), "columns gathered lookup loss", ""),
    "more than is needed, as predicted": Submission(LAB8, WASTE, "step sent", "are enough"),
}


@pytest.mark.parametrize("name", one_fast_of(len(SUBMISSIONS), SUBMISSIONS))
def test_a_submission_loses_its_points(name):
    assert SUBMISSIONS[name].fault(SUBMISSIONS[name].marks()) == ""


# By lab and answer: a result of the wrong kind, a check that fails, and what it says.
KINDS = {
    LAB5: {"distribute": ("[1, 'a']", "distribute", "whole numbers"),
           "one_f_one_b": ("[[1], [2]]", "one_f_one_b", "no action"),
           "play": ("{'ys': []}", "play", "no dict"),
           "interleaved": ("None", "interleaved", "list of 2 lists")},
    LAB6: {"zero1_step": ("3", "zero1", "expected two arrays"),
           "layout": ("'a'", "layout", "array of numbers"),
           "plan": ("[(9, 0.5, 'a')]", "plan", "is no piece")},
    LAB7: {"diagnose_columns": ("3", "diagnose_columns", "expected a dict"),
           "loss": ("(None, None)", "loss", "None"),
           "diagnose_loss": ("{'ranks': 2, 'logits': [1.0], 'targets': 0, 'dloss': 0, 'breaks': ['weights']}",
                             "diagnose_loss", "2 axes"),
           "columns": ("args[1]", "columns", "expected y, dx, dw")},
    LAB8: {"places": ("7", "places", "should return 3 values"),
           "predict": ("[1]", "held", "a dict with sent"),
           "measured": ("{'exposed': {'1024': [1]}, 'chosen': 1024}", "measured", "at least five bucket sizes")},
}


@pytest.mark.parametrize("lab", one_fast_of(2, KINDS))
def test_a_result_of_the_wrong_kind_is_reported(lab):
    asked = answers_of(solution(lab))
    found = marks_of(lab, **{answer: "".join(f"def {name}(*args):\n    return {value}\n"
                                             for name in functions_of(asked[answer]))
                             for answer, (value, *_) in KINDS[lab].items()})
    for _, check, words in KINDS[lab].values():
        assert found[f"check_{check}"].points == 0 and words in found[f"check_{check}"].said
