"""The pool runs functions on real ranks, reports their failures, and is ready for the next run."""
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mpi_impl.launch.pool import Pool, RankAssertion, RankFailure
from mpi_impl.runtime.mpis import YIELDING
from mpi_impl.runtime.rank_environment import THREAD_VARIABLES, cores
from tests.deep import one_fast_of
from tests.launching import in_foreground
from tests.pool_functions import (broadcast_seven, die, give_a_lambda, leave_a_message_behind, process_id, raise_on,
                                  skip_an_all_reduce, sleep_in_native_code, speak, split_and_free, sum_of_ranks,
                                  the_environment, where_and_what)


@given(n=st.integers(1, 8), numbers=st.lists(st.integers(), max_size=3))
def test_every_rank_gets_the_same_arguments_and_the_results_come_in_rank_order(ranks, n, numbers):
    assert ranks.run(n, where_and_what, numbers, "text") == [(rank, n, (numbers, "text")) for rank in range(n)]


@given(n=st.integers(1, 8))
def test_the_group_is_made_of_those_ranks_and_its_ledger_is_new(ranks, n):
    assert ranks.run(n, sum_of_ranks) == [(n * (n - 1) / 2, 1)] * n


def test_what_ranks_print_is_printed_in_rank_order(ranks, capsys):
    ranks.run(3, speak)
    assert capsys.readouterr().out == "".join(f"rank {i} speaks\n... and warns\n" for i in range(3))


def test_ranks_have_one_blas_thread_each_and_yield_where_cores_are_scarce(monkeypatch):
    for name in (*YIELDING, *THREAD_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    with Pool(3) as pool:
        assert pool.run(2, the_environment) == [("1", YIELDING if pool.size > cores() else {})] * 2


def test_a_long_tmpdir_is_no_hindrance(tmp_path, monkeypatch):
    """A socket's address is short."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 120)))
    (tmp_path / ("x" * 120)).mkdir()
    with Pool(1) as pool:
        assert pool.run(1, where_and_what) == [(0, 1, ())]


# --- failures

def test_a_failing_rank_is_reported_with_its_traceback_and_the_stacks_of_those_that_wait(small_pools):
    with pytest.raises(RankFailure) as failure:
        small_pools.run(3, raise_on, 1, KeyError)
    text = str(failure.value)
    assert "rank 1: raised\nTraceback" in text and "KeyError: 'something that went wrong'" in text
    assert "ranks 0, 2" not in text, "they printed different things, so they are told apart"
    assert "rank 0: stuck" in text and "rank 2: stuck" in text and 'return group.all_reduce(np.ones(1), "test")' in text
    assert "rank 2 was here" in text
    assert not isinstance(failure.value, AssertionError)
    assert small_pools.run(3, sum_of_ranks) == [(3, 1)] * 3


def test_a_failed_assertion_on_a_rank_is_one_here(small_pools):
    with pytest.raises(RankAssertion, match="something that went wrong"):
        small_pools.run(2, raise_on, 0, AssertionError)
    with pytest.raises(AssertionError):
        small_pools.run(1, raise_on, 0, AssertionError)


def test_a_message_of_a_failed_run_does_not_reach_the_next_one(small_pools):
    with pytest.raises(RankFailure):
        small_pools.run(2, leave_a_message_behind)
    assert small_pools.run(2, broadcast_seven) == [7, 7]


def test_a_deadlock_is_told_at_the_time_limit_with_every_stuck_stack(small_pools):
    small_pools.run(4, where_and_what)     # this module is imported there, which may take long
    start = time.monotonic()
    with pytest.raises(RankFailure, match="ranks 0, 1, 3: stuck\n.*\n.*group.all_reduce"):
        small_pools.run(4, skip_an_all_reduce, 2, timeout=0.5)
    assert time.monotonic() - start < 3
    assert small_pools.run(4, sum_of_ranks) == [(6, 1)] * 4


def test_a_rank_that_cannot_answer_is_told_and_ended():
    with Pool(2) as pool:
        pids = pool.run(2, process_id)
        with pytest.raises(RankFailure, match="holds the interpreter lock"):
            pool.run(1, sleep_in_native_code, timeout=0.2)
    assert_ended(pids)


@pytest.mark.parametrize("how, told", one_fast_of(2, [("SIGSEGV", "SIGSEGV"), ("exit", "exit status 3")]))
def test_a_rank_that_dies_is_told_with_its_end(small_pools, how, told):
    with pytest.raises(RankFailure, match=f"rank 1: died\n.*{told}(?s:.)*rank 0: stuck"):
        small_pools.run(2, die, how)
    assert small_pools.run(2, sum_of_ranks) == [(1, 1)] * 2


def test_what_cannot_be_run_is_refused(ranks):
    with pytest.raises(TypeError, match="top level"):
        ranks.run(2, lambda group: None)
    with pytest.raises(ValueError, match="9 ranks"):
        ranks.run(9, where_and_what)
    with pytest.raises(RankFailure, match="pickle"):
        ranks.run(1, give_a_lambda)


# --- resources

def test_communicators_that_are_freed_do_not_run_out(ranks):
    assert ranks.run(2, split_and_free, 2100) == [2, 2]       # MPI has about 2000


def assert_ended(pids):
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.02)


def test_a_closed_pool_leaves_no_process_and_can_run_again():
    pool = Pool(2)
    first = pool.run(2, process_id)
    assert pool.run(2, process_id) == first
    pool.close()
    assert_ended(first)
    second = pool.run(2, process_id)
    pool.close()
    assert_ended(second)
    assert not set(first) & set(second)


@pytest.mark.parametrize("end", one_fast_of(2, [signal.SIGKILL, signal.SIGINT]))
def test_ranks_do_not_outlive_their_caller_even_in_a_deadlock(end):
    program = textwrap.dedent("""
        from mpi_impl.launch.pool import Pool
        from tests import pool_functions
        pool = Pool(3)
        print(*pool.run(3, pool_functions.process_id), flush=True)
        pool.run(3, pool_functions.skip_an_all_reduce, 1)
    """)
    root = Path(__file__).parent.parent
    caller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True, cwd=root, preexec_fn=in_foreground)
    pids = caller.stdout.readline().split()
    time.sleep(0.2)
    caller.send_signal(end)
    caller.wait(5)
    caller.stdout.close()
    assert len(pids) == 3
    assert_ended(pids)
