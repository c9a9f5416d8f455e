"""A plan's memory, traffic and idle time against the papers' formulas, written out once more; and its picture."""
import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib.colors import to_hex

from mpi_impl.notebook.pictures.shards import OWNERS
from mpi_impl.notebook.plan import MODELS, draw_plan, plan
from mpi_impl.reports.charts import MEMORY
from mpi_impl.reports.timelines.gantt import COLORS as KIND_COLORS
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.plans import Plan
from reference.costs.traffic import PassCounts, traffic
from reference.errors import UserError

S, V = 2048, 51_200
POWERS = st.sampled_from((1, 2, 4, 8))


@st.composite
def choices(draw):
    """Draw values of the sliders that fit together."""
    model, t, p, d = draw(st.sampled_from(list(MODELS))), draw(POWERS), draw(POWERS), draw(POWERS)
    v = draw(st.integers(1, 3)) if p > 1 else 1
    m = draw(st.integers(1, 4)) * p
    if p * v > MODELS[model].num_layers:
        v = 1
    return model, t, p, d, v, m, draw(st.integers(0, 3)), draw(st.booleans())


@given(choices())
def test_memory_is_that_of_the_papers(chosen):
    """Rajbhandari et al. 2020 for the states, Korthikanti et al. 2022 for the activations, Narayanan et al. 2021 for
    how many microbatches a rank holds.
    """
    name, t, p, d, v, m, zero, sequence_parallel = chosen
    h, L, a = MODELS[name].hidden_size, MODELS[name].num_layers, MODELS[name].num_attention_heads
    found, sequence = plan(*chosen), t if sequence_parallel and t > 1 else 1
    layers = sum(L // (p * v) + (stage < L % (p * v)) for stage in range(0, p * v, p))
    psi = V * h // t + S * h + layers * ((12 * h**2 + 7 * h) // t + 6 * h) + (2 * h if p == 1 else 0)
    assert found.psi == psi
    w, g, k = (2 / (d if zero == 3 else 1), 2 / (d if zero >= 2 else 1), 12 / (d if zero >= 1 else 1))
    assert found.memory[:3] == pytest.approx((w * psi, g * psi, k * psi))

    layer = S * h * (10 / sequence + 24 / t + 5 * a * S / (h * t))
    in_flight = min(m * v, p if v == 1 else 2 * (p - 1) + (v - 1) * p + 1)
    outside = p * S * h / t + (4 * S * h / t * (1 + V / h) if p == 1 else 0)
    assert found.memory.activations == pytest.approx(in_flight * layers / v * layer + outside)


@given(choices())
def test_traffic_is_that_of_the_papers(chosen):
    """Two bytes a number; the first rank sends forward from all its stages, and backward from all but the first."""
    name, t, p, d, v, m, zero, sequence_parallel = chosen
    h = MODELS[name].hidden_size
    found, x = plan(*chosen), S * h
    in_layer = (10 if sequence_parallel and t > 1 else 8) * x * (t - 1) / t
    times = (2, 2, m + 1, 3 * m)[zero]
    assert found.messages == pytest.approx((2 * m * len(found.layers) * in_layer,
                                            2 * m * (2 * v - 1) * x / t if p > 1 else 0,
                                            2 * times * found.psi * (d - 1) / d))


@given(choices())
def test_idle_time_is_that_of_the_paper(chosen):
    """(p - 1) / (v m): the simulator's, where m is a multiple of p (Narayanan et al. 2021, section 2.2)."""
    _, _, p, _, v, m, *_ = chosen
    found = plan(*chosen).timeline
    assert found.bubble_fraction == pytest.approx((p - 1) / (v * m))
    assert found.work == pytest.approx(3 * m)       # a forward of all layers takes 1, a backward 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("t, p, v", [(1, 4, 1), (2, 4, 1), (4, 1, 1), (2, 2, 2)])
def test_traffic_is_what_the_ledger_of_a_run_would_say(t, p, v, recompute, sequence_parallel):
    """Of all ranks of a pipeline: inside layers, and between stages, as `reference.costs.traffic` counts them."""
    if sequence_parallel and t == 1:
        return
    c, m = ModelConfig(8, 16, 4, 32, 8), 4
    parallel = ParallelConfig(t, p, 1, "interleaved" if v > 1 else "1f1b", v if v > 1 else None,
                              recompute=Recompute(recompute), sequence_parallel=sequence_parallel)
    lines = traffic(c, parallel, 1, 8, PassCounts(1, m, 0, 0))
    in_layers = sum(line.elements * (2 if line.operation == "all_reduce" else 1) * (t - 1) / t for line in lines
                    if line.group == "tensor" and line.reason.removesuffix(", again") in (
                        "attention input", "attention output", "mlp input", "mlp output"))
    between = {phase: sum(line.elements for line in lines if line.operation == "send" and line.phase == phase)
               for phase in ("forward", "backward")}
    found = Plan(c, parallel, m).messages
    assert found.tensor == pytest.approx(2 * in_layers / p)
    if p > 1:      # p v - 1 edges; the first rank is at v of them forward, and at v - 1 backward
        expected = (between["forward"] * v + between["backward"] * (v - 1)) / (p * v - 1)
        assert found.pipeline == pytest.approx(2 * expected)


@pytest.mark.parametrize("wrong, says", [
    (("18.4B", 1, 1, 1, 2, 8, 0), "there is no pipeline"),
    (("18.4B", 1, 64, 1, 1, 64, 0), "every stage needs one"),
    (("18.4B", 1, 4, 1, 2, 2, 0), "multiple"),
    (("18.4B", 5, 1, 1, 1, 1, 0), "--tensor-model-parallel-size is 5"),
    (("18.4B", 1, 1, 1, 1, 1, 4), "--zero-stage is 4")])
def test_what_does_not_go_together_is_reported_in_a_sentence(wrong, says):
    with pytest.raises(UserError, match=says):
        plan(*wrong)


def test_sequence_parallel_needs_a_tensor_group_and_is_left_out_without():
    """A slider that has no effect is no error."""
    assert not plan("18.4B", 1, 1, 1, 1, 1, 0, True).parallel.sequence_parallel
    assert plan("18.4B", 2, 1, 1, 1, 1, 0, True).parallel.sequence_parallel


# ---- the picture ----------------------------------------------------------------------------------------------------


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("t, p, d, v, m", [(2, 2, 2, 1, 4), (1, 4, 2, 2, 8), (4, 1, 1, 1, 2)])
def test_the_picture_of_a_plan(t, p, d, v, m):
    """Its boxes are the ranks, its bars the numbers, its timeline the schedule's actions."""
    shown = plan("1.7B", t, p, d, v, m, 0)
    figure = draw_plan(shown)
    grid, memory, time, messages = figure.axes
    assert f"on {t * p * d} ranks; {m * d} samples a step" in figure.get_suptitle()

    assert len(grid.patches) == t * p * d
    ranks = dict(zip(texts(grid), grid.patches))
    assert sorted(map(int, ranks)) == list(range(t * p * d))
    assert all(to_hex(box.get_facecolor()).upper() == OWNERS[int(rank) % t] for rank, box in ranks.items())
    for rank, box in ranks.items():     # its column is its stage, its row its replica
        assert (int(box.get_x()), int(box.get_y())) == (int(rank) // (t * d), int(rank) // t % d)

    for axes, parts, colors in ((memory, shown.memory._asdict(), MEMORY),
                                (messages, shown.messages._asdict(), dict(zip(shown.messages._fields, OWNERS)))):
        assert np.allclose([bar.get_width() * 1e9 for bar in axes.patches], list(parts.values()))
        assert [to_hex(bar.get_facecolor()).upper() for bar in axes.patches] == [colors[name] for name in parts]
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [
            f"{name} {size / 1e9:,.2f}" for name, size in parts.items()]
    assert f"holds {sum(shown.memory) / 1e9:,.1f} GB" in memory.get_title(loc="left")
    assert f"sends {sum(shown.messages) / 1e9:,.1f} GB" in messages.get_title(loc="left")
    assert memory.lines[0].get_xdata()[0] == 80

    assert len(time.patches) == 2 * m * v * p
    kinds = [to_hex(patch.get_facecolor()).upper() for patch in time.patches]
    assert kinds.count(KIND_COLORS["F"]) == kinds.count(KIND_COLORS["B"]) == m * v * p
    title = time.get_title(loc="left")
    assert title == ("one stage: no pipeline, no bubble" if p == 1 else
                     f"the pipeline idles {(p - 1) / (v * m):.1%} of its ideal time")


def test_of_many_ranks_and_microbatches_not_all_are_drawn():
    grid, _, time, _ = draw_plan(plan("1008.0B", 8, 32, 16, 1, 64, 0)).axes
    assert len(grid.patches) == 8 * 16 * 8 and "of which 16 x 8 are shown" in grid.get_title(loc="left")
    assert not time.patches and texts(time) == ["too many microbatches to draw"]
