"""The paths through the code in docs/reading.md can be walked in the time they name: their lengths are true."""
import re

from tools.reading import GUIDE, ROW, TOTAL, with_true_lengths

DAY_ONE, WEEK_ONE = re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)[1:3]


def test_the_lengths_in_the_guide_are_those_of_the_files():
    text = GUIDE.read_text()
    right = with_true_lengths(text)
    tables = "".join(line for line in right.splitlines(True) if line.startswith("|"))
    assert text == right, f"Run `python tools/reading.py`, which writes:\n\n{tables}"


def test_day_one_is_at_most_2000_lines_of_code():
    """Its total is the sum of its rows."""
    lengths = [int(row["length"].replace(",", "")) for row in ROW.finditer(DAY_ONE)]
    assert len(lengths) > 20 and sum(lengths) <= 2000, f"day one has {sum(lengths):,} lines"
    assert TOTAL.search(DAY_ONE)["length"] == f"{sum(lengths):,}"


def test_every_row_of_both_tables_is_read_by_the_tool():
    """A row that the pattern misses would not count."""
    for section in (DAY_ONE, WEEK_ONE):
        rows = [line for line in section.splitlines() if line.startswith("| [")]
        assert len(rows) == len(ROW.findall(section)) > 20
