"""Profiles of hardware as files: they are read as they were written, and nonsense gets a sentence."""
import os
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from mpi_impl.planning.profiles import HERE, hardware_of, known, load, save
from reference.costs.hardware import Link, Sharded
from reference.errors import UserError
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


@given(numbers=st.lists(NUMBERS, min_size=6, max_size=6), about=st.text(st.characters(exclude_categories=["Cs", "Cc"])),
       server=st.integers(1, 100))
def test_what_is_written_is_read_again(tmp_path_factory, numbers, about, server):
    """To six digits, which is more than anybody measures."""
    peak, bandwidth, optimizer, late, outside, inside = numbers
    path = tmp_path_factory.getbasetemp() / "mine.toml"
    hardware = replace(REAL, name="mine", about=about, peak=peak, bandwidth=bandwidth, optimizer=optimizer,
                       server=server, sharded=Sharded(inside, 0.25), between=Link(late, peak),
                       passes=replace(REAL.passes, outside=(outside, inside)))
    save(hardware, str(path))
    assert load(str(path)) == hardware


def test_a_text_of_several_lines_and_quotes_is_read_again(tmp_path):
    hardware = replace(REAL, name="mine", about='a "quoted" \\ text\nof two lines,\twith a tab')
    save(hardware, str(tmp_path / "mine.toml"))
    assert load(str(tmp_path / "mine.toml")) == hardware


def read(name="dgx-a100") -> dict:
    return tomllib.loads((HERE / f"{name}.toml").read_text())


@pytest.mark.parametrize("change, says", [
    (lambda f: f.pop("peak"), "missing required field `peak`"),
    (lambda f: f.update(speed=3), "speed means nothing there; it may have name, about, peak"),
    (lambda f: f.update(peak="fast"), r"expected `float`, got `str`, at `\$.peak`"),
    (lambda f: f.update(peak=True), r"expected `float`, got `bool`, at `\$.peak`"),
    (lambda f: f.update(peak=10**400), r"out of range, at `\$.peak`"),
    (lambda f: f.update(memory=float("inf")), "memory is inf"), (lambda f: f.update(memory=-1), "above 0"),
    (lambda f: f.update(about=5), r"expected `str`, got `int`, at `\$.about`"),
    (lambda f: f.update(server=2.5), r"expected `int`, got `float`, at `\$.server`"),
    (lambda f: f.update(efficiency=[]), "efficiency is .* but it is"),
    (lambda f: f.update(efficiency=[[1.0, float("nan")]]), "efficiency is .* but it is"),
    (lambda f: f.update(efficiency=[0.5]), r"expected `array`, got `float`, at `\$.efficiency\[0\]`"),
    (lambda f: f.update(attention=0.4), r"expected `array`, got `float`, at `\$.attention`"),
    (lambda f: f.update(attention=[0.4, float("inf")]), "must be two numbers"),
    (lambda f: f.update(inside=3), r"expected `object`, got `int`, at `\$.inside`"),
    (lambda f: f["inside"].pop("latency") and f["inside"].update(delay=1), "inside.delay means nothing there"),
    (lambda f: f["between"].update(bandwidth="10"), r"at `\$.between.bandwidth`"),
    (lambda f: f["between"].update(latency=float("inf")), "a latency not below"),
    (lambda f: f["sharded"].update(hidden=1.5), "sharded is .* its hidden from 0 to 1"),
    (lambda f: f["sharded"].update(bandwidth=0.0), "its bandwidth must be above 0"),
    (lambda f: f["sharded"].update(overlap=0.7), "sharded.overlap means nothing there; it may have bandwidth, hidden"),
    (lambda f: f["passes"].pop("scores"), "missing required field `scores`"),
    (lambda f: f["passes"].update(scores=[1]), r"length 2, got 1, at `\$.passes.scores`")])
def test_what_makes_no_sense_is_told_in_a_sentence(change, says):
    """With the name of the profile."""
    found = read()
    change(found)
    with pytest.raises(UserError, match=says) as told:
        hardware_of("mine", found)
    assert str(told.value).startswith("--hardware mine") and str(told.value).endswith((".", "is an example."))


def test_a_file_that_is_none(tmp_path):
    path = tmp_path / "broken.toml"
    for data, says in ((b"peak = = 3", "is not TOML: "), (b"\xff\xfe", "not UTF-8"),
                       (b"a = " + b"[" * 9000, "nested too deeply"), (b"peak = " + b"9" * 5000, "is not TOML: "),
                       (b"a." * 10**5 + b"b = 1", "has 200,005 bytes, but a file of its kind has at most 16,384")):
        path.write_bytes(data)
        with pytest.raises(UserError, match=says):
            load(str(path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="it is a pipe or a device"):
        load(str(tmp_path / "pipe"))
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load(str(tmp_path))
    with pytest.raises(UserError, match="must be dgx-2h, dgx-a100, dgx-h100, or a profile's file"):
        load("dgx-z9")
    with pytest.raises(UserError, match="cannot be written"):
        save(REAL, str(tmp_path / "no" / "such.toml"))
