"""The search over operators is exact, its time is the planner's, and it finds what Megatron does where that is best."""
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random

import pytest
from hypothesis import given, strategies as st

from reference.config import ParallelConfig
from reference.costs.hardware import Link
from reference.costs.operator_search import fastest_of_each_size, gpt_graph, megatron_choices, random_walk, sums
from reference.costs.plans import LayerCounts, Plan
from reference.costs.step_time import work_of
from reference.costs.volumes import tensor_parallel_traffic
from shardlab.plan.__main__ import main
from shardlab.plan.options import model_of
from shardlab.plan.profiles import load
from tests.plan_cases import IDEAL, REAL, model_of as small_model

close = partial(pytest.approx, rel=1e-12)


@st.composite
def graphs(draw):
    """Draw a chain of a few of a GPT's operators, each bypassed, with a few choices, on a mesh of one axis or two."""
    graph = gpt_graph(small_model(2, a=12, s=12), 12, draw(st.sampled_from((2, 6))), REAL)
    drawn = draw(st.lists(st.sampled_from(list(graph.operators.values())), min_size=1, max_size=4))
    return replace(graph, operators={i: one._replace(
        inputs=range(max(0, i - 2), i),
        choices=draw(st.lists(st.sampled_from(one.choices), min_size=1, max_size=3)))
        for i, one in enumerate(drawn)})


@given(graphs(), st.integers(0, 99))
def test_the_search_finds_what_trying_everything_finds_and_a_walk_gets_there_and_no_further(graph, seed):
    """The fastest of each size. The walk takes every step that fits."""
    def fastest(costs, limit):
        return min(cost.seconds for cost in costs if cost.memory <= limit)

    found, tried = fastest_of_each_size(graph), [sums(graph.costs, dict(enumerate(words)))[0] for words in product(
        *(one.choices for one in graph.operators.values()))]
    assert all(fastest(found, one.memory) == close(fastest(tried, one.memory)) for one in tried)
    fits = found[seed % len(found)]
    assert random_walk(graph, found[-1], fits.memory, 0.0, 2000, Random(seed))[:2] == close(fits[:2])


@given(st.sampled_from((2, 4)), st.booleans())
def test_megatrons_choices_take_the_planners_time_and_send_what_the_papers_count(t, split):
    """With sequence parallelism and without: four all-reduces in a layer, one in the embedding and one in the head.

    Overheads are not counted, and the final norm is.
    """
    c, hardware = small_model(2), replace(REAL, optimizer=0.0, overhead=(0.0, 0.0))
    plan = Plan(c, ParallelConfig(t, sequence_parallel=split, keep_gathered_inputs=split), 1, 4)
    planned = work_of(plan, hardware, LayerCounts(2, 0, True, True)).total.total
    norm = hardware.stream(4 * 16 * 32 / t**split, 5)
    ring = replace(IDEAL, peak=1e40, inside=Link(0.0, 2.0))      # an element a second
    for on, seconds in (hardware, planned + norm), (ring, 2.5 * tensor_parallel_traffic(4, 16, 32, t)):
        graph = gpt_graph(c, 4, t, on)
        words = {name: word.replace("p", ".p"[split]) for name, word in megatron_choices(graph).items()}
        assert sums(graph.costs, words)[0].seconds == close(seconds)


def test_servers_exchange_shards_of_gradients():
    """Each of 8 devices sends an eighth over an eighth of the link, so n elements together; a fifth is hidden."""
    graph = gpt_graph(small_model(1), 16, 16, replace(IDEAL, peak=1e40, between=Link(0.0, 2.0), hidden=0.2))
    replica, = sums(graph.costs, dict.fromkeys(graph.operators, "ss"))
    assert replica.seconds == close(0.8 * replica.memory / 16)


@pytest.mark.parametrize("preset, b, n, s, expected", [
    ("gpt2-8.3b", 1, 8, 1021, "c . c f r . . c f r . . c f"),
    ("gpt2-8.3b", 1, 8, 1024, "c p c f r p p c f r p p c f"),
    ("gpt2-355m", 32, 8, 1024, "c s s s s s s s s s s s c f"),
    ("gpt2-8.3b", 512, 64, 1024, "cs ss ss ss ss ss ss cs fs rs ss ss cs fs")])
def test_what_is_best(preset, b, n, s, expected):
    """Megatron's layers for one sample, with sequence parallelism unless the positions are a prime number; replicas of
    all but the vocabulary; attention by samples and the MLP by columns, where replicas do not fit.
    """
    graph = gpt_graph(replace(model_of({"preset": preset}), max_position_embeddings=s), b, n, load("dgx-a100"))
    found = next(cost for cost in fastest_of_each_size(graph) if cost.memory < 76e9)
    assert dict(found.choices) == dict(zip(graph.operators, expected.split()))
    for start in sums(graph.costs, megatron_choices(graph)):
        walked = random_walk(graph, start, 76e9, 300 / found.seconds, 5000, Random(0))
        assert walked.seconds / 1.1 < found.seconds < start.seconds


def test_the_program_prints_choices_that_are_possible(capsys):
    main("--operators --preset gpt2-8.3b --num-gpus 8 --global-batch-size 1".split())
    assert "replicas" not in capsys.readouterr().out
