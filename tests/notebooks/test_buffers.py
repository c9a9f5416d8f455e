"""The pictures of the flat buffer: every element has its tensor and its owner, and what is filled is what is held."""
from math import isclose, prod

from hypothesis import given, settings, strategies as st
from matplotlib.colors import to_hex

from mpi_impl.demos.tiny_gpt import tiny_gpt
from mpi_impl.notebook.pictures.buffers import STAGES, TINTS, draw_layout, draw_stages
from mpi_impl.notebook.pictures.shards import OWNERS, WHOLE
from mpi_impl.reports.charts import MEMORY
from reference.models.gpt import gpt_tensors
from reference.parallel.layout import Layout
from reference.parallel.model_states import model_states

TINTED = {tint for pair in TINTS for tint in pair}


def rectangles(axes, colors):
    """Return the rectangles in these colours as (row, start, stop, color), from left to right in each row."""
    found = [(int(patch.get_y()), round(patch.get_x()), round(patch.get_x() + patch.get_width()),
              to_hex(patch.get_facecolor()).upper()) for patch in axes.patches]
    return sorted(one for one in found if one[-1] in colors)


def layouts():
    return st.builds(Layout, st.integers(1, 3).map(lambda layers: gpt_tensors(tiny_gpt(layers))), st.just(1),
                     st.sampled_from([1, 500, 900, 1 << 20]), st.integers(2, 7))


@settings(max_examples=settings().max_examples // 5)
@given(layouts())
def test_each_element_has_its_tensor_and_its_owner(layout):
    axes, = draw_layout(layout, "a title").axes
    assert axes.get_title("left") == "a title"
    tensors, owned = rectangles(axes, TINTED), rectangles(axes, OWNERS)
    for row, bucket in enumerate(layout.buckets):
        inside = [segment for segment in layout.segments if bucket.start <= segment.offset < bucket.stop]
        assert [one[1:3] for one in tensors if one[0] == row] == [
            (segment.offset - bucket.start, segment.slice.stop - bucket.start) for segment in inside]
        own = [layout.owned_piece(bucket, rank).in_buffer for rank in range(layout.parts)]
        assert [one[1:] for one in owned if one[0] == row] == [
            (part.start - bucket.start, part.stop - bucket.start, OWNERS[rank]) for rank, part in enumerate(own)]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"bucket {i}" for i in range(len(layout.buckets))]


@settings(max_examples=settings().max_examples // 5)
@given(layouts())
def test_what_pads_a_bucket_is_drawn_and_named(layout):
    figure = draw_layout(layout)
    elements = sum(prod(segment.shape) for segment in layout.segments)
    padding = sum(round(patch.get_width()) for patch in figure.axes[0].patches if patch.get_hatch())
    assert padding == layout.size - elements
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == [f"rank {rank}" for rank in range(layout.parts)] + ["padding"] * (padding > 0)


def test_a_buffer_that_is_not_sharded_belongs_to_all_ranks():
    layout = Layout(gpt_tensors(tiny_gpt(1)))
    axes, = draw_layout(layout).axes
    assert not rectangles(axes, OWNERS)
    assert [one[1:3] for one in rectangles(axes, {WHOLE})] == [(0, bucket.size) for bucket in layout.buckets]


def test_units_are_named_and_neighbours_differ():
    layout = Layout(gpt_tensors(tiny_gpt(2)), bucket_size=900, parts=4)
    axes, = draw_layout(layout).axes
    words = {text.get_text() for text in axes.texts}
    assert {"output", "blocks.0", "blocks.1", "embedding.word", "mlp.w_in"} <= words
    tensors = rectangles(axes, TINTED)
    assert all(one[-1] != other[-1] for one, other in zip(tensors, tensors[1:]) if one[0] == other[0])


@given(n=st.integers(1, 8))
@settings(max_examples=8, deadline=None)
def test_the_filled_area_is_the_memory_of_the_formula(n):
    figure = draw_stages(n)
    whole = sum(model_states(1, n, 0))
    for stage, axes in enumerate(figure.axes):
        held = model_states(1, n, stage)
        assert axes.get_title("left") == f"stage {stage}: {STAGES[stage]}"
        assert f"{sum(held) / whole:.0%}" in axes.get_xlabel()
        for kind, size in held._asdict().items():
            filled = [patch for patch in axes.patches if to_hex(patch.get_facecolor()) == MEMORY[kind].lower()]
            assert len(filled) == n
            for rank, patch in enumerate(filled):
                assert isclose(patch.get_width() * patch.get_height() * whole / 0.92, size)
                assert rank <= patch.get_x() < rank + 1
                assert isclose(patch.get_y(), rank / n if patch.get_height() < 1 else 0, abs_tol=1e-12), "its own part"
