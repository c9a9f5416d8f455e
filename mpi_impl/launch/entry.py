"""The start of a program of ranks and, above all, its end: on all ranks, within seconds, and with one message.

Without this module, a rank that fails waits in MPI's shutdown for ranks that wait for it. So every program ends with

    if __name__ == "__main__":
        run(main)

and `run` ends the job when one rank ends for any reason, with a non-zero status unless all ranks agree:

    main                                 is reported once, by                            exit status
    raised a UserError                   its sentence                                    2
    ran out of memory or disk            which rank, and what to do, in a sentence       1
    raised anything else                 the traceback, and which rank it came from      1
    called sys.exit on every rank        nothing (or the text handed to sys.exit)        as asked for
    called sys.exit on some ranks only   which rank left, while others were at work      as asked for, 1 if that is 0
    called os._exit                      which rank left                                 as asked for, 1 if that is 0
    was interrupted (Ctrl-C)             a short line                                    130
    waits too long for other ranks       a sentence of `run`, or of mpi_impl.launch      1, or a signal's

`run` refuses a program that cannot print, or whose folder is gone, before it does any work.
"""
import argparse
import difflib
import errno
import io
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from mpi_impl.launch import begin
from mpi_impl.launch.lifelines import lifeline
from mpi_impl.runtime import interrupt
from mpi_impl.runtime.mpis import implementation
from mpi_impl.runtime.rank_environment import (environment_count, forget_shared_memory, is_first_rank,
                                               keep_freed_memory, launched_rank_and_size)
from reference.errors import UserError
from reference.options import OptionParser

ASKED_SIZE = "SHARDLAB_WORLD_SIZE"  # where mpi_impl.launch tells the ranks how many it was asked for
TYPED = "SHARDLAB_COMMAND"          # where `shardlab` tells a program by which words its user knows it
PATIENCE = 1.0                      # seconds: ranks that end for the same reason come to their end within this time
LAST_RESORT = 10                    # seconds after which a rank is ended by the system, if MPI has not ended it
SECONDS_TO_MEET = 300               # that a rank waits for the others while the job comes up, and when it fails
LONGEST_WORD, LONGEST_TEXT = 300, 20_000    # characters of a message
MOST_DIGITS = 15                    # of an option's integer: floating-point numbers, which formulas use, hold as many

# Errors of files that the machine or a name causes, and no bug: full, over quota, over `ulimit -f`, failing, read-only,
# not permitted, too long.
MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.ENAMETOOLONG}


def run(main: Callable[[], object]) -> None:
    """Run `main` on this rank; end the whole job if it ends in any other way than by returning."""
    if not {"-h", "--help"}.isdisjoint(sys.argv):
        return run_alone(main)      # without MPI, which takes longer than to print this
    os.environ["MPLBACKEND"] = "agg"    # pictures are files; a backend that does not exist would fail after the work
    leave_within(SECONDS_TO_MEET + LAST_RESORT)     # while MPI starts, and holds Python's lock, nothing else can
    patience = threading.Timer(SECONDS_TO_MEET, give_up_meeting)
    patience.daemon = True
    patience.start()
    # This starts MPI, which only a program should do, not an import of the parser below.
    from mpi_impl.comm.group import world as make_world
    from mpi_impl.comm.mpi_library import library

    keep_freed_memory()
    print_by_lines()
    world = make_world()
    if world.size > 1:
        watch_os_exit(f"rank {world.rank} of {world.size}")
    try:
        check_world_size(world.size, library())
        world.hosts()  # every rank is there, with all that it shares
        patience.cancel()
        signal.alarm(0)
        forget_shared_memory()
        check_surroundings()
        with lifeline():
            main()
    except KeyboardInterrupt:
        time.sleep(0 if is_first_rank() else 0.5)  # all ranks are interrupted: let the first one say so
        end_all("Interrupted.", 130)
    except BaseException as error:      # a SystemExit, and what libraries in Rust raise when they panic
        end_together(error, world)
        end_all(last_words(error, f"rank {world.rank} of {world.size}"), exit_status(error))


def run_alone(main: Callable[[], object]) -> None:
    """Run the `main` of a program of one process, without MPI: a UserError ends it with its sentence and status 2."""
    os.environ["MPLBACKEND"] = "agg"
    try:
        interrupt.ready()
        check_surroundings()
        try:
            main()
        finally:
            sys.stdout.flush()      # now, while a failure can still be told
    except UserError as error:
        say(f"error: {error}" if is_first_rank() else "")
        sys.exit(2)
    except KeyboardInterrupt:
        say("Interrupted.")
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has left, as `head` does
        drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in MACHINE_ERRORS:
            raise
        say(last_words(error, "the program"))
        sys.exit(1)


def drop_output() -> None:
    """Discard what Python still has to print at its end, since nobody reads it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def output_failure() -> str:
    """Print an empty line, and return why that fails, or "". If it does, discard what is not printed yet."""
    try:
        print(flush=True)
    except OSError as error:
        drop_output()
        return error.strerror or ""
    return ""


def check_surroundings() -> None:
    """Refuse to work where nothing can be printed, or no file can be found: that would fail after the work."""
    if sys.stdout is None:      # Python found it closed
        raise UserError("Standard output is closed, so that nothing can be printed. Leave it open, or send it to "
                        "/dev/null.")
    try:
        os.getcwd()
    except OSError as error:
        raise UserError("The folder in which this was started has been removed. Change to one that exists, and start "
                        "it again.") from error


def leave_within(seconds: float) -> None:
    """Let the system end this rank if it is still there then: MPI's start and shutdown have no time limit."""
    signal.alarm(math.ceil(seconds))


def print_by_lines() -> None:
    """Let each printed line leave immediately and in one piece, though stdout is a pipe to the launcher."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # and not what a test or a notebook put in its place
        # Even if PYTHONUNBUFFERED is set. A letter that the terminal lacks is no reason to end.
        sys.stdout.reconfigure(line_buffering=True, write_through=False, errors="replace")


def watch_os_exit(where: str) -> None:
    """Let `os._exit` end the whole job: it skips MPI's shutdown, and a launcher may take that for a success."""
    leave, this_process = os._exit, os.getpid()

    def os_exit(status: int) -> NoReturn:
        if os.getpid() == this_process:  # a child of it may leave like this
            end_all(f"error: {where} left the program by os._exit({status}).", begin.status_byte(status))
        leave(status)

    os._exit = os_exit


def check_world_size(size: int, library: str) -> None:
    """Refuse a world of another size than was asked for, or than the launcher says it started."""
    launched = launched_rank_and_size()
    asked = environment_count(ASKED_SIZE, launched[1] if launched else size)
    if asked == size:
        return
    if not is_first_rank():  # these may be worlds of their own, which cannot elect a speaker
        time.sleep(PATIENCE / 2)
        sys.exit(2)
    found = f"the world has {size}." if size > 1 else (
        f"each rank is a world of its own: they were started by another MPI's launcher than mpi4py's {library}.")
    advice = f"Start the job with `python -m mpi_impl.launch -n {asked}`, which finds the right launcher."
    if size == 1 and "SLURM_PROCID" in os.environ:
        advice = ("Or by an srun that introduces them in another way: this MPI needs "
                  f"`srun --mpi={implementation(library).srun}`; SLURM_MPI_TYPE is "
                  f"{os.environ.get('SLURM_MPI_TYPE', 'not set')}. {advice}")
    raise UserError(f"{asked} ranks were asked for, but {found} {advice}")


def end_all(words: str, status: int) -> NoReturn:
    """Say this and end every rank, whatever it is doing. The status is not 0, since no rank agreed to it."""
    from mpi_impl.comm import group, mpi_library

    say(words)
    begin.claim(begin.FAILED, str(status or 1))
    if group.world().size > 1:
        time.sleep(0.2)  # a launcher may lose what was written just before
        mpi_library.abort(status or 1)
    sys.exit(status or 1)


def end_waiting(waited: str) -> None:
    """End all ranks, while another thread is stuck in MPI. Of ranks that fail together, one speaks."""
    from mpi_impl.comm import group, speaker

    signal.alarm(LAST_RESORT)  # nothing handles it, so it ends this rank, and the launcher then ends the others
    world = group.world()
    if speaker.elect_speaker(world, 0.5):
        end_all(f"error: rank {world.rank} of {world.size} has waited {waited}", 1)
    time.sleep(2 * LAST_RESORT)


def give_up(waited: str) -> None:
    """End the job, from the thread that watches over a rank's waits."""
    end_waiting(f"for {waited}, which is as long as --distributed-timeout-minutes allows. The rank that it waits for "
                "has stopped, is too busy, is on a host that cannot be reached, or waits for such a rank in turn: look "
                "there, or raise the limit.")


def give_up_meeting() -> None:
    """End the job, from a thread, since this rank is up and others are not."""
    end_waiting(f"{SECONDS_TO_MEET:g} seconds for all ranks to come up. One of them has stopped, or is on a host that "
                "cannot be reached: look there.")


def end_together(error: BaseException, world) -> None:
    """Let the first rank that failed speak, and end, if all ranks have reached their end. Return if others work."""
    from mpi_impl.comm import heartbeats, speaker

    try:
        if not speaker.barrier_with_timeout(world, PATIENCE):
            return
        leave_within(SECONDS_TO_MEET)
        heartbeats.drain_heartbeats(world)
        status = exit_status(error)
        says_why = first_failure(status, world)
    except Exception:  # MPI itself has failed
        return
    if world.rank == says_why:
        on_purpose = isinstance(error, UserError | SystemExit)
        say(last_words(error, "" if on_purpose else f"rank {world.rank} of {world.size}"))
    if status:
        begin.claim(begin.FAILED, str(status))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)       # srun sends it to the rest when one rank has failed
    sys.exit(status)


def first_failure(status: int, world) -> int:
    """Return the lowest rank whose exit status is not zero, or rank 0 if all are zero."""
    import numpy as np

    failed = np.array([world.size - world.rank if status else 0])
    return (world.size - int(world.all_reduce(failed, "the speaker at the end", op="max")[0])) % world.size


def exit_status(error: BaseException) -> int:
    """Return the status with which the job ends."""
    return 2 if isinstance(error, UserError) else begin.status_of(error)


def last_words(error: BaseException, where: str) -> str:
    """Return the message at the end of a job. `where` names the rank, if that matters; the sentence comes last."""
    if isinstance(error, UserError):
        return f"error on {where}: {error}" if where else f"error: {error}"
    if isinstance(error, SystemExit):
        text = error.code if isinstance(error.code, str) else ""
        left = f"error: {where} left the program by sys.exit({error.code!r}) while other ranks were at work."
        return left if where else text
    if isinstance(error, MemoryError):
        detail = f" ({error})" if str(error) else ""
        return f"error: {where} ran out of memory{detail}. Choose smaller sizes, or more ranks."
    if isinstance(error, BrokenPipeError):
        drop_output()
        return f"error: {where} cannot print: the reader of its output has left. Send it to a file, and read that."
    if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
        if not error.filename and output_failure():
            return f"error: {where} cannot print: {error.strerror}. Send its output where there is room."
        file = f" with the file {error.filename}" if error.filename else ""
        return (f"error: {where} failed{file}: {error.strerror}. Check its name, that there is room, also by "
                "`ulimit -f`, and that you may use it.")
    return f"{traceback.format_exc()}error: {where} failed with the traceback above; the job has been ended."


def say(text: str) -> None:
    """Write to stderr in one piece, so that the ranks' lines do not mix; long values are shortened."""
    if sys.stdout:
        sys.stdout.flush()
    if text and sys.stderr:     # either may be closed
        sys.stderr.write(f"{shorten(text)}\n")
        sys.stderr.flush()


def shorten(text: str) -> str:
    """Shorten words, and then the text, that are too long to read: 'xxxxx... (100,000 characters)'."""
    text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: (
        f"{word[0][:LONGEST_WORD // 2]}... ({len(word[0]):,} characters)"), text)
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} characters left out) ... {text[-half:]}"


class ArgumentParser(OptionParser):
    """A parser for programs of ranks: it raises a UserError, which `run` prints once, and shows --help once.

    Options must be written out, since an abbreviation may mean another option tomorrow. Numbers are finite: `int` and
    `float` as an option's type mean the two functions below. Messages call a program what its user typed, if `shardlab`
    has started it.
    """

    def __init__(self, prog: str = "", **settings):
        typed = os.environ.get(TYPED, prog)
        super().__init__(prog=prog if " " in prog else typed, allow_abbrev=False, **settings)
        self.register("type", int, short_integer)
        self.register("type", float, finite_float)

    def parse_args(self, args=None, namespace=None):
        """Parse the options. Raises UserError for unknown ones, and says what to do about each of them."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            from mpi_impl.launch.megatron_options import advice  # on a mistake alone

            given = [shorten(word.split("=")[0]) for word in unknown]
            names = list(dict.fromkeys(name for name in given if name.startswith("--"))) or given[:1]
            raise UserError(f"{self.prog} has no option {', '.join(names)}. "
                            f"{advice(names, self._option_string_actions)}")
        return options

    def _check_value(self, action, value) -> None:
        """Check a choice as argparse does, and name the closest one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if not (close := difflib.get_close_matches(shorten(str(value)), map(str, action.choices), n=1)):
                raise
            raise UserError(f"{self.prog} cannot use its options: {error}. Did you mean {close[0]}?") from error

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog} cannot use its options: {message}. Run it with --help to see every option.")

    def print_help(self, file=None) -> None:
        """Print it on one rank. Raises OSError if that fails, over which argparse's own passes in silence."""
        if is_first_rank():
            print(self.format_help(), end="", file=file)


def short_integer(text: str) -> int:
    """Parse an option's integer. No size, count or seed needs more digits, and with more some formulas would fail."""
    if sum(map(str.isdigit, text)) > MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"{text[:40]} has more than {MOST_DIGITS} digits, which no option takes")
    return int(text)


def finite_float(text: str) -> float:
    """Parse an option's number. Infinity and NaN would pass some comparisons, and spoil all results."""
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a finite number")
    return number
