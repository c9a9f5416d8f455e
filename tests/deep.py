"""Which of many similar tests are deep: they run with --deep only."""
from collections.abc import Iterable

import pytest


def every_other_deep(cases: Iterable) -> list:
    """The cases, those at odd places marked deep: where each takes seconds, and all of them minutes."""
    return one_fast_of(2, cases)


def one_fast_of(n: int, cases: Iterable) -> list:
    """The cases, of every n in a row all but the first marked deep. A case is a name, or a tuple of arguments."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.deep] if i % n else [])
            for i, case in enumerate(cases)]
