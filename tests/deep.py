"""Which of many similar tests are deep: they run with --deep only."""
from collections.abc import Iterable

import pytest


def every_other_deep(names: Iterable[str]) -> list:
    """The names, those at odd places marked deep: for cases of which each takes seconds, and all of them minutes."""
    return [pytest.param(name, marks=pytest.mark.deep) if i % 2 else name for i, name in enumerate(names)]
