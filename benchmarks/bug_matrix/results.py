"""The results of the bug matrix: a verdict for each bug and detector, in a file."""
import json
from pathlib import Path

from benchmarks.bug_matrix.verdict import Verdict
from tests import zoo

FILE = Path(__file__).with_name("results.json")


def read(file: Path = FILE) -> dict[str, dict[str, Verdict]]:
    """Return the verdicts by bug and detector."""
    found = json.loads(file.read_text()) if file.exists() else {}
    return {name: {detector: Verdict(*verdict) for detector, verdict in verdicts.items()}
            for name, verdicts in found.items() if name in zoo.BY_NAME}


def write(known: dict[str, dict[str, Verdict]], file: Path = FILE) -> None:
    """Write one verdict a line, in the order of the zoo."""
    bugs = [f"{json.dumps(entry.name)}: {{\n" + ",\n".join(
        f" {json.dumps(detector)}: {json.dumps(verdict)}" for detector, verdict in known[entry.name].items()) + "}"
        for entry in zoo.ENTRIES if entry.name in known]
    written = file.with_suffix(".new")
    written.write_text("{" + ",\n".join(bugs) + "}\n")
    written.replace(file)
