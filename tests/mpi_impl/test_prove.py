"""`shardlab.prove` proves what is right, on every topology, and names the tensor, the rank and the place of a bug."""

import numpy as np
import pytest

from mpi_impl.launch.pool import RankFailure
from reference.errors import UserError
from reference.parallel.stages import layouts_of_ranks, stages_of_ranks
from shardlab.programs.settings import parse as parse_run
from shardlab.prove import proof
from shardlab.prove.options import parse
from shardlab.prove.proof import describe_difference
from shardlab.prove.sizes import shrink
from tests import zoo
from tests.deep import every_other_deep, one_fast_of
from tests.launching import launch
from tests.planted import Bug, planted_run

T2 = "--tensor-model-parallel-size 2"
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2"
SMALL = "--num-layers 2 --micro-batch-size 1 --global-batch-size 2"


def sizes_of(line: str, n: int):
    return shrink(parse(line.split(), n)[0])


def prove(group, line: str, seed: int = 5):
    """Prove on a rank of the pool; return the result, or None if a divisor was 0."""
    return proof.prove(group, sizes_of(line, group.size), seed)


# ---- what is right is proved ----------------------------------------------------------------------------------------

TOPOLOGIES = {
    f"{T2} --sequence-parallel --zero-stage 1 --recompute-activations {SMALL}": 4,
    f"--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --zero-stage 2 {SMALL} --global-batch-size 8": 4,
    f"--model bert {T2} {SMALL}": 2,
    f"--pipeline-model-parallel-size 2 --pipeline-schedule zb-v {SMALL} --num-layers 5": 2,
    f"--position-embedding-type rope --rotary-percent 0.5 --activation relu --zero-stage 3 --cpu-offload {SMALL}": 2,
    f"--model bert --bert-no-binary-head --apply-residual-connection-post-layernorm {SMALL}": 2,
    f"{T2} --recompute-granularity full --recompute-num-layers 2 {SMALL} --num-layers 3": 2,
    f"--context-parallel-size 2 --cp-comm-type a2a --untie-embeddings-and-output-weights {SMALL}": 4,
    f"{T2} --expert-model-parallel-size 2 --num-experts 8 --moe-aux-loss-coeff 0.1 --zero-stage 3 {SMALL}": 4,
    f"{T2} --sequence-parallel --keep-gathered-inputs --clip-grad 0 --lr-warmup-iters 100 {SMALL}": 2,
}


@pytest.mark.parametrize("line", one_fast_of(5, TOPOLOGIES))
def test_a_run_is_proved(ranks, line):
    """Every tensor that the textbook names is among those compared, and the chance of error is negligible."""
    found = ranks.run(TOPOLOGIES[line], prove, line)
    assert all(one.comparison.found is None and one.chance < -15 for one in found)
    one = found[0].comparison
    assert 250 < one.in_first < one.compared


def test_one_real_program_proves_and_says_so():
    """It names what it proves in place of the run's model, and what has no effect."""
    done = launch(2, "-m", "shardlab.prove", *T2.split(), *SMALL.split(), "--proofs", 2, "--data-path", "none",
                  "--verify", "--vocab-size", 4096)
    assert done.returncode == 0, done.stderr
    model, ignored, first, second, last = (line for line in done.stdout.splitlines() if not line.startswith("..."))
    assert model.startswith("proving with a small model: a GPT of 2 layers, hidden size 8, 4 heads, 8 words; ")
    assert ignored == "without effect on a proof: --data-path, --verify"
    assert first.startswith("proof 1 of 2: the same formulas; ") and second.startswith("proof 2 of 2: ")
    assert last.startswith("proved: ") and "2 ranks (t 2, p 1, d 1) " in last and "chance of error below " in last


# ---- what is wrong is named -----------------------------------------------------------------------------------------

RUN = f"{T2} {SMALL}"
TINY = "(1 + 2**-50)"       # a factor that floats cannot see
BELOW_ROUNDING = {
    "a sum over ranks that is too large": Bug(
        "mpi_impl.comm.regions", "return self.group.all_reduce(partial, reason)",
        "return self.group.all_reduce(partial, reason) * (1 + 2**-50 * (self.group.size > 1))"),
    "the same bias in the textbook": Bug(
        "reference.layers.mlp", "y = linear(a, p.w_out, p.b_out) ", f"y = linear(a, p.w_out, p.b_out * {TINY}) "),
}
BUGS = {        # these and some of the zoo: the options of two ranks, and what is said
    "a sum over ranks that is too large": (
        T2, "iteration 1, forward: embedding.output is another formula on rank 0 (tensor 0, data 0, pipeline 0) than "
        "on one rank alone, first at [0, 0, 0] of [2, 3, 8], and in 24 of 24 elements there"),
    "the same bias in the textbook": (
        T2, "iteration 1, forward: blocks.1.input_layernorm.normed is another formula on one rank alone than in"),
    "one mask for the heads of all ranks": (
        T2, "iteration 1, forward: blocks.0.attention.probs_mask is another formula on rank 1 (tensor 1, data 0, "
        "pipeline 0) than in the textbook, first at [0, 3, "),
    "every rank draws the same shard": (
        T2, "iteration 0, optimizer parameters: embedding.word is another formula on rank 1 "),
    "gradients of keys that do not come home": (
        "--context-parallel-size 2",
        "iteration 1, backward: gradient of blocks.1.attention.qkv is another formula on rank 0 (tensor 0, context 0"),
    "copies returned in the order of experts": (
        EXPERTS,
        "iteration 1, forward: blocks.0.mlp.experts.partial is another formula in the sum over ranks 0, 1 than on one"),
}


@pytest.mark.parametrize("name", one_fast_of(3, BUGS))
def test_a_bug_is_named_by_its_tensor_its_rank_and_its_place(ranks, name):
    options, sentence = BUGS[name]
    bug, line = BELOW_ROUNDING.get(name) or zoo.BY_NAME[name].bug, f"{options} {SMALL}"
    found = ranks.run(2, planted_run, bug, prove, line)
    told = describe_difference(found[0].comparison, sizes_of(line, 2).parallel)
    assert told.startswith(f"not proved: {sentence}"), told
    assert all(one.comparison.found.key == found[0].comparison.found.key for one in found)


def test_a_tensor_that_no_rank_computes_is_no_proof(ranks):
    bug = Bug("shardlab.compare.observer", "if partial or self.tensor_rank % segment.copies == 0:",
              "if self.tensor_rank == 0:")
    with pytest.raises(RankFailure, match="The run on 2 ranks lacks a part of .*it is never computed there"):
        ranks.run(2, planted_run, bug, prove, RUN)


DIVIDING = "        1.0 / np.full_like(state.device_prototype, {}, shape=1); trainer.step("


@pytest.mark.parametrize("divisor, said", every_other_deep([
    ("seed - 5.0", ["a divisor was 0 modulo the prime: the proof begins again, with other numbers"]),
    ("0.0", 3 * ["a divisor was 0 modulo the prime: the proof begins again, with other numbers"])]))
def test_where_a_divisor_is_0_others_are_drawn_but_not_for_ever(ranks, divisor, said):
    """Not even if a rank alone divides: all of them begin again."""
    bug = Bug("shardlab.prove.runs", "        trainer.step(", DIVIDING.format(divisor))
    for of_rank, outcome in ranks.run(2, planted_run, bug, prove_with_fresh_numbers, RUN):
        assert of_rank == said
        assert outcome == (6 if len(said) == 1 else "A divisor was 0 in 3 draws of random numbers, which chance does")


def prove_with_fresh_numbers(group, line: str):
    """Prove from seed 5 on; return what was said, and the seed of the numbers, or the beginning of the error."""
    said: list = []
    one = proof.Proving.__new__(proof.Proving)
    one.world, one.sizes, one.say, one.quiet_since = group, sizes_of(line, group.size), said.append, np.inf
    try:
        return said, one.prove_with_fresh_numbers(5)[1] - 1
    except UserError as error:
        return said, str(error)[:63]


# ---- the sizes ------------------------------------------------------------------------------------------------------

LAYERS = {      # by the run's layers, stages, options: the proof's layers on each stage, and the group to recompute
    (26, 4, ""): ([2, 2, 1, 1], 1),
    (9, 2, "--recompute-granularity full --recompute-num-layers 5"): ([2, 1], 2),
}


@pytest.mark.parametrize("layers, p, options", LAYERS)
def test_layers_are_uneven_where_the_runs_are(layers, p, options):
    sizes = sizes_of(f"--num-layers {layers} --pipeline-model-parallel-size {p} {options}", p)
    held = [len(layers) for stages in stages_of_ranks(sizes.model, sizes.parallel) for layers in stages.values()]
    assert (held, sizes.parallel.recompute.num_layers) == LAYERS[layers, p, options]


@pytest.mark.parametrize("words, alone, part", [(4096, 0, False), (900, 3, True)])
def test_the_vocabulary_is_padded_as_the_runs_is(words, alone, part):
    """`alone` ranks hold only padding, and one more holds some if `part`."""
    sizes = sizes_of(f"--vocab-size {words} --make-vocab-size-divisible-by 1024 --tensor-model-parallel-size 4", 4)
    shard = sizes.model.padded_vocab_size(4) // 4
    padding = 4 * shard - sizes.model.vocab_size
    assert (padding // shard, padding % shard > 0) == (alone, part)


def test_proof_keeps_two_of_each():
    """As many buckets stay, and a run that has one of something keeps it."""
    line = "--num-attention-heads 8 --seq-length 64 --global-batch-size 64 --sequence-parallel " + T2
    sizes = sizes_of(f"{line} --ddp-bucket-size 100000 --max-position-embeddings 99", 4)
    assert (sizes.model.num_attention_heads, sizes.seq_length, sizes.model.max_position_embeddings) == (4, 4, 5)
    assert (sizes.micro_batch_size, sizes.microbatches) == (2, 2)
    run = parse_run(f"{line} --ddp-bucket-size 100000".split(), 4)
    layouts = [layouts_of_ranks(model, parallel)[0] for model, parallel in (
        (run.model(4095), run.parallel), (sizes.model, sizes.parallel))]
    assert len(layouts[0].buckets) > 3 and abs(len(layouts[0].buckets) - len(layouts[1].buckets)) <= 2
    ring = sizes_of("--context-parallel-size 4 --num-attention-heads 8 --cp-comm-type a2a --seq-length 64", 4)
    assert (ring.model.num_attention_heads, ring.seq_length) == (8, 16)
    one = sizes_of("--num-attention-heads 1 --seq-length 1 --micro-batch-size 1 --num-layers 1", 1)
    assert (one.model.num_attention_heads, one.seq_length, one.micro_batch_size, one.microbatches) == (1, 1, 1, 1)


# ---- how it ends ----------------------------------------------------------------------------------------------------


def test_a_bug_ends_every_rank_with_status_1(tmp_path):
    """The sentence is printed once."""
    program = tmp_path / "program.py"
    program.write_text(f"""if True:
        from shardlab.prove import __main__ as prove
        from mpi_impl.launch.entry import run
        from tests.planted import planted
        def main():
            with planted("mpi_impl.layers.attention", "first_head=region.rank * q.shape[2]", "first_head=0"):
                prove.main({RUN.split()})
        run(main)""")
    done = launch(2, program)
    assert done.returncode == 1 and done.stdout.count("not proved: iteration 1, forward: blocks.0.") == 1
    assert done.stderr == ""
