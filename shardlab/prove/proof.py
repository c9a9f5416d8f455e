"""Proofs of a run, each with fresh random numbers: what is played where, what is compared, and what is said."""
import time
from collections.abc import Iterable
from dataclasses import replace
from math import log10
from typing import NamedTuple

from mpi_impl.comm.group import Group
from mpi_impl.comm.topology import connect, disconnect, place
from mpi_impl.runtime.tables import count
from reference.config import ParallelConfig
from reference.config.description import describe
from reference.errors import UserError
from reference.exact.degree import TALLY, Tally, power_of_ten
from shardlab.compare.completeness import check_whole
from shardlab.compare.recording import Recording, RunFacts, in_memory
from shardlab.programs.options import NAMES
from shardlab.programs.program import Program
from shardlab.programs.settings import PretrainingSettings
from shardlab.prove.comparison import Comparison, OtherFormula, Parts, PlayedRun, compare_formulas
from shardlab.prove.runs import STEPS, play_in_textbook, play_on_ranks
from shardlab.prove.sizes import ProofSizes, shrink

TEXTBOOK, ALONE = "the textbook", "one rank alone"
DRAWS = 3           # of fresh numbers, while a divisor is 0
QUIET = 4.0         # seconds until the program says what it is doing


class Proof(NamedTuple):
    """The result of one proof, on every rank."""

    comparison: Comparison
    chance: float           # of error, as a power of ten


class Proving(Program):
    """One rank's part of the proofs of a run."""

    def __init__(self, settings: PretrainingSettings, ignored: list[str], ranks: Group):
        super().__init__(settings.args, ranks)
        self.settings, self.ignored, self.sizes = settings, ignored, shrink(settings)
        self.quiet_since = time.perf_counter()

    def work(self) -> None:
        """Prove, and say so; or say what differs, and end all ranks with status 1."""
        name = NAMES[self.settings.architecture]
        self.say(f"proving with a small model: {self.sizes.describe(name)}")
        if self.ignored:
            self.say(f"without effect on a proof: {', '.join(self.ignored)}")
        proofs, seed = list[Proof](), self.args.seed
        for _ in range(self.args.proofs):
            proof, seed = self.prove_with_fresh_numbers(seed)
            proofs.append(proof)
            if proof.comparison.found:
                self.say(describe_difference(proof.comparison, self.sizes.parallel))
                raise SystemExit(1)
            if self.args.proofs > 1:
                self.say(f"proof {len(proofs)} of {self.args.proofs}: the same formulas; chance of error below "
                         f"{power_of_ten(proof.chance)}")
        self.say(statement(proofs, self.sizes.parallel))

    def prove_with_fresh_numbers(self, seed: int) -> tuple[Proof, int]:
        """Return a proof with the numbers of this seed, or of one that follows; and the seed for the next proof.

        Raises UserError if a divisor is 0 whatever the numbers are.
        """
        for draw in range(seed, seed + DRAWS):
            proof = prove(self.world, self.sizes, draw, self.progress)
            if proof is not None:
                return proof, draw + 1
            self.say("a divisor was 0 modulo the prime: the proof begins again, with other numbers")
        raise UserError(f"A divisor was 0 in {DRAWS} draws of random numbers, which chance does not explain: a formula "
                        "of the model divides by 0, whatever its inputs are.")

    def progress(self, text: str) -> None:
        """Say what has been done, if nothing has been said for a few seconds."""
        now = time.perf_counter()
        if now - self.quiet_since > QUIET:
            self.quiet_since = now
            self.say(f"... {text}")


# ---- one proof ------------------------------------------------------------------------------------------------------


def prove(world: Group, sizes: ProofSizes, seed: int, progress=lambda text: None) -> Proof | None:
    """Play the run and compare it, with numbers of this seed; return None if a divisor was 0. All ranks call this."""
    TALLY.begin(counts_zero_divisors=True)
    try:
        runs = play_all(world, sizes, seed, progress)
        tallies = world.allgather_objects((TALLY.evaluations, TALLY.degree, TALLY.zero_divisors))
    finally:
        TALLY.counts_zero_divisors = False
    evaluations, degrees, zero_divisors = zip(*tallies)
    if any(zero_divisors):
        return None
    chance = Tally(sum(evaluations), max(degrees)).chance_of_error()
    return Proof(world.broadcast_object(lambda: compare_all(runs, sizes, seed)), log10(min(1.0, chance)))


def play_all(world: Group, sizes: ProofSizes, seed: int, progress) -> list[PlayedRun]:
    """Play the run on all ranks, on the last one alone, and on the first one in the textbook; return them there."""
    parallel = ParallelConfig(whole_matrices=sizes.parallel.whole_matrices)
    alone = replace(sizes, parallel=parallel, micro_batch_size=sizes.global_batch_size, microbatches=1)
    on_ranks = PlayedRun(count(world.size, "rank"), play(world, sizes, seed, progress))
    last = world.size - 1
    one = world.split(int(world.rank == last), "one process")
    try:
        def in_one_process() -> tuple[Parts, Parts]:
            textbook = gathered(play_in_textbook(sizes, seed), f"in {TEXTBOOK}", progress) if world.rank == 0 else []
            return textbook, play(one, alone, seed, progress) if world.rank == last else []

        found = world.gather_objects(lambda: (*in_one_process(), on_ranks.parts))
    finally:
        one.free()
    textbook, alone_parts, parts = ([part for of_rank in one for part in of_rank] for one in zip(*found)) \
        if found else ([], [], [])
    return [PlayedRun(TEXTBOOK, textbook), PlayedRun(ALONE, alone_parts), on_ranks._replace(parts=parts)]


def play(group: Group, sizes: ProofSizes, seed: int, progress) -> Parts:
    """Play a run on the ranks of a group; return this rank's parts."""
    topology = connect(group, sizes.parallel)
    try:
        return gathered(play_on_ranks(sizes, topology, seed), f"on {count(group.size, 'rank')}", progress)
    finally:
        disconnect(topology)


def gathered(steps: Iterable[Parts], where: str, progress) -> Parts:
    """Return the parts of all steps, the initial weights before them, and say how far it is."""
    parts = []
    for step, found in enumerate(steps):
        parts += found
        progress(f"step {step} of {STEPS} is played {where}")
    return parts


def compare_all(runs: list[PlayedRun], sizes: ProofSizes, seed: int) -> Comparison:
    """Compare the runs, on the first rank. Raise UserError for a tensor that some ranks should have computed."""
    result = compare_formulas(runs)
    if result.found is None:
        _, one, ranks = runs
        check_whole(recording(one, sizes, ParallelConfig(), seed), recording(ranks, sizes, sizes.parallel, seed),
                    ("The run on one rank", f"The run on {ranks.name}"),
                    "it is never computed there, so nothing is proved.")
    return result


def recording(run: PlayedRun, sizes: ProofSizes, parallel: ParallelConfig, seed: int) -> Recording:
    about = RunFacts(sizes.model, sizes.optimizer, seed, sizes.global_batch_size, sizes.seq_length, "float64", parallel)
    return in_memory(about, run.parts)


# ---- what is said ---------------------------------------------------------------------------------------------------


def statement(proofs: list[Proof], parallel: ParallelConfig) -> str:
    """State what was proved, and the chance that it is wrong all the same."""
    one = proofs[0].comparison
    times = f", in each of {len(proofs)} proofs with fresh numbers" if len(proofs) > 1 else ""
    product = " (the product of theirs)" if times else ""
    return (f"proved: {one.compared:,} tensors of {STEPS} steps are the same formulas on "
            f"{count(parallel.world_size, 'rank')} ({describe(parallel)}) as in one process, and "
            f"{one.in_first:,} of them as in the textbook{times}; chance of error below "
            f"{power_of_ten(sum(proof.chance for proof in proofs))}{product}")


def describe_difference(comparison: Comparison, parallel: ParallelConfig) -> str:
    """Describe the first tensor that is another formula: its name, its rank, its place."""
    one = comparison.found
    assert one is not None
    before = (f"The tensors before it are the same formulas, the last of them is {comparison.last}."
              if comparison.last else "It is the first tensor of all.")
    return (f"not proved: {one.key} is another formula {where(one, parallel)} than {named(one.expected)}, first at "
            f"{list(one.at)} of {list(one.shape)}, and in {one.others:,} of {one.holder.values.size:,} elements there. "
            f"{before}")


def where(one: OtherFormula, parallel: ParallelConfig) -> str:
    """Say who has another formula."""
    if one.holder.run in (TEXTBOOK, ALONE):
        return named(one.holder.run)
    if len(one.holder.ranks) > 1:
        return f"in the sum over ranks {', '.join(map(str, one.holder.ranks))}"
    rank, = one.holder.ranks
    at = place(rank, parallel)
    context = f", context {at.context}" if parallel.context_parallel_size > 1 else ""
    return f"on rank {rank} (tensor {at.tensor}{context}, data {at.data}, pipeline {at.pipeline})"


def named(run: str) -> str:
    return f"in {run}" if run == TEXTBOOK else f"on {run}"
