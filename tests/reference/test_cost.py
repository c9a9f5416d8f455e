"""The formulas for parameters, FLOPs and traffic, against the textbook itself and the published tables.

Tables print rounded numbers. What follows from exact sizes must agree to the printed digit. What follows from measured
numbers, which are themselves printed rounded, must agree with some numbers that would be printed so.
"""
from dataclasses import replace
from math import prod
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference import ops
from reference.comm import mappings
from reference.comm.ring import ring_all_gather, ring_all_reduce
from reference.config import LARGEST, ModelConfig, Recompute
from reference.costs.flops import forward_flops, iteration_flops, training_seconds, utilization
from reference.costs.parameters import parameters, parameters_of_stage, published_parameters
from reference.costs.published import A100_PEAK, KORTHIKANTI, PTD_P
from reference.costs.volumes import data_parallel_traffic, pipeline_traffic, tensor_parallel_traffic
from reference.errors import UserError
from reference.layer_context import TRAINING, LayerContext
from reference.layers.block import block_tensors, sharded_block_backward, sharded_block_forward
from reference.models.gpt import gpt_backward, gpt_forward, gpt_tensors, sharded_gpt_backward, sharded_gpt_forward
from reference.models.model import model_backward, model_forward, model_tensors
from reference.models.stage import StageInputs, backbone_forward, stage_rotary
from reference.parallel.layout import Layout
from reference.params import leaves, split, tree_map
from reference.schedules.actions import Send, lower
from reference.schedules.generators import interleaved, one_f_one_b, zero_bubble_h1
from tests.strategies import ANY_MODEL, cases
from tests.textbook_theorems import spread

V = 51_200
DAY = 24 * 3600
GPT3, MT_NLG = ModelConfig(96, 12_288, 96, V, 2048), ModelConfig(105, 20_480, 128, V, 2048)   # 175B, 530B


def interval(printed: str) -> tuple[float, float]:
    """Return the numbers that print as this text: 4.4 -> from 4.35 to 4.45."""
    half = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    return float(printed) - half, float(printed) + half


def overlap(one, other):
    return max(one[0], other[0]) <= min(one[1], other[1])


# ---- parameters -----------------------------------------------------------------------------------------------------


@given(st.booleans().flatmap(lambda shared: cases(architectures=ANY_MODEL, share_layers=shared)), st.data())
def test_parameters_are_the_elements_of_the_tensors(case, data):
    """The formulas count the whole model without padding, and a rank's shard of any stage of it."""
    c, t, tensors = case.model, case.t, model_tensors(case.model)
    assert parameters(c) == sum(prod(tensor.shape) for _, tensor in leaves(tensors))
    first = data.draw(st.integers(0, c.num_layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, c.num_layers)))
    assert parameters_of_stage(c, t, layers) == Layout(model_tensors(c, layers), t).size


@given(cases(position_embedding_type="learned_absolute", untie_embeddings_and_output_weights=False, llama=False))
def test_the_published_formula_lacks_the_final_layer_norm(case):
    """It is exact otherwise."""
    assert round(published_parameters(case.model)) == parameters(case.model) - 2 * case.model.hidden_size


def test_the_smallest_model_of_megatron_to_the_last_parameter():
    assert parameters(ModelConfig(40, 1536, 16, V, 1024)) == 1_213_479_936


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


def flops_of(run, *trees):
    """Sum 2 n k m over every matrix product [n, k] @ [k, m] in run(*trees)."""
    products = []

    class Counted(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
            if ufunc is np.matmul:
                products.append(2 * inputs[0].shape[0] * inputs[0].shape[1] * inputs[1].shape[1])
            inputs, out = ([x.view(np.ndarray) if isinstance(x, Counted) else x for x in xs] for xs in (inputs, out))
            y = getattr(ufunc, method)(*inputs, **options | ({"out": tuple(out)} if out else {}))
            return y.view(Counted) if isinstance(y, np.ndarray) else y

        def __array_function__(self, *call):
            y = super().__array_function__(*call)             # np.where, for one, makes plain arrays of ours
            return y.view(Counted) if isinstance(y, np.ndarray) else y

    run(*(tree_map(lambda x: x.view(Counted), tree) for tree in trees))
    return sum(products)


@given(cases(sizes=st.just(1), architectures=("bert",)))
def test_flops_of_bert_are_those_of_the_matrix_products(case):
    """BERT's heads are included; a sample of a question has a sequence for each answer."""
    c, p, batch = case.model, case.params(model_tensors(case.model)), case.batch("", case.b)
    forward = flops_of(lambda p: model_forward(None, p, c, batch), p)
    dlosses = [case.array("dloss", *weights.shape) for weights in batch.weights_of_heads(c.heads)]
    both = flops_of(lambda p, *dlosses: model_backward(dlosses, p, model_forward(None, p, c, batch)[1], c), p, *dlosses)
    expected = sum(forward_flops(c, len(batch.tokens), case.s))
    assert (forward, both) == (expected, 3 * expected)


@given(cases(sizes=st.just(1)))
def test_flops_are_those_of_the_matrix_products(case):
    """The formulas count the forward, the backward, which is twice the forward, and every recompute."""
    c, b, s, p = case.model, case.b, case.s, case.params(gpt_tensors(case.model))
    tokens, targets = case.ids("tokens", b, s), case.ids("targets", b, s)
    expected = forward_flops(c, b, s)

    forward = flops_of(lambda p: gpt_forward(tokens, p, c, targets), p)
    both = flops_of(lambda p, dloss: gpt_backward(dloss, p, gpt_forward(tokens, p, c, targets)[1], c),
                    p, case.array("dloss", b, s))
    assert (forward, both) == (sum(expected), 3 * sum(expected))
    layers = flops_of(lambda p: backbone_forward(None, p, c, StageInputs(tokens), TRAINING), p)
    assert layers == expected.linear + expected.attention
    q = case.array("q", b, s, c.num_attention_heads, c.head_size)
    core = flops_of(lambda q: ops.attention_core(q, q, q, causal=True), q)
    assert core * c.num_layers == expected.attention

    for granularity, again in (("none", 0), ("selective", core * c.num_layers), ("full", layers)):
        how = LayerContext(recompute=Recompute(granularity))
        found = flops_of(lambda p, dloss, how=how: gpt_backward(
            dloss, p, gpt_forward(tokens, p, c, targets, how)[1], c), p, case.array("dloss", b, s))
        assert iteration_flops(c, b, s, granularity) == found == both + again


@given(cases())
def test_shards_compute_what_the_whole_does(case):
    """All t ranks together repeat no product, but those of heads of keys and values that several hold; a padded token
    costs as much as a real one.
    """
    c, t = case.model, case.t
    tensors = gpt_tensors(c)
    tokens, targets = case.ids("tokens", case.b, case.s), case.ids("targets", case.b, case.s)

    def run(dloss, *shards):
        _, cache = sharded_gpt_forward(tokens, shards, c, targets, case.region)
        return sharded_gpt_backward(dloss, shards, cache, c, case.region)

    flops = flops_of(run, case.array("dloss", case.b, case.s), *split(case.params(tensors), tensors, t))
    copies = (max(t, c.groups) - c.groups) * c.head_size
    again = 3 * c.num_layers * 2 * case.b * case.s * c.hidden_size * 2 * copies
    assert flops == iteration_flops(replace(c, vocab_size=c.padded_vocab_size(t)), case.b, case.s) + again


SIZE, LAYERS = st.integers(1, 10**5), st.integers(1, LARGEST["num_layers"])


@given(L=LAYERS, h=SIZE, s=SIZE, B=SIZE, words=SIZE)
def test_the_published_flops(L, h, s, B, words):
    """Narayanan et al. 2021, equation 3, and Korthikanti et al. 2022, equation 7, as printed."""
    c = ModelConfig(L, h, 1, words, s)
    full = 96 * B * s * L * h**2 * (1 + s / (6 * h) + words / (16 * L * h))
    model = 72 * B * L * s * h**2 * (1 + s / (6 * h) + words / (12 * h * L))
    assert iteration_flops(c, B, s, "full") == pytest.approx(full, rel=1e-12)
    assert iteration_flops(c, B, s) == pytest.approx(model, rel=1e-12)


def test_an_unknown_recompute_is_a_sentence():
    with pytest.raises(UserError, match="recompute.*'some'.*none, selective, full"):
        iteration_flops(GPT3, 1, 1, "some")


def as_printed_by_korthikanti(c, B, s):
    """Return equation 8, with s/(3h): the model's FLOPs plus three times attention's core. (The text above it adds it
    once.)
    """
    eight = 72 * B * c.num_layers * s * c.hidden_size**2 * (
        1 + s / (3 * c.hidden_size) + c.vocab_size / (12 * c.hidden_size * c.num_layers))
    assert eight == pytest.approx(iteration_flops(c, B, s) + 3 * forward_flops(c, B, s).attention)
    return eight


@pytest.mark.parametrize("run, mfu, hfu", [
    (run, *printed) for run, printed in zip(KORTHIKANTI, (("41.5", "43.7"), ("51.4", "52.8"), ("56.0", "57.0"),
                                                          ("56.3", "57.0")), strict=True)])
def test_table_5_of_korthikanti(run, mfu, hfu):
    """Seconds were measured and printed rounded; utilisations follow. HFU does from equation 8 as it is printed.

    With the FLOPs that a selective recompute really adds, the HFU is lower in every row, by more than rounding.
    """
    def percent(flops):
        measured = interval(f"{run.selective:.2f}")
        return [100 * utilization(flops, second, 8 * run.p, A100_PEAK) for second in reversed(measured)]

    c, B = run.model, run.B
    assert overlap(percent(iteration_flops(c, B, 2048)), interval(mfu))
    assert overlap(percent(as_printed_by_korthikanti(c, B, 2048)), interval(hfu))
    assert percent(iteration_flops(c, B, 2048, "selective"))[1] < interval(hfu)[0]


@pytest.mark.parametrize("c, printed, counted", [(GPT3, "2.7", "0.9"), (MT_NLG, "1.6", "0.5")])
def test_the_overhead_of_selective_recompute(c, printed, counted):
    """Korthikanti et al. 2022, section 5: 2.7 and 1.6 %. Equation 8 gives them; the recompute itself is a third."""
    model = iteration_flops(c, 1, 2048)
    assert f"{100 * (as_printed_by_korthikanti(c, 1, 2048) / model - 1):.1f}" == printed
    assert f"{100 * (iteration_flops(c, 1, 2048, 'selective') / model - 1):.1f}" == counted


# ---- throughput and time --------------------------------------------------------------------------------------------


def test_aggregate_throughput_in_table_1_of_ptd_p():
    """TFLOP/s a GPU x GPUs = PFLOP/s, as far as both columns are printed: in no row do they disagree.

    The product of the printed numbers gives the printed PFLOP/s in the four small rows alone; in the six large ones
    PFLOP/s have the more digits, and their quotient gives the printed TFLOP/s.
    """
    by_product, by_quotient = set(), set()
    for run, pflops in zip(PTD_P, "4.4 8.8 18.2 34.6 70.8 143.8 227.1 297.4 410.2 502.0".split(), strict=True):
        assert overlap([run.gpus * x / 1e3 for x in interval(str(run.teraflops))], interval(pflops)), run.billions
        if f"{run.gpus * run.teraflops / 1e3:.1f}" == pflops:
            by_product.add(run.billions)
        elif f"{float(pflops) * 1e3 / run.gpus:.0f}" == str(run.teraflops):
            by_quotient.add(run.billions)
    assert by_product == {"1.7", "3.6", "7.5", "18.4"}
    assert by_quotient == {"39.1", "76.1", "145.6", "310.1", "529.6", "1008.0"}


def test_throughput_of_megatron():
    """Shoeybi et al. 2019: 39 TFLOP/s are 30 % of the peak of a DGX-2H's V100, 130 TFLOP/s (31 % of the usual 125).

    15.1 PFLOP/s on 512 GPUs are 76 % of 39 each. The 74 % of figure 5 is another quotient of the same run: both are
    true only for numbers at the edge of what is printed as 39, 15.1 and 74.
    """
    assert f"{utilization(39e12, 1, 1, 130e12):.0%}" == "30%" and f"{utilization(39e12, 1, 1, 125e12):.0%}" == "31%"
    assert f"{utilization(15.1e15, 1, 512, 39e12):.0%}" == "76%"
    assert f"{0.74 * 512 * 39e12 / 1e15:.1f}" == "14.8"
    low, high = (512 * single * share / 1e5 for single, share in zip(interval("39"), interval("74")))
    assert overlap((low, high), interval("15.1")) and high < 15.1


@pytest.mark.parametrize("tokens, psi, gpus, tflops, days", [
    (300e9, 175e9, 1024, 140, "34"), (450e9, published_parameters(ModelConfig(128, 25_600, 160, V, 2048)), 3072, 163,
                                      "84")])
def test_days_of_training(tokens, psi, gpus, tflops, days):
    """Narayanan et al. 2021, section 5.1: GPT-3, and a trillion parameters."""
    assert f"{training_seconds(tokens, psi, gpus, tflops * 1e12) / DAY:.0f}" == days


@given(L=LAYERS, h=SIZE, s=SIZE, words=SIZE)
def test_the_training_time_leaves_out_small_terms(L, h, s, words):
    """It differs from equation 3 by no more than the larger of the sums that equations 2 and 3 add to 1."""
    c = ModelConfig(L, h, 1, words, s)
    exact, estimate = iteration_flops(c, 1, s, "full"), training_seconds(s, published_parameters(c), 1, 1)
    left_out = max(s / (6 * h) + words / (16 * L * h), 13 / (12 * h) + (words + s) / (12 * L * h))
    assert abs(exact / estimate - 1) <= left_out + 1e-12


@pytest.mark.parametrize("c, gpus, tflops, days", [
    (GPT3, 384, "144", "90"), (GPT3, 768, "88", "74"), (GPT3, 1536, "44", "74"),
    (GPT3, 384, "153", "84"), (GPT3, 768, "149", "43"), (GPT3, 1536, "141", "23"),
    (MT_NLG, 640, "138", "169"), (MT_NLG, 1120, "98", "137"), (MT_NLG, 2240, "48", "140"),
    (MT_NLG, 560, "171", "156"), (MT_NLG, 1120, "167", "80"), (MT_NLG, 2240, "159", "42")])
def test_table_2_of_ptd_p(c, gpus, tflops, days):
    """Days for 300 billion tokens, with ZeRO-3 and with PTD-P, by equation 3 from measured, rounded TFLOP/s.

    By equation 4, which is some 3 % less, GPT-3 on 384 GPUs would take 88 days and not 90.
    """
    flops = iteration_flops(c, 1, 2048, "full") * 300e9 / 2048
    assert overlap([flops / (gpus * x * 1e12) / DAY for x in reversed(interval(tflops))], interval(days))


# ---- traffic --------------------------------------------------------------------------------------------------------


def ring_pass(shares, first, combine):
    """Do n - 1 steps in which rank r hands share (first + r - step) % n to rank r + 1; return the numbers sent."""
    n, sent = len(shares), [0] * len(shares)
    for step in range(n - 1):
        moving = [(r, (first + r - step) % n) for r in range(n)]
        messages = [shares[r][k].copy() for r, k in moving]
        for (r, k), message in zip(moving, messages):
            sent[r] += message.size
            shares[(r + 1) % n][k] = combine(shares[(r + 1) % n][k], message)
    return sent


@given(n=st.integers(1, 8), share=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_a_ring(n, share, seed):
    """A reduce-scatter, then an all-gather, step by step: all get the sum, and each sends what the formula says."""
    xs = np.random.default_rng(seed).integers(-9, 9, (n, n, share))
    shares = [list(x) for x in xs]
    halves = [ring_pass(shares, 0, np.add), ring_pass(shares, 1, lambda mine, theirs: theirs)]
    for mine in shares:
        np.testing.assert_array_equal(mine, xs.sum(0))
    assert halves == [[ring_all_gather(n * share, n)] * n] * 2
    assert np.sum(halves, 0).tolist() == [ring_all_reduce(n * share, n)] * n


@given(cases())
def test_traffic_of_a_layer(case):
    """The formula is the elements that the textbook's regions send in a block, forward and backward, in rings."""
    c, t, x = case.model, case.t, case.x()
    b, s, h = x.shape
    tensors, sent = block_tensors(c), []

    def counted(name, ring):
        collective = getattr(mappings, name)

        def call(xs, *how):
            found = collective(xs, *how)
            sent.append(ring(max(xs[0].size, found[0].size), t))
            return found
        return mock.patch.object(mappings, name, call)

    with (counted("all_reduce", ring_all_reduce), counted("all_gather", ring_all_gather),
          counted("reduce_scatter", ring_all_gather)):
        shards = split(case.params(tensors), tensors, t)
        _, cache = sharded_block_forward(spread(x, case), shards, c, case.region,
                                         LayerContext(rotary=stage_rotary(x, c, [slice(0, s)])))
        sharded_block_backward(spread(case.x("dy"), case), shards, cache, c, case.region)
    again = case.sequence_parallel and not case.keep_gathered_inputs
    traffic = tensor_parallel_traffic(b, s, h, t, again)
    assert traffic == pytest.approx(sum(sent))
    assert traffic == pytest.approx((10 if again else 8) * b * s * h * (t - 1) / t)


@given(p=st.integers(3, 6), groups=st.integers(1, 3), v=st.integers(1, 3), b=SIZE, s=SIZE, h=SIZE, t=SIZE)
def test_traffic_of_a_pipeline(p, groups, v, b, s, h, t):
    """A rank in the middle sends b s h to the next and, as gradients, to the one before, for each microbatch."""
    m = p * groups
    assert pipeline_traffic(b, s, h) == b * s * h
    for schedule, stages in ((one_f_one_b(p, m), 1), (zero_bubble_h1(p, m), 1), (interleaved(p, m, v), v)):
        one_way = m * pipeline_traffic(b, s, h, v=stages)
        for r in range(1, p - 1):
            sent = [(step.action.kind, step.to - r) for step in lower(schedule)[r] if isinstance(step, Send)]
            assert sent.count(("F", 1)) * b * s * h == sent.count(("B", -1)) * b * s * h == one_way
        assert t * pipeline_traffic(b, s, h, t, stages) * m == pytest.approx(one_way)


@given(psi=SIZE, d=st.integers(1, 64))
def test_traffic_of_data_parallelism(psi, d):
    """Rajbhandari et al. 2020, section 7: 2 psi, 2 psi, 2 psi and 3 psi, less the share that a rank need not send."""
    gather = reduce_scatter = ring_all_gather(psi, d)
    for stage, expected in enumerate([ring_all_reduce(psi, d), reduce_scatter + gather, reduce_scatter + gather,
                                      gather + gather + reduce_scatter]):
        assert data_parallel_traffic(psi, d, stage) == pytest.approx(expected)
    for m in (1, 2, 5):     # what ZeRO-2 and 3 do for every microbatch
        assert [round(data_parallel_traffic(psi, d, stage, m) * d) for stage in range(4)] == [
            k * psi * (d - 1) for k in (2, 2, m + 1, 3 * m)]


@given(psi=SIZE, n=st.integers(1, 16), instances=st.integers(1, 8), m=st.integers(1, 4))
def test_traffic_of_hybrid_sharding(psi, n, instances, m):
    """ZeRO inside groups of n, then an all-reduce of a shard between them. Reduced once, it sends as much as without
    groups, but of 2 psi only 2 psi/n leaves the group."""
    d = n * instances
    for stage in (1, 2, 3):
        inside, found = (data_parallel_traffic(psi, *sizes) for sizes in ((n, stage, m), (d, stage, m, instances)))
        assert found - inside == pytest.approx(ring_all_reduce(psi / n, instances))
    assert data_parallel_traffic(psi, d, 1, m, instances) == pytest.approx(data_parallel_traffic(psi, d))


@pytest.mark.parametrize("stage", [-1, 4])
def test_an_unknown_zero_stage_is_a_sentence(stage):
    with pytest.raises(UserError, match=f"--zero-stage is {stage}, but must be 0"):
        data_parallel_traffic(1, 1, stage)
