"""The page docs/bug_zoo.md and its picture, from the results."""
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmarks.bug_matrix.detectors import DETECTORS
from benchmarks.bug_matrix.picture import draw
from benchmarks.bug_matrix.verdict import NOT_APPLICABLE, SEEN, SILENT, Verdict, not_applicable
from benchmarks.programs import head, row
from tests import zoo
from tests.zoo.entry import BELOW_ROUNDING, KINDS, Entry
from tests.zoo.first_wrong import FOUND
from tests.zoo.unproved import UNPROVED

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs" / "bug_zoo.md", ROOT / "docs" / "bug_zoo.png"
NAMES = [detector.name for detector in DETECTORS]
WATCHED = ("by itself", "loss curve", "gradient norm")      # what one sees without this project's tools
PROOFS = ("exact theorem", "prove")
LETTERS = dict(zip(NAMES, "ELGFXPVCTSM", strict=True))
UNKNOWN = not_applicable("not judged yet")
Results = Mapping[str, Mapping[str, Verdict]]



def write(results: Results) -> None:
    """Write the page and the picture."""
    PAGE.write_text(text(results))
    draw(results, NAMES).savefig(PICTURE, dpi=150)


def text(results: Results) -> str:
    """Return the page."""
    bugs = [bugs_table(kind, results) for kind in KINDS]
    return "\n\n".join([HEAD, sentences(results), HOW, detectors_table(results), PICTURE_TEXT, kinds_table(results),
                        right_names(results), *blind_spots(results), TABLE_HEAD, *bugs]) + "\n"


# ---- counts ---------------------------------------------------------------------------------------------------------


def judged(results: Results, where: Callable[[Entry], bool] = lambda entry: True) -> list[Entry]:
    """Return the entries that all detectors have judged."""
    return [entry for entry in zoo.ENTRIES if where(entry) and results.get(entry.name, {}).keys() >= set(NAMES)]


def is_reported(entry: Entry) -> bool:
    """Report whether a mistake, or a similar one, has been reported in some repository."""
    return entry.source != "classic"


def sees(results: Results, entry: Entry, *names: str) -> bool:
    """Report whether any of these detectors sees the bug."""
    return any(results[entry.name][name].mark == SEEN for name in names)


def trained(results: Results, entry: Entry) -> bool:
    """Report whether a training run comes across the bug."""
    return results[entry.name]["by itself"].mark != NOT_APPLICABLE


def count(results: Results, entries: Iterable[Entry], *names: str) -> int:
    return sum(sees(results, entry, *names) for entry in entries)


def sentences(results: Results) -> str:
    """Return the sentences that matter."""
    real = judged(results, is_reported)
    run = [entry for entry in real if trained(results, entry)]
    below = judged(results, lambda entry: entry.kind == BELOW_ROUNDING)
    silent = [entry for entry in run if not sees(results, entry, *WATCHED)]
    missing = len(zoo.ENTRIES) - len(judged(results))
    so_far = f" ({missing} of the zoo's {len(zoo.ENTRIES)} bugs have not been judged yet.)" if missing else ""
    return (f"**Of {len(real)} bugs that follow a reported one, a training run comes across {len(run)}: "
            f"{count(results, run, 'by itself')} end it with an error or hang, {count(results, run, 'loss curve')} "
            f"show in the loss curve within 200 steps, and {len(silent)} show neither there nor in the gradient's "
            f"norm. The float theorems see {count(results, real, 'float theorem')} of the {len(real)}, and exact "
            f"proofs {count(results, real, *PROOFS)}; `compare` sees {count(results, run, 'compare')} of the "
            f"{len(run)} and `--verify` {count(results, run, 'verify')}; all together "
            f"{count(results, real, *NAMES)}.** Of {len(below)} bugs below the rounding of floats, exact proofs see "
            f"{count(results, below, *PROOFS)}, and all others together "
            f"{count(results, below, *(name for name in NAMES if name not in PROOFS))}.{so_far}")


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(*rows: Iterable[object]) -> str:
    return "\n".join([head(*rows[0]), *(row(*cells) for cells in rows[1:])])


def detectors_table(results: Results) -> str:
    """Return the counts of each detector over all bugs."""
    rows = []
    for detector in DETECTORS:
        marks = [results[entry.name][detector.name].mark for entry in judged(results)]
        rows.append([LETTERS[detector.name], detector.name, detector.what,
                     *map(marks.count, (SEEN, SILENT, NOT_APPLICABLE))])
    return table(("", "detector", "what it checks", "seen", "silent", "not applicable"), *rows)


def kinds_table(results: Results) -> str:
    """Return, for each kind of bug and each detector, how many it sees of those to which it applies."""
    rows = []
    for kind in KINDS:
        entries = judged(results, lambda entry, kind=kind: entry.kind == kind)
        row = [kind, len(entries)]
        for name in NAMES:
            applies = [entry for entry in entries if results[entry.name][name].mark != NOT_APPLICABLE]
            row.append(f"{count(results, applies, name)}/{len(applies)}" if applies else "-")
        rows.append(row)
    return table(("kind", "bugs", *NAMES), *rows)


def blind_spots(results: Results) -> list[str]:
    """Return the paragraphs about what few see, or nobody."""
    entries = judged(results)
    nobody = [entry for entry in entries if not sees(results, entry, *NAMES)]
    unnoticed = [entry for entry in entries if trained(results, entry) and not sees(results, entry, *WATCHED)
                 and entry.kind != BELOW_ROUNDING]
    alone = [entry for entry in entries if [name for name in NAMES if sees(results, entry, name)] == ["float theorem"]]
    unproved = "; ".join(f"{entry.name} ({UNPROVED[entry.name]})" for entry in silent_proofs(results)
                         if entry.kind != "memory")
    return ["**Nobody sees** " + named(nobody) if nobody else "**There is none that nobody sees.**",
            f"**No error, no loss, no norm** tells of {len(unnoticed)}, nor of any below rounding: {named(unnoticed)}",
            f"**Only the entry's own theorem, in floats, sees** {named(alone)}",
            f"**Exact proofs are silent** about memory, where no formula changes, and about these: {unproved}."]


def silent_proofs(results: Results) -> list[Entry]:
    """Return the entries to which an exact proof applies, but that none sees."""
    return [entry for entry in judged(results) if not sees(results, entry, *PROOFS)
            and any(results[entry.name][name].mark == SILENT for name in PROOFS)]


def right_names(results: Results) -> str:
    """Return the sentence about the tensors that compare names first. Layers may have other numbers than in the tests.
    """
    known = {name: without_layers(tensor) for name, tensor in FOUND.items()
             if results.get(name, {}).get("compare", UNKNOWN).mark == SEEN}
    right = sum(without_layers(results[name]["compare"].says) == tensor for name, tensor in known.items())
    return (f"`compare` also says where: of {len(known)} bugs that it sees and whose first wrong tensor "
            f"[its tests](../tests/mpi_impl/test_compare.py) know, it names that tensor for {right}. Five "
            "of them [can be watched](two_runs.md), each beside the same run without the bug.")


def without_layers(tensor: str) -> str:
    return re.sub(r"blocks\.\d+", "blocks", tensor)


def named(entries: list[Entry]) -> str:
    return ("; ".join(entry.name for entry in entries) or "none") + "."


def bugs_table(kind: str, results: Results) -> str:
    """Return the table of one kind, folded."""
    rows = []
    for entry in judged(results, lambda entry: entry.kind == kind):
        rows.append([f"[{entry.name}]({place_of(entry)})", source(entry), module(entry), theorem(entry),
                     *(cell(results[entry.name][name]) for name in NAMES)])
    bugs = table(("bug", "source", "planted in", "theorem", *LETTERS.values()), *rows)
    return f"<details><summary>{kind.capitalize()}: {len(rows)} bugs</summary>\n\n{bugs}\n\n</details>"


def cell(verdict: Verdict) -> str:
    return {SEEN: str(verdict.step or "x"), SILENT: "-", NOT_APPLICABLE: ""}[verdict.mark]


def place_of(entry: Entry) -> str:
    """Return the path of the file of the zoo that has the entry, and its line."""
    subject = next(subject for subject in zoo.SUBJECTS if entry in subject.ENTRIES)
    lines = inspect.getsource(subject).splitlines()
    line = next(i for i, text in enumerate(lines, 1) if f'Entry("{entry.name}"' in text)
    return f"../tests/zoo/{subject.__name__.rsplit('.', 1)[1]}.py#L{line}"


def module(entry: Entry) -> str:
    """Return the module in which the bug is planted, linked to its file."""
    return f"[{entry.bug.module.split('.', 1)[1]}](../{entry.bug.file})"


def source(entry: Entry) -> str:
    """Return the source, linked to its thread."""
    found = re.fullmatch(r"(after )?([\w.-]+/[\w.-]+) (?:#(\d+)|(mutation \d+)|commit (\w+))", entry.source)
    if not found:
        return entry.source
    after, repository, number, mutation, commit = found.groups()
    page = f"/issues/{number}" if number else f"/commit/{commit}" if commit else ""
    which = f"#{number}" if number else mutation or commit
    return f"{after or ''}[{repository} {which}](https://github.com/{repository}{page})"


def theorem(entry: Entry) -> str:
    """Return the theorem's name, linked to its file."""
    path = Path(inspect.getfile(entry.theorem.function)).relative_to(ROOT)
    return f"[{entry.theorem.name.rsplit('.', 1)[1]}](../{path})"


# ---- the text around them -------------------------------------------------------------------------------------------

HEAD = """\
# Who catches what: a zoo of bugs

The [bug zoo](../tests/zoo) lists mistakes of parallel training: what a person did, why it looks right, who reported
it, and the line that it changes. The *bug matrix* plants each one in this project's code, and asks eleven
detectors whether they see it."""

HOW = """\
Every bug is planted on the ranks, with the schedule and the options under which it is live: a GPT, or a BERT, of
two to five layers with 32 columns learns the source of a module of the standard library, character by character, in
200 steps of 8 samples. A checkpoint is written after step 10 where the bug is in one. If a run ends by itself, there
is nothing left to compare, so no other detector of runs applies; and a bug of the textbook is planted in functions
that no training run calls, so only theorems apply to it.

- The *loss curve* sees a bug if the mean of the last 20 losses is more than two standard deviations away from that of
  six runs without the bug, each with its own seed (the bug has the seed in their middle; of eight harmless runs with
  other seeds, one would be seen, too). The step is the first after which it stays there.
- The *gradient's norm* is compared with that of the same run without the bug, with the same seed, in 20 steps:
  practice seldom has that number.
- The *exact theorem* is the entry's theorem on [numbers without rounding](proof.md), where it is about formulas.
  `prove` is the program: it also sees batches and initial weights.
- `--verify` compares the first three steps and `compare` the first two, or more where a loss scale is looked for.

The results are in [`benchmarks/bug_matrix/results.json`](../benchmarks/bug_matrix/results.json), with what each
detector said; [benchmarks](../benchmarks/README.md#who-catches-which-bug-bug_matrix) has the commands that make
them and this page."""

PICTURE_TEXT = """\
![A column for each bug, by kind; a row for each detector: who sees it, and when](bug_zoo.png)

Each kind's bugs that a detector sees, of those to which it applies:"""

TABLE_HEAD = """\
These are mistakes that somebody thought of. A tool for
[mutation testing](developing.md#are-the-tests-good-enough-mutation-testing) plants the others.

## All bugs

They are folded, by their kind. A number is the step in which a bug is seen, x is seen without steps, - is silent, and
nothing means that the detector does not apply. A bug's name leads to its entry, with its story and the changed line;
the next columns lead to the report, to the file that is changed, and to the theorem. "After" a source means that the
mistake there is a similar one; a classic is known to everybody, and reported by nobody."""
