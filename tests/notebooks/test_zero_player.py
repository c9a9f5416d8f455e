"""The player of ZeRO: its frames hold and send what the formulas say, and a browser shows them."""
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from reference.comm.ring import ring_all_gather
from reference.costs.volumes import data_parallel_traffic
from reference.parallel.model_states import model_states
from shardlab.demos.tiny_gpt import tiny_gpt
from shardlab.notebook.sliders import play_zero
from shardlab.notebook.sliders.zero import BYTES, RANKS, play_step
from tests.browser import complaints_of, open_browser


@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 3), st.integers(4, 9))
def test_frames_hold_and_send_what_the_formulas_say(stage, layers, heads, vocabulary):
    """With K = 12. A rank holds other ranks' parts of at most a block, while it is gathered or not yet reduced. The
    backward of a lookup gathers no table.
    """
    model, h = replace(tiny_gpt(layers, heads), vocab_size=vocabulary, position_embedding_type="rope"), 4 * heads
    block, table = 12 * h**2 + 13 * h, vocabulary * h
    sizes = [table, 2 * h, *[block] * layers, table]        # as they lie in the buffer
    psi, frames = sum(sizes), play_step(stage, model)
    between = sum(model_states(psi, RANKS, stage, 2, 2, 12))
    most = BYTES.gradients * ring_all_gather(block, RANKS) if stage > 1 else 0
    helds = [held for _, held, _, _ in frames]
    assert helds[0] == helds[-1] == min(helds) == between and max(helds) == between + most
    sent = data_parallel_traffic(psi, RANKS, stage) - (ring_all_gather(table, RANKS) if stage == 3 else 0)
    assert frames[-1][2] == BYTES.gradients * sent
    for _, held, _, cells in frames:                        # and what is drawn is what is held
        drawn = iter(cells)
        assert held == sum(bytes_each * size / RANKS for bytes_each in BYTES for size in sizes for _ in range(RANKS)
                           if next(drawn) != "0")


@pytest.mark.parametrize("stage, states", [(0, "2"), (1, "023"), (2, "02"), (3, "02")])
def test_after_the_step_ranks_have_what_one_process_has(stage, states):
    """All that they hold. Only at stage 1 the other ranks' parts of the gradients are still those of one sample."""
    assert set(play_step(stage)[-1][3]) == set(states)


@pytest.mark.deep
def test_a_browser_steps_by_buttons_and_by_keys(tmp_path):
    """It shows the frame's digits and sentence. Where no script may run, all sentences are listed."""
    text, file = play_zero(stage=1)._repr_html_(), tmp_path / "page.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{text}")
    with open_browser() as browser:
        page = browser.new_page()
        complaints = complaints_of(page)
        page.goto(file.as_uri())
        for name, key, place in ("frame", "End", (1, 14)), ("stage", "ArrowRight", (2, 13)), ("stage", "End", (3, 12)):
            page.locator(f"[name={name}]").press(key)
            page.get_by_role("button", name="back").click()
            event, _, _, cells = play_step(place[0])[place[1]]
            drawn = page.locator("svg rect").evaluate_all("boxes => boxes.map(box => box.className.baseVal.slice(-1))")
            said = page.locator("p").inner_text()
            assert "".join(drawn) == cells and said.startswith(f"{event}. ") and said in text.split("<script>")[0]
    assert not complaints
