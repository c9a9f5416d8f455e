"""Torchtitan's numerics logs, written here as its tracer writes them: the first operator that differs is named."""
import re
from pathlib import Path

import numpy as np
import pytest

from mpi_impl.compare.their_runs import are_recordings, compared
from mpi_impl.compare.their_runs.numerics import read_log
from reference.errors import UserError

FORWARD = ["layers.0.attention.wq/op_0_mm", "layers.0.attention.wq/op_1_add", "layers.1.feed_forward.w1/op_0_mm"]
STEP = "<none>/op_0__fused_adam_"      # works in place: it has no output, nor a shape


def block(key, number, dtype="bfloat16", shape=(8, 256), phase="", change=None):
    """Return the block of an operator, whose output `change` may change."""
    x = np.random.default_rng(number).normal(size=(8, 256))
    y = change(x) if change else x
    if key == STEP:
        return f"[{key}]\n  Input hashes: {abs(y).sum():.6e}, {abs(x).sum():.6e}\n  Phase: optimizer\n\n"
    return (f"[{key}]\n  Shape: torch.Size({list(shape)}), Dtype: torch.{dtype}\n  L2 norm: {(y**2).sum()**0.5:.6e}\n"
            f"  Min: {y.min():.6e}\n  Output hash: {abs(y).sum():.6e}, nan\n  Input hashes: {number:.6e}\n"
            f"  Input producers: ;\n  Location: common/attention.py:{number}\n{phase}\n")


def logs(folder, ranks=2, changes=None, operators=FORWARD, **more):
    """Write the logs of ranks; `changes` has what changes an output, by rank and operator."""
    folder.mkdir()
    for rank in range(ranks):
        blocks = [(key, phase) for phase in ("", "  Phase: backward\n") for key in operators] + [(STEP, "")]
        text = "".join(block(key, rank + 10 * len(key), phase=phase, **more,
                             **(changes or {}).get((rank, key, bool(phase)), {})) for key, phase in blocks)
        header = f"Total captured activations: {len(blocks)}\nExcluded ops dispatched: empty, view\n{'=' * 80}\n\n"
        (folder / f"rank_{rank}_activations.log").write_text(header + text)
    return str(folder)


def test_logs_of_the_same_norms_agree(tmp_path):
    """Whatever only one of the two has is said."""
    a, b = logs(tmp_path / "a"), logs(tmp_path / "b", operators=[*FORWARD, "head/op_0_mm"])
    assert are_recordings(a, b)
    text, differ = compared(a, b)
    assert not differ and "the norms of 14 operators on 2 ranks; 4 more are in one log alone. Only norms" in text, text


def off(factor):
    return {"change": lambda x: x * factor}


@pytest.mark.parametrize("changes, said", [
    ({(1, FORWARD[1], False): off(1.1), (0, FORWARD[2], False): off(1.1), (1, FORWARD[0], True): off(2)},
     ["forward: layers.0.attention.wq/op_1_add", "rank 1, at common/attention.py:", "[8, 256]",
      "L2 norm 4.5", "bfloat16 explains 1e-02", "have the same norms",
      "forward: layers.0.attention.wq/op_0_mm, which does not differ so",
      "   0  forward: layers.1.feed_forward.w1/op_0_mm"]),
    ({(0, FORWARD[0], True): off(1.1)},
     ["backward: layers.0.attention.wq/op_0_mm", "rank 0", "No other rank differs."]),
    ({(0, FORWARD[0], False): off(1.1), (1, FORWARD[2], True): {"shape": (4, 512)}},
     ["backward: layers.1.feed_forward.w1/op_0_mm", "[8, 256] (A), but [4, 512] (B)", "not of one model"]),
    ({(0, FORWARD[0], False): off(np.nan)},
     ["forward: layers.0.attention.wq/op_0_mm", "but nan (B)", "before     none\n"]),
    ({(1, STEP, False): off(1.1)}, [f"optimizer: {STEP}", "input's L1 norm", "a line that was not logged",
                                    "have other norms, too"])])
def test_the_first_operator_that_differs_is_named(tmp_path, changes, said):
    """By its place in its rank's log; a shape that differs before any norm."""
    a = logs(tmp_path / "a", operators=[FORWARD[0], "only/op_0_mul", *FORWARD[1:]])
    text, differ = compared(a, logs(tmp_path / "b", changes=changes))
    assert differ and all(one in text for one in said), text


@pytest.mark.parametrize("dtype, factor, differs", [
    ("bfloat16", 1.005, False), ("bfloat16", 1.02, True), ("float32", 1 + 2e-6, False), ("float32", 1.005, True),
    ("float64", 1 + 1e-5, True), ("float64", 1 + 4e-7, False), ("float8_e4m3fn", 1.005, False),
    ("int64", 1 + 1e-5, True)])
def test_the_tolerance_follows_the_dtype(tmp_path, dtype, factor, differs):
    changes = {(0, FORWARD[0], False): off(factor)}
    assert compared(logs(tmp_path / "a", dtype=dtype), logs(tmp_path / "b", 2, changes, dtype=dtype))[1] == differs


def test_operators_of_one_name_are_told_apart(tmp_path):
    log = read_log(str(Path(logs(tmp_path / "a", operators=FORWARD[:1] * 2), "rank_0_activations.log")))
    assert list(log)[:2] == [f"forward: {FORWARD[0]}", f"forward: {FORWARD[0]}, call 2"]


def edit(old, new):
    def change(folder):
        path = Path(folder, "rank_1_activations.log")
        path.write_text(re.sub(old, new, path.read_text()))
    return change


@pytest.mark.parametrize("change, said", [
    (edit(r"(?s)\[<none>.*", ""), "ends early: it has 6 operators of 7"),
    (edit(r"(?s).{9}$", ""), "the last one is cut off"),
    (edit("Total.*\n", ""), "its first line does not count"),
    (edit(r"L2 norm: .*", "L2 norm: much"), "has a norm that is not a number"),
    (edit("Input hashes: .*", "Input hashes: 1, much"), "has a norm that is not a number"),
    (lambda folder: Path(folder, "rank_1_activations.log").unlink(), "has logs of 2 ranks and"),
    (lambda folder: [path.write_text(path.read_text().replace("/op", "/other")) for path in Path(folder).iterdir()],
     "no operator in common")])
def test_logs_that_make_no_sense_are_refused(tmp_path, change, said):
    a, b = logs(tmp_path / "a"), logs(tmp_path / "b")
    change(b)
    with pytest.raises(UserError, match=said):
        compared(a, b)
