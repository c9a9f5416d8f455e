"""`reference.prove` proves the textbook's splits, and names the first tensor of a wrong one."""
from functools import partial

import pytest

from reference import printing, prove
from tests.planted import planted

SMALL = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --data-parallel-size 2"


def run(line: str, capsys) -> tuple[int, str]:
    """Run the program here; return its status, and what it printed."""
    with pytest.raises(SystemExit) as ended:
        printing.run(partial(prove.main, line.split()))
    printed = capsys.readouterr()
    return ended.value.code, printed.out + printed.err


@pytest.mark.parametrize("line, n", [
    (SMALL, 4), pytest.param("--model bert --pipeline-schedule zb-v --proofs 2", 3, marks=pytest.mark.deep)])
def test_all_splits_are_proved(line, n, capsys):
    status, text = run(line, capsys)
    assert status == 0 and text.count(" gradients are the same formulas\n") % n == 0
    assert f"proved: {n} splits compute the same formulas as the whole model; chance of error below " in text


def test_a_bug_is_named_by_its_split_and_its_tensor(capsys):
    bug = "reference.comm.regions", "if tensor.split is not None and tensor.most_shards is None", "if True"
    with planted(*bug):
        status, text = run(SMALL, capsys)
    assert status == 1
    assert "not proved: with sequence parallelism on 2 ranks, the gradient of embedding.position is another" in text


def test_where_a_divisor_is_0_others_are_drawn_but_not_for_ever(capsys):
    dividing = "1 / (random_array((1,), seed) * {}); return tree_map("
    with planted("reference.training.random_start", "return tree_map(", dividing.format("(seed - 5)")):
        status, text = run("--seed 5", capsys)
    assert status == 0 and text.count("a divisor was 0 modulo the prime: the proof begins again") == 1
    with planted("reference.training.random_start", "return tree_map(", dividing.format("0")):
        status, text = run("--seed 5", capsys)
    assert status == 2 and "A divisor was 0 in 3 draws of random numbers, which chance does not explain" in text
