"""The formulas for bytes, against schedules and the published tables; and the bytes of arrays."""
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.array_bytes import array_bytes
from reference.config import RECOMPUTE, ModelConfig
from reference.costs.memory import activations_outside_layers, layer_activations, most_in_flight
from reference.costs.published import ZERO
from reference.parallel.model_states import model_states
from reference.schedules.generators import gpipe, interleaved, one_f_one_b, zero_bubble_h1, zero_bubble_h2
from reference.schedules.simulate import activations_in_flight

MT_NLG = ModelConfig(105, 20_480, 128, 51_200, 2048)      # 530B


# ---- model states ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", ZERO)
def test_table_1_of_zero(stage):
    """Rajbhandari et al. 2020, table 1: 7.5 billion parameters. Halves go up there: 41.25 is printed as 41.3."""
    for n, printed in ZERO[stage].items():
        gigabytes, text = Decimal(sum(model_states(7_500_000_000, n, stage)) / 1e9), Decimal(str(printed))
        assert gigabytes.quantize(text, ROUND_HALF_UP) == text
        assert sum(model_states(7_500_000_000, n)) == 120e9


@given(psi=st.integers(1, 10**12), n=st.integers(1, 1024), w=st.sampled_from([2, 4, 8]), g=st.sampled_from([2, 4]),
       k=st.integers(0, 16))
def test_each_stage_of_zero_shards_more(psi, n, w, g, k):
    """(w + g + K) psi, (w + g) psi + K psi/N, w psi + (g + K) psi/N, (w + g + K) psi/N."""
    for stage, shards in enumerate([(1, 1, 1), (1, 1, n), (1, n, n), (n, n, n)]):
        published = [size * psi / shard for size, shard in zip((w, g, k), shards, strict=True)]
        assert model_states(psi, n, stage, w, g, k) == pytest.approx(published)


# ---- activations ----------------------------------------------------------------------------------------------------


@given(b=st.integers(1, 8), s=st.integers(1, 4096), head=st.integers(1, 128), a=st.integers(1, 64),
       t=st.sampled_from([1, 2, 4, 8]))
def test_table_2_of_korthikanti(b, s, head, a, t):
    """Korthikanti et al. 2022: its six rows, in its order."""
    h = a * head
    c = ModelConfig(1, h, a, 1, s)
    published = {
        (1, False, "none"): s * b * h * (34 + 5 * a * s / h),
        (t, False, "none"): s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        (t, True, "none"): s * b * h * (34 / t + 5 * a * s / (h * t)),
        (t, False, "selective"): s * b * h * (10 + 24 / t),
        (t, True, "selective"): s * b * h * (34 / t),
        (t, False, "full"): s * b * h * 2,
    }
    for (ranks, sequence_parallel, recompute), expected in published.items():
        assert sum(layer_activations(c, b, s, ranks, sequence_parallel, recompute)) == pytest.approx(expected)
    assert sum(layer_activations(c, b, s, t, True, "full")) == pytest.approx(s * b * h * 2 / t)   # of section 5


@given(w=st.sampled_from([2, 4, 8]), dropout=st.booleans(), recompute=st.sampled_from(RECOMPUTE))
def test_activations_of_more_bytes_leave_masks_as_they_are(w, dropout, recompute):
    """What is kept is numbers of w bytes, and masks of one, of which there are none without dropout."""
    c = ModelConfig(2, 8, 2, 5, 4, hidden_dropout=dropout / 10, attention_dropout=dropout / 10)
    half, more = (layer_activations(c, 3, 4, 2, recompute=recompute, w=bytes) for bytes in (2, w))
    masks = (2 * 3 * 4 * 8 * dropout, 0, 2 * 3 * 4**2 / 2 * dropout * (recompute == "none"))
    if recompute == "full":
        masks = (0, 0, 0)
    assert more == pytest.approx([mask + w / 2 * (size - mask) for mask, size in zip(masks, half, strict=True)])


def test_embedding_activations_of_a_long_pipeline():
    """Section 4.3: one dropout mask for each microbatch in flight. Only a pipeline of one stage keeps the head's."""
    assert activations_outside_layers(MT_NLG, 1, 2048, 8, 35) == 2048 * 20_480 * 35 / 8


@given(p=st.integers(1, 8), m=st.integers(1, 20), groups=st.integers(1, 4), v=st.integers(1, 4))
def test_most_in_flight_is_what_schedules_hold(p, m, groups, v):
    """GPipe, 1F1B, the zero-bubble schedules for any m, and the interleaved one for any multiple of p."""
    for name, schedule in (("gpipe", gpipe(p, m)), ("1f1b", one_f_one_b(p, m)), ("zb-h1", zero_bubble_h1(p, m)),
                           ("zb-h2", zero_bubble_h2(p, m))):
        assert activations_in_flight(schedule) == [most_in_flight(name, p, m, r) for r in range(p)]
    m = p * groups
    assert activations_in_flight(interleaved(p, m, v)) == [most_in_flight("interleaved", p, m, r, v) for r in range(p)]


# ---- arrays ---------------------------------------------------------------------------------------------------------


def test_one_buffer_counts_once():
    """However many views there are of it; and a view of a part keeps the whole."""
    x, y = np.zeros((4, 5)), np.zeros(3, np.float32)
    assert array_bytes(x, x[0], [x.T, {"a": x.reshape(-1)[:2]}]) == x.nbytes == array_bytes(x[1:2, :1])
    assert array_bytes((x, (y, None, 3)), y) == x.nbytes + y.nbytes and array_bytes() == 0
