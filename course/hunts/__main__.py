"""Give each student of a course three bugs to find: `python -m course.hunts --course FOLDER STUDENT...`.

    python -m course.hunts --course runs/course --roster students.txt
    python -m course.hunts --course runs/course alice --show

STUDENT is the name that nbgrader or Gradescope knows: a folder's in `submitted/`, or an e-mail address. A roster has
one on each line. It writes

    hunts/STUDENT.md        what the student gets: the traces of three bugs, one of each level
    hunts.json              the bugs, for grading; only the instructor has it

The bugs come from the course's catalogue (`python -m course.hunts.catalogue --course FOLDER`), which its secret seed
draws: a second run writes the same, and no two students share one. Afterwards give ./run.sh labs again if you use
Gradescope: its autograder for lab 7 contains hunts.json.
"""
import json
import os
import re
from pathlib import Path

from course.grading.draws import SEED_FILE, read_seed
from course.grading.hunts import FILE
from course.grading.release import write
from course.hunts.catalogue import drawn_cases, read_roster
from course.hunts.faults import LEVELS, Fault, in_order
from course.hunts.trial import Evidence, command
from mpi_impl.launch.entry import ArgumentParser, run_alone
from reference.errors import UserError

HEAD = """# Three bugs

These cases are {student}'s. In each of them one place of Shardlab was changed. Lab 7 says how to hunt.
"""
CASE = """
## The {level} case

```
{command}
```

It printed, among other lines:

```
{printed}
```

{ledger}

The first wrong tensor (A: the right program, B: this one; both with the same command):

```
{compared}
```
"""


def main() -> None:
    parser = ArgumentParser(prog="course.hunts", description="Give each student of a course three bugs to find.")
    parser.add_argument("students", nargs="*", metavar="STUDENT", help="a student's name in nbgrader or Gradescope")
    parser.add_argument("--course", required=True, metavar="FOLDER", type=Path, help="what ./run.sh labs has made")
    parser.add_argument("--roster", metavar="FILE", type=Path, help="a file with a student's name on each line")
    parser.add_argument("--show", action="store_true", help="also print the bugs, for the instructor")
    options = parser.parse_args()
    students = [*options.students, *(read_roster(options.roster) if options.roster else ())]
    if not students:
        raise UserError("No student is named: name them, or give a --roster with one on each line.")
    os.umask(0o077)     # nobody else may read the bugs
    secret = read_seed(options.course / SEED_FILE)
    key = options.course / FILE
    known = json.loads(key.read_text()) if key.exists() else {}
    dealt = deal(drawn_cases(options.course, secret), secret, list(dict.fromkeys(students)), known)
    for student, found in dealt.items():
        known[student] = {level: about(fault) for level, (fault, _) in found.items()}
        write(options.course / "hunts" / f"{file_name(student)}.md", page(student, found).encode())
        print(f"{student}: {len(found)} cases")
        if options.show:
            for level, (fault, _) in found.items():
                print(f"  {level}: {fault.bug.file}, line {fault.lines[0]}, {fault.kind}: {fault.name}")
    write(key, (json.dumps(known, indent=1, sort_keys=True) + "\n").encode())


def deal(drawn: dict[Fault, Evidence], secret: str, students: list[str],
         known: dict[str, dict]) -> dict[str, dict[str, tuple[Fault, Evidence]]]:
    """Return a case of each level for each student that nobody else has. Who has some already keeps them.

    Raises UserError if there are too few.
    """
    dealt: dict[str, dict] = {student: {} for student in students}
    missing = {}
    for level in LEVELS:
        owner = {cases[level]["name"]: student for student, cases in known.items() if level in cases}
        free = []
        for fault, evidence in drawn.items():
            if evidence.level == level and owner.get(fault.name) in dealt:
                dealt[owner[fault.name]][level] = fault, evidence
            elif evidence.level == level and fault.name not in owner:
                free.append(fault)
        waiting = [student for student in students if level not in dealt[student]]
        missing[level] = max(0, len(waiting) - len(free))
        for student, fault in zip(waiting, in_order(free, secret, "students")):
            dealt[student][level] = fault, drawn[fault]
    if any(missing.values()):
        lacking = ", ".join(f"{n} {level}" for level, n in missing.items() if n)
        raise UserError(f"The course's catalogue has too few cases that nobody has yet; missing: {lacking}. "
                        "Give python -m course.hunts.catalogue with more --cases first.")
    return dealt


def about(fault: Fault) -> dict:
    """Return what grading and the instructor know of a fault."""
    return {"file": fault.bug.file, "first": fault.lines[0], "last": fault.lines[1], "kind": fault.kind,
            "name": fault.name, "right": fault.bug.right, "wrong": fault.bug.wrong}


def page(student: str, found: dict[str, tuple[Fault, Evidence]]) -> str:
    """Return the page that a student gets."""
    return HEAD.format(student=student) + "".join(
        CASE.format(level=level, command=command(fault), printed=evidence.printed, compared=evidence.compared,
                    ledger=f"The ledger, where it is not that of the right program:\n\n```\n{evidence.ledger}\n```"
                    if evidence.ledger else "The ledger is that of the right program, line by line.")
        for level, (fault, evidence) in found.items())


def file_name(student: str) -> str:
    """Return a student's name as that of a file, which is another one for each student."""
    return re.sub(r"[^\w.@+-]", lambda found: f"%{ord(found[0]):x}.", student)


if __name__ == "__main__":
    run_alone(main)
