"""Write the lengths into the tables of docs/reading.md: `python tools/reading.py`.

A row of a table links to a file and says which part of it to read: `all`, `to X` (from the first line), `X` or
`X to Y`, where X and Y are functions, classes or methods (`Class.method`), and Y is included. A cell may list several
parts, separated by commas. All lines count: code, comments and blank ones.
"""
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "reading.md"
ROW = re.compile(r"^\| \[`[^`]+`\]\(\.\./(?P<path>[^)]+)\) \| (?P<part>[^|]+) \| (?P<length>[\d,]+) \|", re.MULTILINE)
TOTAL = re.compile(r"^\| all of (?P<part>day|week) one \|  \| (?P<length>[\d,]+) \|", re.MULTILINE)


def main() -> None:
    GUIDE.write_text(with_true_lengths(GUIDE.read_text()))


def with_true_lengths(text: str) -> str:
    """Return the guide with the length of every row, and the sum in the last row of every table, as the files have it.
    """
    total = 0

    def row(match: re.Match) -> str:
        nonlocal total
        if match.re is TOTAL:
            length, total = total, 0
        else:
            total += (length := length_of(ROOT / match["path"], match["part"]))
        start, end = (position - match.start() for position in match.span("length"))
        return f"{match[0][:start]}{length:,}{match[0][end:]}"

    lines = [TOTAL.sub(row, line) if TOTAL.match(line) else ROW.sub(row, line) for line in text.splitlines(True)]
    return "".join(lines)


def length_of(path: Path, parts: str) -> int:
    """Count the lines that are to be read. End the program with a sentence if the file has no such function."""
    source = path.read_text()
    ends, total = definitions(source), 0
    for part in parts.replace("`", "").split(", "):
        first, to, last = part.partition("to ")
        names = [name.strip() for name in (first, last) if name.strip()]
        if part == "all":
            total += len(source.splitlines())
        elif unknown := [name for name in names if name not in ends]:
            sys.exit(f"error: docs/reading.md names {', '.join(unknown)}, which {path.relative_to(ROOT)} does not "
                     f"define. Name a function, a class or a method of it.")
        else:
            start = ends[first.strip()][0] if first.strip() else 1
            total += ends[last if to else first][1] - start + 1
    return total


def definitions(source: str) -> dict[str, tuple[int, int]]:
    """Return the first and the last line of every function, class and method, by name; decorators count."""
    found: dict[str, tuple[int, int]] = {}

    def add(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[prefix + node.name] = first, node.end_lineno or first
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{node.name}.")

    add(ast.parse(source).body, "")
    return found


if __name__ == "__main__":
    main()
