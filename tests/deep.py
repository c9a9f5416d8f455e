"""The choice of deep tests among many similar ones: deep tests run with --deep only."""
from collections.abc import Iterable

import pytest


def every_other_deep(cases: Iterable) -> list:
    """Mark the cases at odd places deep, where each takes seconds and all of them take minutes."""
    return one_fast_of(2, cases)


def one_fast_of(n: int, cases: Iterable) -> list:
    """Mark all but the first of every n cases in a row deep. A case is a name, or a tuple of arguments."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.deep] if i % n else [])
            for i, case in enumerate(cases)]
