"""The bug matrix: detectors tell what is known of some bugs, and the page says what the results say."""
import numpy as np
import pytest

from benchmarks.bug_matrix import page, results
from benchmarks.bug_matrix.detectors import DETECTORS, step_of_leaving
from benchmarks.bug_matrix.planted_bug import CleanRuns, PlantedBug
from benchmarks.bug_matrix.settings import setting_of
from benchmarks.bug_matrix.verdict import NOT_APPLICABLE, SEEN, SILENT
from tests import zoo
from tests.deep import one_fast_of
from tests.zoo.entry import Bug
from tests.zoo.unproved import UNPROVED

NAMES = [detector.name for detector in DETECTORS]
JUDGE = {detector.name: detector.judge for detector in DETECTORS}

# Bugs, the detectors that see them, and those that do not apply. All others must be silent.
KNOWN = {
    "f without its all-reduce": ({"loss curve", "gradient norm", "float theorem", "exact theorem", "prove", "verify",
                                  "compare", "ledger"}, set()),
    "the MLP's output bias a little too large": ({"exact theorem", "prove"}, set()),
    "caches kept until the end of the step": ({"float theorem", "exact theorem", "simulator", "memory"}, set()),
    "gradients summed before the last microbatch": ({"by itself", "float theorem", "exact theorem"},
                                                    set(NAMES[1:3] + NAMES[5:])),
    "padding not masked, in the textbook": ({"float theorem", "exact theorem"}, set(NAMES[:3] + NAMES[5:])),
}


@pytest.fixture(scope="module")
def clean(small_pools, tmp_path_factory):
    """Return runs without a bug: learning curves of few seeds, whose bands are wide.

    The text that they learn is of Python itself, another one in each of its versions.
    """
    return CleanRuns(small_pools, tmp_path_factory.mktemp("clean") / "runs.json", steps=60, seeds=(1, 2, 3))


@pytest.mark.parametrize("name", one_fast_of(len(KNOWN), KNOWN))
def test_detectors_tell_what_is_known(small_pools, clean, name):
    bug, (see, do_not_apply) = PlantedBug(zoo.BY_NAME[name], small_pools, clean), KNOWN[name]
    marks = {detector: judge(bug).mark for detector, judge in JUDGE.items()}
    assert marks == {detector: SEEN if detector in see else NOT_APPLICABLE if detector in do_not_apply else SILENT
                     for detector in NAMES}


@pytest.mark.deep
def test_a_change_that_is_no_bug_is_seen_by_nobody(small_pools, clean):
    """No detector cries wolf, and all are asked."""
    harmless = Bug("mpi_impl.comm.regions", "return self.group.all_reduce(dx, reason)",
                   "return 1 * self.group.all_reduce(dx, reason)")
    bug = PlantedBug(zoo.BY_NAME["f without its all-reduce"], small_pools, clean, harmless)
    assert {judge(bug).mark for judge in JUDGE.values()} == {SILENT}


@pytest.mark.parametrize("curve, step", [([0, 0, 0, 0], 0), ([3, 3, 3, 3], 1), ([0, 3, 0, -3], 4), ([3, 0, 3, 3], 3),
                                         ([3, 3, 3, 2], 0), ([0, 0, np.nan, np.nan], 3)])
def test_a_curve_is_seen_from_the_step_on_in_which_it_leaves_for_good(curve, step):
    assert step_of_leaving(np.array(curve), 0.0, np.ones(4)) == step


@pytest.mark.parametrize("name", [entry.name for entry in zoo.ENTRIES if entry.theorem.ranks])
def test_a_bugs_run_has_the_ranks_of_its_theorem(name):
    """And the run on one rank sees the same samples."""
    setting = setting_of(zoo.BY_NAME[name])
    assert setting.ranks == zoo.BY_NAME[name].theorem.ranks == setting.plan.parallel(
        setting.ranks, setting.case).world_size
    assert setting.on_one_rank.batch == setting.batch
    assert setting.loads is None or setting.loads[0].model == setting.case.model


def test_the_page_has_the_results():
    """Its figures are counted from the results file, by `python -m benchmarks.bug_matrix --write`."""
    assert page.PAGE.read_text() == page.text(results.read())


def test_exact_proofs_are_silent_only_for_a_reason():
    """About memory, or about the bugs that are listed with a reason each."""
    assert {entry.name for entry in page.silent_proofs(results.read()) if entry.kind != "memory"} == UNPROVED.keys()


def test_the_readme_counts_the_bugs_that_were_reported():
    found, readme = results.read(), (page.PAGE.parents[1] / "README.md").read_text()
    real = page.judged(found, page.is_reported)
    assert all(page.sees(found, entry, *page.NAMES) for entry in real)
    runs, said = [entry for entry in real if page.trained(found, entry)], " ".join(readme.split())
    reported = sum(not entry.source.startswith("after") for entry in real)
    assert (f"We planted {len(real)} bugs in our own code: {reported} were reported in other frameworks, and "
            f"{len(real) - reported} are like one that was.") in said
    assert (f"{len(runs)} can occur in a training run: the loss curve shows {page.count(found, runs, 'loss curve')} of "
            "these") in said
    assert f"a tool for your own runs, too, {page.count(found, runs, 'compare')}." in said
