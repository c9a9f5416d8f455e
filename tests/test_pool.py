"""The pool runs functions on real ranks, tells what went wrong there, and is ready for the next run."""
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from mpi_impl.pool import Pool, RankAssertion, RankFailure
from mpi_impl.rank_environment import THREAD_VARIABLES, cores


def where_and_what(group, *args):
    return group.rank, group.size, args


@given(n=st.integers(1, 8), numbers=st.lists(st.integers(), max_size=3))
def test_every_rank_gets_the_same_arguments_and_the_results_come_in_rank_order(ranks, n, numbers):
    assert ranks.run(n, where_and_what, numbers, "text") == [(rank, n, (numbers, "text")) for rank in range(n)]


def sum_of_ranks(group):
    return group.all_reduce(np.array([float(group.rank)]), "test")[0], group.ledger.calls(reason="test")


@given(n=st.integers(1, 8))
def test_the_group_is_made_of_those_ranks_and_its_ledger_is_new(ranks, n):
    assert ranks.run(n, sum_of_ranks) == [(n * (n - 1) / 2, 1)] * n


def test_a_run_costs_milliseconds(ranks):
    ranks.run(8, where_and_what)
    start = time.monotonic()
    for i in range(200):
        ranks.run(i % 8 + 1, where_and_what)
    assert time.monotonic() - start < 5     # 0.2 s on two idle cores


def speak(group):
    print(f"rank {group.rank} speaks")
    print("... and warns", file=sys.stderr)


def test_what_ranks_print_is_printed_in_rank_order(ranks, capsys):
    ranks.run(3, speak)
    assert capsys.readouterr().out == "".join(f"rank {i} speaks\n... and warns\n" for i in range(3))


def the_environment(group):
    return os.environ.get("OPENBLAS_NUM_THREADS"), os.environ.get("MPIR_CVAR_ENABLE_HEAVY_YIELD")


def test_ranks_have_one_blas_thread_each_and_yield_where_cores_are_scarce(ranks, monkeypatch):
    monkeypatch.delenv("MPIR_CVAR_ENABLE_HEAVY_YIELD", raising=False)
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    ranks.close()       # so that it starts anew, in this environment
    assert ranks.run(2, the_environment) == [("1", "1" if ranks.size > cores() else None)] * 2


# --- failures

def raise_on(group, culprit, kind):
    print(f"rank {group.rank} was here")
    if group.rank == culprit:
        raise kind("something that went wrong")
    return group.all_reduce(np.ones(1), "test")


def test_a_failing_rank_is_reported_with_its_traceback_and_the_stacks_of_those_that_wait(ranks):
    with pytest.raises(RankFailure) as failure:
        ranks.run(3, raise_on, 1, KeyError)
    text = str(failure.value)
    assert "rank 1: raised\nTraceback" in text and "KeyError: 'something that went wrong'" in text
    assert "ranks 0, 2" not in text, "they printed different things, so they are told apart"
    assert "rank 0: stuck" in text and "rank 2: stuck" in text and 'return group.all_reduce(np.ones(1), "test")' in text
    assert "rank 2 was here" in text
    assert not isinstance(failure.value, AssertionError)
    assert ranks.run(3, sum_of_ranks) == [(3, 1)] * 3


def test_a_failed_assertion_on_a_rank_is_one_here(ranks):
    with pytest.raises(RankAssertion, match="something that went wrong"):
        ranks.run(2, raise_on, 0, AssertionError)
    with pytest.raises(AssertionError):
        ranks.run(1, raise_on, 0, AssertionError)


def test_ranks_with_the_same_story_share_it(ranks):
    with pytest.raises(RankFailure, match=r"ranks 0, 1, 2: raised(?s:.)*ZeroDivisionError") as failure:
        ranks.run(3, divide_by_zero)
    assert str(failure.value).count("ZeroDivisionError") == 1


def divide_by_zero(group):
    return 1 // 0


def leave_a_message_behind(group):
    """Rank 0 has broadcast, and is gone, before rank 1 fails to receive."""
    if group.rank == 1:
        time.sleep(0.1)
        raise ValueError
    group.broadcast(np.array([666.0]), "test")


def broadcast_seven(group):
    return group.broadcast(np.array([7.0 if group.rank == 0 else 0.0]), "test")[0]


def test_a_message_of_a_failed_run_does_not_reach_the_next_one(ranks):
    with pytest.raises(RankFailure):
        ranks.run(2, leave_a_message_behind)
    assert ranks.run(2, broadcast_seven) == [7, 7]


def skip_an_all_reduce(group, idler):
    if group.rank != idler:
        group.all_reduce(np.ones(4), "test")


def test_a_deadlock_is_told_at_the_time_limit_with_every_stuck_stack(ranks):
    ranks.run(4, where_and_what)     # this module is imported there, which may take long
    start = time.monotonic()
    with pytest.raises(RankFailure, match="ranks 0, 1, 3: stuck\n.*\n.*group.all_reduce"):
        ranks.run(4, skip_an_all_reduce, 2, timeout=0.5)
    assert time.monotonic() - start < 3
    assert ranks.run(4, sum_of_ranks) == [(6, 1)] * 4


def sleep_in_native_code(group):
    ctypes.PyDLL(None).sleep(60)


def test_a_rank_that_cannot_answer_is_told_and_ended():
    with Pool(2) as pool:
        pids = pool.run(2, process_id)
        with pytest.raises(RankFailure, match="holds the interpreter lock"):
            pool.run(1, sleep_in_native_code, timeout=0.2)
    assert_ended(pids)


def die(group, how):
    if group.rank == 1:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), getattr(signal, how))
    group.all_reduce(np.ones(1), "test")


@pytest.mark.parametrize("how, told", [("exit", "exit status 3"), ("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV")])
def test_a_rank_that_dies_is_told_with_its_end(ranks, how, told):
    with pytest.raises(RankFailure, match=f"rank 1: died\n.*{told}(?s:.)*rank 0: stuck"):
        ranks.run(2, die, how)
    assert ranks.run(2, sum_of_ranks) == [(1, 1)] * 2


def fail_from(group, n, limit):
    assert group.size < n or limit < 17, "too large"


def test_hypothesis_shrinks_a_failing_rank_to_the_smallest_example(ranks):
    def fails(example):
        try:
            ranks.run(example[0], fail_from, 3, example[1])
        except AssertionError:
            return True
        return False

    examples = st.tuples(st.integers(1, 8), st.integers(0, 1000))
    quick = settings(max_examples=200, database=None, phases=[Phase.generate, Phase.shrink])
    assert find(examples, fails, settings=quick) == (3, 17)


# --- what cannot be run

def test_a_function_that_the_ranks_cannot_import_is_refused(ranks):
    with pytest.raises(TypeError, match="must stand at the top level of a module"):
        ranks.run(2, lambda group: None)


def test_more_ranks_than_the_pool_has_are_refused(ranks):
    with pytest.raises(ValueError, match="9 ranks was asked of a pool of 8"):
        ranks.run(9, where_and_what)


def give_a_lambda(group):
    return lambda: None


def test_a_result_that_cannot_travel_is_a_failure(ranks):
    with pytest.raises(RankFailure, match="pickle"):
        ranks.run(1, give_a_lambda)


# --- resources

def split_and_free(group):
    pair = group.part(group.rank // 2, "pair")
    size = pair.size
    pair.free()
    return size


def test_communicators_that_are_freed_do_not_run_out(ranks):
    for _ in range(3000):       # MPI has about 2000
        assert ranks.run(2, split_and_free) == [2, 2]


def process_id(group):
    return os.getpid()


def assert_ended(pids):
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.02)


def test_a_closed_pool_leaves_no_process_and_can_run_again():
    pool = Pool(3)
    first = pool.run(3, process_id)
    assert pool.run(3, process_id) == first
    pool.close()
    assert_ended(first)
    second = pool.run(3, process_id)
    pool.close()
    assert_ended(second)
    assert not set(first) & set(second)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_do_not_outlive_their_caller_even_in_a_deadlock(end):
    program = textwrap.dedent("""
        from mpi_impl.pool import Pool
        from tests import test_pool
        pool = Pool(3)
        print(*pool.run(3, test_pool.process_id), flush=True)
        pool.run(3, test_pool.skip_an_all_reduce, 1)
    """)
    root = Path(__file__).parent.parent
    caller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True, cwd=root)
    pids = caller.stdout.readline().split()
    time.sleep(0.2)
    caller.send_signal(end)
    caller.wait(5)
    caller.stdout.close()
    assert len(pids) == 3
    assert_ended(pids)
