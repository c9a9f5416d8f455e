"""Batches of requests: every token once, within the limits, nobody starves; and no text depends on its neighbours."""
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil, isclose
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.inference.decoding import last_logits
from reference.generation.batching import (Request, Server, continuous_batches, latencies, serve, static_batches,
                                           throughput)
from reference.generation.decoding import Sampling
from reference.kv_cache import empty_kv_cache
from reference.models.gpt import gpt_logits, gpt_tensors, next_logits
from shardlab.notebook.pictures.batches import slots_of
from tests.generate.texts import on_ranks, text_of
from tests.strategies import cases, close

SIZE, ARRIVALS = st.integers(1, 6), st.integers(0, 12)
WAYS = st.sampled_from([static_batches, continuous_batches])
TIMES = st.sampled_from([0.0, 0.25, 3.0])


@st.composite
def requests_and_servers(draw, size=SIZE, arrivals=ARRIVALS):
    """Draw requests, and a server with just enough blocks for each, or more."""
    requests = sorted(draw(st.lists(st.builds(Request, arrivals, size, size), min_size=1, max_size=6)))
    block, most = draw(st.integers(1, 7)), max(request.positions for request in requests)
    return requests, Server(draw(st.integers(1, 4)), ceil(most / block) + draw(st.integers(0, 5)), block, 1.0,
                            draw(TIMES), draw(TIMES))


@given(requests_and_servers(), WAYS)
def test_every_token_once_in_order_and_within_the_limits(case, way):
    """A step computes exactly the tokens that are not cached; the first waiting request is in each, so that all end."""
    (requests, server), now, done, cached = case, 0.0, Counter[int](), dict[int, int]()
    for step in way(requests, server):
        unfinished = [i for i, request in enumerate(requests) if done[i] < request.output]
        assert next(iter(step.work)) == unfinished[0]
        assert step.start == max(now, requests[unfinished[0]].arrival)
        assert step.end == step.start + server.seconds(step.work)
        for i, work in step.work.items():
            assert done[i] < requests[i].output and requests[i].arrival <= step.start
            assert work == (requests[i].prompt + done[i] - cached.get(i, 0), requests[i].prompt + done[i])
        assert sum(ceil(work.positions / server.block) for work in step.work.values()) <= server.blocks
        assert len(step.work) <= server.slots
        now, cached = step.end, {i: work.positions for i, work in step.work.items()}
        done.update([*step.work])
    assert done == {i: request.output for i, request in enumerate(requests)}


@given(requests_and_servers())
def test_nobody_joins_a_static_batch(case):
    for before, step in pairwise(static_batches(*case)):
        assert step.work.keys() <= before.work.keys() or not step.work.keys() & before.work.keys()


@given(requests_and_servers(arrivals=st.just(0)))
def test_continuous_batches_end_no_later_where_all_are_there_and_none_loses_its_cache(case):
    """No request takes part in a later step than in static batches; and the steps' other costs are the same sum."""
    requests, server = case
    server = replace(server, block=11)         # the longest request's positions
    steps, static = continuous_batches(requests, server), static_batches(requests, server)
    for i in range(len(requests)):
        last, last_static = (max(n for n, step in enumerate(each) if i in step.work) for each in (steps, static))
        assert last <= last_static
    assert steps[-1].end <= static[-1].end * (1 + 1e-12)


@pytest.mark.parametrize("requests, server", [
    ([Request(0, 1, 4), Request(0.5, 1, 1), Request(4.5, 1, 1), Request(4.6, 1, 5)], Server(2)),
    ([Request(0, 2, 5), Request(0, 2, 2), Request(0, 1, 2)], Server(2, 3, 2, 1.0, 0.25))])
def test_they_can_end_later_otherwise(requests, server):
    """A step has just begun when the longest request arrives; or a cache is lost, and computed twice."""
    assert continuous_batches(requests, server)[-1].end > static_batches(requests, server)[-1].end


@given(SIZE, SIZE, st.integers(0, 9))
def test_the_latency_of_one_request_alone(prompt, output, arrival):
    requests, server = [Request(arrival, prompt, output)], Server(1, 11, 1, 1.0, 0.5, 0.25)
    steps = continuous_batches(requests, server)
    (first, each), = latencies(requests, steps)
    rest = sum(1.5 + 0.25 * (prompt + i) for i in range(1, output))
    assert isclose(first, 1 + 0.75 * prompt) and isclose(each * (output - 1), rest)
    assert isclose(throughput(steps), output / (first + rest))


@given(requests_and_servers(), WAYS)
def test_a_picture_gives_each_request_one_slot_of_its_own(case, way):
    steps = way(*case)
    rows = slots_of(steps)
    for step, before, own in zip(steps, [{}, *rows], rows):
        assert own.keys() == step.work.keys() and len({*own.values()}) == len(own) and max(own.values()) < case[1].slots
        assert all(own[i] == before[i] for i in own.keys() & before.keys())


# ---- played with a model --------------------------------------------------------------------------------------------


def texts_of(case, requests):
    """Return the requests' prompts, and the text of each alone."""
    prompts = [case.ids(f"prompt {i}", request.prompt).tolist() for i, request in enumerate(requests)]
    sampling = Sampling(0.9, seed=2)
    return prompts, sampling, [text_of(case, prompt, request.output, sampling, i)
                               for i, (prompt, request) in enumerate(zip(prompts, requests))]


def narrow(case):
    """Leave room for just the longest request, so that caches are lost often."""
    requests, server = case
    return requests, replace(server, block=1, blocks=max(request.positions for request in requests))


SHORT = requests_and_servers(size=st.integers(1, 4), arrivals=st.integers(0, 2)).map(narrow)


@given(cases(sizes=st.just(1), max_position_embeddings=7), SHORT, WAYS)
def test_a_text_is_that_of_its_request_alone(case, served, way):
    """Whatever the batches, and however often it has lost its cache: all logits are those of one whole forward."""
    c, params, found = case.model, case.params(gpt_tensors(case.model)), {}
    prompts, sampling, alone = texts_of(case, served[0])

    def choose(logits, position, text):
        found[text, position] = logits
        return sampling.choose(logits, position, text)

    assert alone == serve(prompts, way(*served), SimpleNamespace(choose=choose),
                          lambda: empty_kv_cache(c, params.blocks, 7, params.embedding.word),
                          lambda tokens, kv_cache: next_logits(np.array(tokens), params, c, kv_cache))
    for i, (prompt, text) in enumerate(zip(prompts, alone)):
        expected = gpt_logits(np.array([prompt + text[:-1]]), params, c)[0]
        for position in range(len(prompt), len(prompt) + len(text)):
            close(found[i, position], expected[position - 1], 1e-12)


@given(cases(sizes=st.sampled_from([1, 2, 4]), max_position_embeddings=7), SHORT, WAYS)
def test_texts_on_ranks_are_those_of_each_request_alone(ranks, case, served, way):
    prompts, sampling, alone = texts_of(case, served[0])
    assert ranks.run(case.t, on_ranks, 1, case, "float64", serve_on_ranks, prompts, way(*served), sampling
                     ) == [alone] * case.t


def serve_on_ranks(replica, prompts, steps, sampling):
    return serve(prompts, steps, sampling, lambda: replica.empty_kv_cache(7), partial(last_logits, replica))
