"""Work on many cores."""
import os

import pytest

from mpi_impl.data.prepare.workers import map_in_order
from reference.errors import UserError


def failing(x, y):
    """Fail for 3, and end the process for 4."""
    if x == 4:
        os._exit(y)
    if x == 3:
        raise UserError(f"{x} is too much.")
    return x + y


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_so_does_an_error(workers):
    """It is the first, in the order of the work."""
    results = map_in_order(failing, workers, [1, 2, 3, 3], [10, 20, 30, 40])
    assert [next(results), next(results)] == [11, 22]
    with pytest.raises(UserError, match="3 is too much"):
        next(results)


def test_a_worker_that_is_ended_from_outside_is_reported():
    with pytest.raises(UserError, match="--workers than 2"):
        list(map_in_order(failing, 2, [4], [9]))
