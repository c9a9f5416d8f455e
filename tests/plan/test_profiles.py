"""Profiles of hardware as files: they are read as they were written."""
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from reference.costs.hardware import Link, Sharded
from shardlab.plan.profiles import HERE, hardware_of, known, load, save
from tests.plan_cases import REAL

NUMBERS = st.floats(1e-9, 1e18).map(lambda x: float(f"{x:.6g}"))


@pytest.mark.parametrize("name", known())
def test_those_that_come_along_say_where_they_are_from(name):
    """And lie within what there is: shares of a peak are below 1, nothing is faster than its maker says."""
    found = load(name)
    assert found.name == name and len(found.about) > 20
    assert all(0 < share < 1 for _, share in found.efficiency) and all(0 < share < 1 for share in found.attention)
    shares = [share for _, share in found.efficiency]
    assert shares == sorted(shares) and found.between.bandwidth / found.server <= found.inside.bandwidth


def test_a_profile_says_nothing_of_zero_3_or_all(tmp_path):
    """Without a table for it, ZeRO-3 has all links and no overlap; so a saved profile reads back the infinite limit."""
    found = read()
    found.pop("sharded")
    plain = hardware_of("mine", found)
    assert plain.sharded == Sharded(float("inf"), 0.0)
    save(plain, str(tmp_path / "mine.toml"))
    assert load(str(tmp_path / "mine.toml")) == plain


@given(numbers=st.lists(NUMBERS, min_size=6, max_size=6), server=st.integers(1, 100),
       about=st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t")))
def test_what_is_written_is_read_again(tmp_path_factory, numbers, about, server):
    """To six digits, which is more than anybody measures."""
    peak, bandwidth, optimizer, late, outside, inside = numbers
    path = tmp_path_factory.getbasetemp() / "mine.toml"
    hardware = replace(REAL, name="mine", about=about, peak=peak, bandwidth=bandwidth, optimizer=optimizer,
                       server=server, sharded=Sharded(inside, 0.25), between=Link(late, peak),
                       passes=replace(REAL.passes, outside=(outside, inside)))
    save(hardware, str(path))
    assert load(str(path)) == hardware


def read(name="dgx-a100") -> dict:
    return tomllib.loads((HERE / f"{name}.toml").read_text())
