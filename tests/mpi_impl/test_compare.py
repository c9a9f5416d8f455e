"""The divergence finder names what each bug of the zoo makes wrong first; and the program around it.

A bug is planted in run B alone, on ranks that it bites, and B is compared with a run on one rank.
"""
from dataclasses import replace
from functools import cache

import pytest

from mpi_impl.recording.differences import compare
from reference.config import Recompute
from reference.schedules.actions import from_csv
from tests import zoo
from tests.cases import Case, Plan
from tests.deep import one_fast_of
from tests.launching import command, launch
from tests.planted import planted_run
from tests.recorded_runs import MODEL, case, record, written

LLAMA = replace(MODEL, normalization="RMSNorm", swiglu=True, add_bias_linear=False, ffn_hidden_size=12,
                num_query_groups=2, qk_layernorm=True)
EXPERTS = replace(MODEL, experts=zoo.experts.EXPERTS.experts)

# By bug, the first tensor that it makes wrong: iteration, phase and name. The biases of row-parallel layers begin at 0,
# so that adding them several times is seen in the second iteration.
FOUND = {
    "the norm over all instances": "1 step: gradient norm",
    "shards not summed over the instances": "1 reduction: final_layernorm.bias",
    "f without its all-reduce": "1 backward: final_layernorm.output",
    "g without its all-reduce": "1 forward: embedding.output",
    "g all-reduces backward too": "1 backward: blocks.3.mlp.partial",
    "the MLP's output bias added t times": "2 forward: blocks.0.mlp.partial",
    "attention's output bias added t times": "2 forward: blocks.0.attention.partial",
    "the vocabulary's offset off by one": "1 forward: embedding.partial",
    "tokens of other ranks not zeroed": "1 forward: embedding.partial",
    "the gradient of tokens of other ranks kept": "1 gradients: embedding.word",
    "padding not masked": "1 forward: probabilities",
    "the maximum not shared": "1 forward: probabilities",
    "the target's logit from every rank": "1 forward: loss",
    "the loss over the local batch": "1 backward: logits",
    "scores divided by the root of the model's size": "1 forward: blocks.0.attention.probs",
    "an all-gather without its reduce-scatter": "1 backward: final_layernorm.output",
    "a reduce-scatter of identical arrays": "1 forward: embedding.partial",
    "a reduce-scatter backward, too": "1 backward: blocks.3.mlp.partial",
    "every rank's positions begin at 0": "1 forward: blocks.0.input_layernorm.normed",
    "the gradient of positions that other ranks have": "1 gradients: embedding.position",
    "one mask for the heads of all ranks": "1 forward: blocks.0.attention.probs_mask",
    "another mask on each rank, outside": "1 forward: blocks.0.attention.output_mask",
    "one mask for the positions of all ranks": "1 forward: blocks.0.attention.output_mask",
    "one mask for all layers": "1 forward: blocks.1.attention.probs_mask",
    "no mask backward": "1 backward: blocks.3.mlp.output",
    "the output kept, where the input is needed": "1 recompute: blocks.0.input_layernorm.normed",
    "a group's layers backward in the order of the forward": "1 recompute: blocks.0.input_layernorm.output",
    "a recomputed layer without dropout": "1 recompute: blocks.0.attention.context",
    "a recomputed layer with another mask": "1 recompute: blocks.0.attention.probs_mask",
    "gradients overwritten, not accumulated": "1 gradients: blocks.3.mlp.w_out",
    "replicas' gradients not summed": "1 reduction: final_layernorm.bias",
    "replicated weights counted t times in the norm": "1 step: gradient norm",
    "the norm over one rank's shard": "1 step: gradient norm",
    "every rank draws the same shard": "1 parameters: embedding.word",
    "the tied table's gradients not summed": "1 reduction: embedding.word",
    "the tied table counted twice in the norm": "1 step: gradient norm",
    "the tied table counted by no stage": "1 step: gradient norm",
    "every stage draws from a seed of its own": "1 parameters: embedding.word",
    "the norm over the tensor group alone": "1 step: gradient norm",
    "the norm over the pipeline alone": "1 step: gradient norm",
    "the loss broadcast from the first rank": "1 step: mean loss",
    "the loss broadcast from the last rank of a V": "1 step: mean loss",
    "the loss not broadcast": "1 step: mean loss",
    "the loss of one replica": "1 step: mean loss",
    "the loss of the last microbatch alone": "1 step: loss of each replica",
    "the gradient of a microbatch's mean, not of the batch's": "1 backward: logits",
    "the targets of the microbatch before": "1 forward: loss",
    "the cache of the latest forward": "1 kept: blocks.1.mlp.hidden",
    "the last stage gets no targets": "1 batch: targets",
    "no tags": "1 forward: blocks.1.input",
    "tags without the microbatch": "1 forward: blocks.2.input",
    "receives into one buffer": "1 forward: blocks.2.input",
    "the first piece sent by every rank": "1 forward: blocks.2.input",
    "the pieces not gathered": "1 forward: blocks.2.input",
    "W adds twice": "1 gradients: blocks.3.mlp.w_out",
    "I adds, and W again": "1 gradients: blocks.3.mlp.w_out",
    "gradients counted as complete by I": "1 gradients: blocks.3.mlp.w_out",
    "gradients of the step before kept": "2 gradients: final_layernorm.bias",
    "gradients of replicated tensors not summed": "1 reduction: final_layernorm.bias",
    "the biases' gradients not summed": "1 reduction: blocks.3.mlp.b_out",
    "the norms' gradients not summed": "1 reduction: final_layernorm.bias",
    "the positions' gradients not summed": "1 reduction: embedding.position",
    "split tensors' gradients summed, too": "1 reduction: blocks.3.mlp.w_out",
    "a sharded activation scattered once more": "1 forward: blocks.2.input",
    "every microbatch draws the same mask": "1 forward: embedding.output_mask",
    "every replica draws the same mask": "1 forward: embedding.output_mask",
    "every step draws the same mask": "2 forward: embedding.output_mask",
    "parameters not gathered after the step": "2 parameters: embedding.word",
    "another replica's part moved": "1 reduction: final_layernorm.bias",
    "the first part on every replica": "1 parameters: embedding.word",
    "only the last microbatch's gradients": "1 reduction: final_layernorm.bias",
    "the norm over one replica": "1 step: gradient norm",
    "all pieces with the moments of the first": "1 optimizer m: embedding.word",
    "a unit gathered once and for all": "2 parameters: embedding.word",
    "gradients sent twice": "1 reduction: final_layernorm.bias",
    "a bucket overwritten while it is sent": "1 reduction: final_layernorm.bias",
    "the last bucket not waited for": "1 reduction: embedding.position",
    "offloaded shards not stored": "1 optimizer m: embedding.word",
    "interleaved stages given to ranks in a row": "1 forward: blocks.1.input_layernorm.normed",
    "a layer on two stages": "1 forward: blocks.1.input_layernorm.normed",
    "f sums a copy": "1 backward: final_layernorm.output",
    "g gathers where it should sum": "1 forward: embedding.output",
    "the fused backward of the logits forgets to sum": "1 backward: blocks.3.mlp.output",
    "attention's input gradient not summed": "1 backward: blocks.2.mlp.output",
    "the output bias gets t times its gradient": "1 gradients: blocks.3.mlp.b_out",
    "one rank's epsilon differs": "1 forward: blocks.0.input_layernorm.normed",
    "every rank's epsilon differs": "1 forward: final_layernorm.normed",
    "a residual adds the branch's gradient twice": "1 backward: blocks.3.attention.output",
    "rope's gradients of q and k change places": "1 backward: blocks.3.attention.qkv",
    "rope rotates on in the backward": "1 backward: blocks.3.attention.qkv",
    "dropout is scaled forward alone": "1 backward: blocks.3.attention.output",
    "attention's scale missing in the backward": "1 backward: blocks.3.attention.qkv",
    "the sum of exp not shared": "1 forward: probabilities",
    "the loss's gradient stays with the target's rank": "1 backward: logits",
    "every rank subtracts one at its first column": "1 backward: logits",
    "the final norm's gradient not summed": "1 reduction: final_layernorm.bias",
    "the norms' gradients averaged": "1 reduction: final_layernorm.bias",
    "replicated gradients summed over the world": "1 reduction: final_layernorm.bias",
    "the tied table's gradients averaged": "1 reduction: embedding.word",
    "the tied table summed over the world": "1 reduction: embedding.word",
    "tensor ranks crossed between stages": "1 forward: blocks.2.input",
    "microbatches of replicas crossed between stages": "1 forward: blocks.2.input",
    "one bucket averaged, the others summed": "1 reduction: embedding.position",
    "gradients averaged, though the loss is the global mean": "1 reduction: final_layernorm.bias",
    "gradients summed over the model's ranks": "1 reduction: final_layernorm.bias",
    "the loss summed over all ranks": "1 step: mean loss",
    "replicas begin with different weights": "1 parameters: embedding.word",
    "every replica reads the same samples": "1 batch: tokens",
    "every step reads the first batch": "2 batch: tokens",
    "targets are the tokens themselves": "1 batch: targets",
    "one bucket of parameters not gathered": "2 parameters: embedding.word",
    "gradients not summed in a pipeline": "1 reduction: final_layernorm.bias",
    "the tied table untied by ZeRO": "1 reduction: embedding.word",
    "a split bias counted as replicated": "1 step: gradient norm",
    "the norms of ranks averaged": "1 step: gradient norm",
    "norms added where their squares should be": "1 step: gradient norm",
    "clipping switched off": "1 optimizer m: embedding.word",
    "one rank corrects the bias by another power": "1 optimizer parameters: embedding.word",
    "no bias correction": "1 optimizer parameters: embedding.word",
    "weight decay on biases and norms": "1 optimizer parameters: blocks.0.input_layernorm.weight",
    "the schedule one step late": "1 step: learning rate",
    "every layer of a group gets the group's input": "1 forward: blocks.1.input_layernorm.output",
    "recomputed attention sees the future": "1 backward: blocks.3.attention.qkv",
    "the loss over a rank's own positions": "1 backward: logits",
    "gradients summed over data-parallel ranks alone": "1 reduction: final_layernorm.bias",
    "a ring's backward with its own keys": "1 backward: blocks.3.attention.qkv",
    "gradients of keys that do not come home": "1 backward: blocks.3.attention.qkv",
    "gathered keys without the reduce-scatter": "1 backward: blocks.3.attention.qkv",
    "every context rank's positions begin at 0": "1 forward: blocks.0.input_layernorm.normed",
    "every context rank drops the same positions": "1 forward: embedding.output_mask",
    "exchanged heads with the masks of the first": "1 forward: blocks.0.attention.probs_mask",
    "exchanged positions in the order of the ranks": "1 forward: blocks.0.attention.q",
    "the gate's activation on the wrong half": "1 backward: blocks.3.mlp.gate_up",
    "copies of a head of keys drift apart": "1 reduction: blocks.3.attention.k_norm.weight",
    "copies summed over all ranks": "1 reduction: blocks.3.attention.w_kv",
    "copies counted on every rank in the norm": "1 step: gradient norm",
    "the gain of a norm of keys is not summed": "1 reduction: blocks.3.attention.k_norm.weight",
    "heads dealt out to groups in turn": "1 forward: blocks.0.attention.k",
    "the first head's dropout on every rank": "1 forward: blocks.0.attention.context",
    "gradients of experts summed over all replicas": "1 reduction: blocks.3.mlp.experts.b_out",
    "gradients of experts not summed": "1 reduction: blocks.3.mlp.experts.b_out",
    "gradients of experts too large by e": "1 reduction: blocks.3.mlp.experts.b_out",
    "the norm of one rank's experts": "1 step: gradient norm",
    "what all ranks with experts hold counted e times": "1 step: gradient norm",
    "the router's gradient not summed": "1 reduction: blocks.3.mlp.router",
    "weights of experts whose gradient is partial": "1 backward: blocks.3.mlp.logits",
    "weights that were gathered without a backward": "1 backward: blocks.3.mlp.logits",
    "the experts' gradients summed over positions": "1 reduction: blocks.3.mlp.experts.b_out",
    "a bias in each partial sum": "2 forward: blocks.0.mlp.experts.partial",
    "copies returned in the order of experts": "1 forward: blocks.0.mlp.experts.partial",
    "every rank draws the first experts": "1 parameters: blocks.0.mlp.experts.w_in",
    "a load-balancing loss for each microbatch": "1 backward: blocks.3.mlp.logits",
    "a count that an all-reduce has overwritten": "1 backward: blocks.3.mlp.logits",
}

# The others, and why two recordings do not tell them apart.
ENDS = "the run ends in an error, before there is anything to compare"
MEMORY = "what is computed is right: it is only held too long, or not early enough"
EVALUATION = "an evaluation is not recorded"
NOT_FOUND = {
    "shards summed over the instances after every microbatch": "each replica has a single microbatch",
    "a gathered output scattered by the wrong rank": "a GPT gathers no layer's output",
    "the row-parallel bias added t times": "a GPT's layers add their biases themselves",
    "columns summed where they should be gathered": "a GPT gathers no layer's output",
    "the output bias divided by t twice": "a GPT's layers add their biases themselves",
    "gathered logits in the parallel loss": ENDS,
    "the last layers of an uneven group lost": ENDS,
    "a send before the receive that the other side waits for": "short messages arrive",
    "microbatches overlap": "a test's microbatches are of one sample",
    "QKV split across, not by heads": "ranks draw their shards, and cut nothing",
    "gate and up cut side by side": "ranks draw their shards, and cut nothing",
    "caches kept, though they are recomputed": MEMORY,
    "caches there while the next ones are made": MEMORY,
    "the core kept, though it is recomputed": MEMORY,
    "the tied table's two uses on one rank taken for one": ENDS,
    "sends from one buffer": "messages as short as a test's are buffered by MPI, and arrive",
    "the pieces gathered, but the whole sent": "what arrives is right: too much is sent",
    "W forgets the last product that I deferred": ENDS,
    "W does nothing": ENDS,
    "gradients summed before the last microbatch": ENDS,
    "an evaluation with dropout": EVALUATION,
    "the tied table in a bucket with others": ENDS,
    "a name that keeps a block": MEMORY,
    "a name that keeps the tables": MEMORY,
    "nothing prefetched": MEMORY,
    "every bucket waited for immediately": MEMORY,
    "whole gradients kept": MEMORY,
    "the layers that do not divide lost": ENDS,
    "caches kept until the end of the step": MEMORY,
    "an evaluation that keeps its layers' caches": EVALUATION,
    "an evaluation that keeps caches": EVALUATION,
    "gradients of keys that are overwritten on the way": "a test's four positions are too few for a ring of three",
}

TURNED = from_csv("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F1,1B1,1F0,1B0,1F3,1B3,1F2,1B2")   # of four microbatches
OTHERWISE = {      # run in another way than in the zoo
    "tags without the microbatch": (2, case(), Plan(2), TURNED),
    "receives into one buffer": (2, case(), Plan(2), TURNED),
    "the last stage gets no targets": (2, case(), Plan(2)),
    "the cache of the latest forward": (2, case(), Plan(2)),
    "every replica reads the same samples": (2, case(), Plan()),
    "every step reads the first batch": (2, case(), Plan()),
    "targets are the tokens themselves": (2, case(), Plan()),
}


def test_every_bug_has_its_place():
    """If ranks train a GPT in float64, or a part of it, and the bug is not too small for that."""
    def trains_a_gpt(entry: zoo.Entry) -> bool:
        module, ranks, args = entry.theorem
        of = next((one for one in args if isinstance(one, Case)), None)
        return ranks > 0 and not module.startswith(("mpi_impl.test_mixed_precision", "checkpoint_theorems")) and (
            of is None or of.model.architecture == "gpt") and not entry.silent

    assert FOUND.keys() | NOT_FOUND.keys() == {entry.name for entry in zoo.ENTRIES if trains_a_gpt(entry)}
    assert not FOUND.keys() & NOT_FOUND.keys()


@pytest.fixture(scope="module")
def one_rank(ranks):
    """Return the function from a model to its run on one rank."""
    return cache(lambda model: record(ranks, 1, case(model=model)))


@pytest.mark.parametrize("name", one_fast_of(24, FOUND))
def test_the_finder_finds_the_bug(ranks, one_rank, name):
    n, of, *others = topology_of(name)
    buggy = record(ranks, n, of, *others, bug=zoo.BY_NAME[name].bug, steps=int(FOUND[name][0]))
    first, *_ = compare(one_rank(of.model), buggy, shown=1).differences
    assert f"{first.key.iteration} {first.key.phase}: {first.key.name}" == FOUND[name]
    assert {holder.run for holder in first.holders} == {"B"}


@pytest.mark.deep
@pytest.mark.parametrize("name", FOUND)
def test_without_the_bug_there_is_nothing_to_find(ranks, one_rank, name):
    """No difference is beyond a hundredth of its tolerance."""
    n, of, *others = topology_of(name)
    found = compare(one_rank(of.model), record(ranks, n, of, *others))
    assert not found.differences and found.worst.strain < 0.01 and found.compared > 800, found


def topology_of(name: str) -> tuple:
    """Return the number of ranks, the case and the plan on which the bug shows: those of the zoo, for our model."""
    if name in OTHERWISE:
        return OTHERWISE[name]
    _, n, (of, *others) = zoo.BY_NAME[name].theorem
    recompute = next((one for one in others if isinstance(one, Recompute)), Recompute())
    plan = next((one for one in others if isinstance(one, Plan)), Plan(recompute=recompute, bucket_size=300))
    family = LLAMA if of.model.swiglu else EXPERTS if of.model.experts else MODEL
    model = replace(family, position_embedding_type=of.model.position_embedding_type)
    return n, case(of.t, of.sequence_parallel, model), plan


# ---- the program ----------------------------------------------------------------------------------------------------

TINY = ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
        "--global-batch-size 2 --vocab-size 300 --split 8,2 --dtype float64")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Write a text, and return the options of a small run on it."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}." for i in range(400)))
    return f"{TINY} --data-path {folder / 'text.txt'} --data-cache-path {folder / 'cache'}"


def test_two_runs_that_agree(tiny, tmp_path):
    """One is run here, the other has recorded itself."""
    ended = launch(2, "-m", "mpi_impl.pretrain_gpt", *tiny.split(), "--tensor-model-parallel-size", 2,
                   "--record", tmp_path / "two", "--train-iters", 400, "--exit-interval", 2, "--eval-iters", 0)
    assert ended.returncode == 0 and "recording iteration 2: " in ended.stdout, ended.stderr
    ended = command("-m", "mpi_impl.compare", f"-n 1 {tiny}", tmp_path / "two")
    assert ended.returncode == 0 and "A and B agree: " in ended.stdout, ended.stdout + ended.stderr


def test_two_runs_that_differ(ranks, tmp_path):
    """The report on the first tensor has every fact that helps to find the line."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    ranks.run(1, written, case(), Plan(), a, 1, "float64")
    bug = zoo.BY_NAME["one mask for the heads of all ranks"].bug
    ranks.run(2, planted_run, bug, written, case(2), Plan(), b, 1, "float64")
    ended = command("-m", "mpi_impl.compare", a, b)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("""\
A and B differ. The first tensor, in the order of computation:

  iteration 1, forward: blocks.0.attention.probs_mask
  where      rank 1 of B, layer 0
  size       1.0e+00, which is 1.0e+00 of the largest element; rounding explains 1e-12
  largest    at [0, 2, 3, 1] of [4, 4, 4, 4]: 1 (A, rank 0), but 0 (B, rank 1)
  before     the """), ended.stdout
    assert "tensors before it agree, the last of them is iteration 1, forward: blocks.0." in ended.stdout
    assert "iteration 1, forward: blocks.0.attention.context" in ended.stdout


def test_a_run_that_diverges_says_where(tiny):
    """The first step is finite, and moves the weights too far. Once it has been said, it has been said."""
    ended = launch(2, "-m", "mpi_impl.pretrain_gpt", *tiny.split(), "--lr", 1e200, "--train-iters", 5)
    assert ended.returncode == 2 and ended.stderr.count("iteration 2") == 1
    assert "the run has diverged. In the order of computation it appears first in blocks.0." in ended.stderr


@pytest.mark.parametrize("a, b, told", [
    ("no/such", "no/such", "no/such holds no recording: "), ("-n 0 --lr 1", "x", "Run A ended with status 2"),
    ("--lr 1", "x", "Run A does not say how many ranks it has. Begin it with -n RANKS."),
    ("-n 2 'x", "x", "The options of run A cannot be read: No closing quotation.")])
def test_nonsense_is_told_in_a_sentence(a, b, told):
    ended = command("-m", "mpi_impl.compare", a, b)
    assert ended.returncode == 2 and ended.stderr.startswith(f"error: {told}"), ended.stderr
