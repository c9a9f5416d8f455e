"""The divergence finder names what each bug of the zoo makes wrong first; and the program around it.

A bug is planted in run B alone, on ranks that it bites, and B is compared with a run on one rank.
"""
from dataclasses import replace
from functools import cache

import pytest

from reference.config import Recompute
from reference.errors import UserError
from reference.schedules.actions import from_csv
from shardlab.compare.__main__ import main
from shardlab.compare.completeness import check_whole
from shardlab.compare.differences import compare
from shardlab.compare.report import report
from tests import zoo
from tests.cases import Case, Plan
from tests.deep import one_fast_of
from tests.launching import command, launch
from tests.planted import Bug, planted_run
from tests.program import pretrain
from tests.recorded_runs import MODEL, case, record, written
from tests.zoo.cases import MIDDLE
from tests.zoo.first_wrong import FOUND, FOUND_OF_A_BERT, NOT_FOUND

LLAMA = replace(MODEL, normalization="RMSNorm", swiglu=True, add_bias_linear=False, ffn_hidden_size=12,
                num_query_groups=2, qk_layernorm=True)
EXPERTS = replace(MODEL, experts=zoo.experts.EXPERTS.experts)

TURNED = from_csv("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F1,1B1,1F0,1B0,1F3,1B3,1F2,1B2")   # of four microbatches
OTHERWISE = {      # run in another way than in the zoo
    "tags without the microbatch": (2, case(), Plan(2), TURNED),
    "receives into one buffer": (2, case(), Plan(2), TURNED),
    "the last stage gets no targets": (2, case(), Plan(2)),
    "the cache of the latest forward": (2, case(), Plan(2)),
    "every replica reads the same samples": (2, case(), Plan()),
    "every step reads the first batch": (2, case(), Plan()),
    "targets are the tokens themselves": (2, case(), Plan()),
    "a stage in the middle does not get the lengths": (3, case(model=MIDDLE.model), Plan(3)),
}


def test_every_bug_has_its_place():
    """If ranks train a GPT in float64, or a part of it, and the bug is not too small for that."""
    def trains_a_gpt(entry: zoo.Entry) -> bool:
        module, ranks, args = entry.theorem
        of = next((one for one in args if isinstance(one, Case)), None)
        return ranks > 0 and not module.startswith(("precision_theorems", "checkpoint_theorems")) and (
            of is None or of.model.architecture == "gpt") and not entry.silent

    assert FOUND.keys() | NOT_FOUND.keys() == {entry.name for entry in zoo.ENTRIES if trains_a_gpt(entry)}
    assert not FOUND.keys() & NOT_FOUND.keys()


@pytest.fixture(scope="module")
def one_rank(ranks):
    """Return the function from a model and Muon's choices to its run on one rank."""
    return cache(lambda model, muon: record(ranks, 1, case(model=model), Plan(muon=muon)))


@pytest.mark.parametrize("name", [*one_fast_of(24, FOUND), *one_fast_of(6, FOUND_OF_A_BERT)])
def test_the_finder_finds_the_bug(ranks, one_rank, name):
    n, of, plan, *others = topology_of(name)
    tensor = (FOUND | FOUND_OF_A_BERT)[name]
    buggy = record(ranks, n, of, plan, *others, bug=zoo.BY_NAME[name].bug, steps=int(tensor[0]))
    first, *_ = compare(one_rank(of.model, plan.muon), buggy, shown=1).differences
    assert f"{first.key.iteration} {first.key.phase}: {first.key.name}" == tensor
    assert {holder.run for holder in first.holders} == {"B"}


@pytest.mark.deep
def test_without_the_bugs_there_is_nothing_to_find(ranks, one_rank):
    """No difference is beyond a hundredth of its tolerance."""
    for n, of, plan, *others in dict.fromkeys(map(topology_of, FOUND)):
        found = compare(one_rank(of.model, plan.muon), record(ranks, n, of, plan, *others))
        assert not found.differences and found.worst.strain < 0.01 and found.compared > 800, found


def test_a_sum_that_is_never_made_is_the_finding(ranks, one_rank):
    """The MLP does not call f's backward, so there is no gradient of its input, nor of the norm's output before it. Its
    recording is complete nevertheless, unless it is asked for every tensor.
    """
    bug = Bug("mpi_impl.layers.mlp", "region.enter_backward(linear(dz, p.w_in.T), INPUT)", "linear(dz, p.w_in.T)")
    a, b = one_rank(MODEL, None), record(ranks, 2, case(2), bug=bug)
    text = report(compare(a, b), a, b)
    assert "missing    B never computes iteration 1, backward: gradient of blocks.3.mlp.input, " in text, text
    assert "the last of them is iteration 1, backward: gradient of blocks.3.mlp.pre_activation" in text, text
    check_whole(a, b, tensors=False)
    with pytest.raises(UserError, match="B lacks a tensor"):
        check_whole(a, b)


def topology_of(name: str) -> tuple:
    """Return the number of ranks, the case and the plan on which the bug shows: those of the zoo, for our model."""
    if name in OTHERWISE:
        return OTHERWISE[name]
    _, n, (of, *others) = zoo.BY_NAME[name].theorem
    recompute = next((one for one in others if isinstance(one, Recompute)), None)
    plan = next((one for one in others if isinstance(one, Plan)), Plan(bucket_size=300))
    gated, squared = of.model.swiglu, of.model.squared_relu
    family = replace(LLAMA, swiglu=gated, squared_relu=squared) if gated or squared else (
        EXPERTS if of.model.experts else MODEL)
    model = of.model if of.model.architecture == "bert" else replace(
        family, position_embedding_type=of.model.position_embedding_type)
    return n, case(of.t, of.sequence_parallel, model), replace(plan, recompute=recompute or plan.recompute)


# ---- the program ----------------------------------------------------------------------------------------------------

TINY = ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
        "--global-batch-size 2 --vocab-size 300 --split 8,2 --dtype float64").split()


def test_two_runs_that_agree(ranks, corpus, capfd, tmp_path):
    """One is run here, the other has recorded itself."""
    more = f"--tensor-model-parallel-size 2 --record {tmp_path}/two --train-iters 400 --exit-interval 2 --eval-iters 0"
    ranks.run(2, pretrain, [*TINY, *corpus, *more.split()])
    assert "recording iteration 2: " in capfd.readouterr().out
    ended = command("-m", "shardlab.compare", f"-n 1 {' '.join([*TINY, *corpus])}", tmp_path / "two")
    assert ended.returncode == 0 and "A and B agree: " in ended.stdout, ended.stdout + ended.stderr


def test_two_runs_that_differ(ranks, tmp_path):
    """The report on the first tensor has every fact that helps to find the line."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    ranks.run(1, written, case(), Plan(), a, 1, "float64")
    bug = zoo.BY_NAME["one mask for the heads of all ranks"].bug
    ranks.run(2, planted_run, bug, written, case(2), Plan(), b, 1, "float64")
    ended = command("-m", "shardlab.compare", a, b)
    assert ended.returncode == 1, ended.stderr
    for fact in ("iteration 1, forward: blocks.0.attention.probs_mask", "rank 1 of B, layer 0", "1.0e+00",
                 "at [0, 2, 3, 1] of [4, 4, 4, 4]: 1 (A, rank 0), but 0 (B, rank 1)",
                 "the last of them is iteration 1, forward: blocks.0.", "forward: blocks.0.attention.context"):
        assert fact in ended.stdout, ended.stdout


def test_a_run_that_diverges_says_where(corpus):
    """The first step is finite, and moves the weights too far. Once it has been said, it has been said."""
    ended = launch(2, "-m", "mpi_impl.pretrain_gpt", *TINY, *corpus, "--lr", 1e200, "--train-iters", 5)
    assert ended.returncode == 2 and ended.stderr.count("iteration 2") == 1
    assert "the run has diverged. In the order of computation it appears first in blocks.0." in ended.stderr


def test_a_run_that_fails_ends_the_comparison(monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare", "-n 0 --lr 1", "x"])
    with pytest.raises(UserError, match="Run A ended with status 2"):
        main()
