"""Calls of ranks that do not fit together are refused, with the lines of both, and all others pass."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.comm.pending import Pending
from mpi_impl.launch.pool import pickle_call
from reference.errors import UserError

HAVE_A_CHOICE = ["all_reduce", "broadcast", "all_gather", "reduce_scatter"]
OPERATIONS = [*HAVE_A_CHOICE, "all_to_all", "all_to_all_rows",
              "post_all_reduce", "post_all_gather", "post_reduce_scatter"]
LENGTHS = st.sampled_from([1, 40])      # by MPI, in shared memory
# (MPICH ends a job itself if the floats that it adds up in the background are not of one size.)
A_CALL = st.tuples(st.sampled_from(OPERATIONS), LENGTHS, st.sampled_from(["float64", "int64"]), st.integers(0, 1))
ARRAY = st.tuples(LENGTHS, st.sampled_from(["float64", "float32"]))


def call(group, operation, length, form, choice):
    n, x = group.size, np.ones((length * group.size, group.size), form)
    arguments = {"all_reduce": [x, "test", ("sum", "max")[choice]], "broadcast": [x, "test", choice],
                 "all_to_all": [[x] * n, "test"], "all_to_all_rows": [x, [length] * n, [length] * n, "test"],
                 "post_all_reduce": [x, "test"], "post_all_gather": [x.ravel(), np.tile(x.ravel(), n), "test"],
                 "post_reduce_scatter": [x.ravel(), x[::n].ravel(), "test"]}
    found = getattr(group, operation)(*arguments.get(operation, [x, choice, "test"]))
    if isinstance(found, Pending):
        found.wait()


@given(st.data(), st.integers(2, 8), A_CALL, A_CALL, st.integers(0, 3))
def test_another_call_of_one_rank_is_refused_on_all(ranks, data, n, right, other, i):
    """Another operation, size, format, or root, axis, sum or maximum; and an equal call is not."""
    wrong, odd = (*right[:i], other[i], *right[i + 1:]), data.draw(st.integers(0, n - 1), "rank")
    answers, _ = ranks.answers([pickle_call(call, wrong if rank == odd else right) for rank in range(n)], 30)
    for answer in answers:
        expect(answer, wrong == right or i == 3 and right[0] not in HAVE_A_CHOICE)


def expect(answer, fits):
    """Assert that a rank has returned, or names two lines of this file."""
    assert answer.what == "returned" if fits else answer.detail.count("test_agreement.py:") == 2, answer


@given(ARRAY, ARRAY)
def test_a_message_of_another_size_or_format_is_refused(ranks, sent, received):
    answers, _ = ranks.answers([pickle_call(send_or_receive, array) for array in (sent, received)], 30)
    expect(answers[1], fits=sent == received)


def send_or_receive(group, length, form):
    post = group.post_receive if group.rank else group.post_send
    post(np.ones(length, form), 1 - group.rank, 0, "test").wait()


@pytest.mark.parametrize("x", [3.0, [1.0, 2.0], np.float64(3), np.array([None]), np.array(["1"])])
def test_only_arrays_of_numbers_are_exchanged(ranks, x):
    ranks.run(1, refuse, x)


def refuse(group, x):
    for post in (group.all_reduce, group.broadcast, group.post_all_reduce):
        with pytest.raises(UserError):
            post(x, "test")
    for post in (group.post_all_gather, group.post_reduce_scatter):
        for arrays in ((x, np.ones(2)), (np.ones(2), x)):
            with pytest.raises(UserError):
                post(*arrays, "test")
