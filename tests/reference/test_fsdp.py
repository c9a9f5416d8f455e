"""The wrapper trains any list of layers as one process does, whichever way it is sharded."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.parallel import fsdp
from reference.parallel.fsdp import FullySharded
from tests.cases import close
from tests.fsdp_theorems import linear, one_process, tanh

RATE = 0.1


@given(st.lists(st.integers(1, 7), min_size=2, max_size=4), st.integers(1, 4), st.data())
def test_every_strategy_trains_as_one_process(sizes, groups, data):
    """Outputs, dx and the weights after two steps of two microbatches are those of the whole batch, with ragged
    buffers, any division into units, hybrid sharding and none.
    """
    n, seed = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2**32 - 1))
    d, rng, keep = groups * n, np.random.default_rng(seed), data.draw(st.booleans())
    layers = [layer for a, b in zip(sizes, sizes[1:]) for layer in (linear(rng, a, b), tanh())]
    cuts = sorted({0, len(layers), *(2 * i for i in range(1, len(sizes) - 1) if data.draw(st.booleans()))})
    wrapped = FullySharded([layers[a:b] for a, b in zip(cuts, cuts[1:])], d, n, reshard_after_forward=not keep)
    params = [dict(layer.params) for layer in layers]
    for _ in range(2):
        total = [{name: 0 for name in p} for p in params]
        for _ in range(2):
            x, dy = rng.normal(size=(d, 3, sizes[0])), rng.normal(size=(d, 3, sizes[-1]))
            ys, caches = wrapped.forward(list(x))
            dxs = wrapped.backward(list(dy), caches)
            y, dx, grads = one_process(layers, params, x, dy)
            close(np.stack(ys), y)
            close(np.stack(dxs), dx, 1e-10)
            total = [{name: sums[name] + grad for name, grad in each.items()} for sums, each in zip(total, grads)]
        wrapped.descend(RATE)
        params = [{name: x - RATE * sums[name] for name, x in p.items()} for p, sums in zip(params, total)]
    found = [layer for unit in wrapped.units for layer in unit.gather()[-1]]
    for p, whole in zip(found, params):
        for name, x in p.items():
            close(x, whole[name], 1e-10)


MINIATURE = 8 * 4 + 4 + 4 * 16 + 16 + 16 * 4 + 4      # elements of Linear 8-4, 4-16, 16-4


@pytest.mark.parametrize("n, reshard, sent, held", [
    (4, False, 2 * MINIATURE * 3 / 4, 2 * MINIATURE / 4),     # SHARD_GRAD_OP
    (4, True, 3 * MINIATURE * 3 / 4, 2 * MINIATURE / 4),      # FULL_SHARD
    (2, True, 3 * MINIATURE / 2 + 2 * MINIATURE / 2 / 2, 2 * MINIATURE / 2)])      # HYBRID_SHARD: inside, and across
def test_what_a_rank_sends_and_holds(n, reshard, sent, held, monkeypatch):
    """Three layers on 4 ranks: elements that a rank sends in a step, by ring algorithms, and keeps between steps."""
    counted = []

    def count(name, times):
        original = getattr(fsdp, name)

        def counting(xs, **kwargs):
            whole = len(xs[0]) * (len(xs) if name == "all_gather" else 1)
            counted.append(times * whole * (len(xs) - 1) / 4)    # by each of the 4, if k send (k - 1)/k
            return original(xs, **kwargs)

        monkeypatch.setattr(fsdp, name, counting)

    for name, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        count(name, times)
    rng = np.random.default_rng(0)
    wrapped = FullySharded([[linear(rng, *sizes)] for sizes in ((8, 4), (4, 16), (16, 4))], 4, n, reshard)
    ys, caches = wrapped.forward([rng.normal(size=(2, 8)) for _ in range(4)])
    wrapped.backward([np.ones_like(y) for y in ys], caches)
    assert sum(counted) == sent
    assert sum(unit.shards[0].size + unit.grads[0].size for unit in wrapped.units) == held
