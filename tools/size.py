"""The size of the project: code tokens, without comments and docstrings, by folder, and the ceilings that hold it.

    python -m tools.size            # a table; status 1 if a folder is above its ceiling in pyproject.toml

No formatting changes the number of tokens. The three files that are named have grown most since a ceiling last moved.
"""
import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNSEEN = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
          tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> int:
    ceilings: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ceilings"]
    sizes = {path: tokens((ROOT / path).read_text()) for path in files()}
    found = Counter[str]()
    for path, size in sizes.items():
        found[folder_of(path)] += size
    above = 0
    for folder in sorted(found | ceilings, key=lambda folder: -found[folder]):
        ceiling = ceilings.get(folder, 0)
        print(f"{folder:12} {found[folder]:9,} tokens, of {ceiling:9,}")
        if found[folder] > ceiling:
            above += 1
            print(f"error: {folder} is above its ceiling. Since a ceiling last moved these have grown most:",
                  *grown(folder, sizes), sep="\n    ")
    print(f"{'all':12} {sum(found.values()):9,} tokens, of {sum(ceilings.values()):9,}")
    return min(above, 1)


def tokens(text: str) -> int:
    """Return how many tokens of code a file has."""
    docstrings = sum(ast.get_docstring(node) is not None for node in ast.walk(ast.parse(text))
                     if isinstance(node, DOCUMENTED))
    return sum(token.type not in UNSEEN for token in tokenize.generate_tokens(io.StringIO(text).readline)) - docstrings


def files() -> list[str]:
    """Return the Python files that git has or would add."""
    return [path for path in git("ls-files", "-co", "--exclude-standard", "*.py").split("\n")
            if path and (ROOT / path).exists()]


def folder_of(path: str) -> str:
    return path.split("/")[0] if "/" in path else "(root)"


def grown(folder: str, sizes: dict[str, int]) -> list[str]:
    """Return the three files of a folder that have grown most since a ceiling last moved."""
    commit = git("log", "-1", "--format=%H", "-G", r'^"?[a-z_()]+"? = [0-9_]+$', "--", "pyproject.toml").strip()
    names = git("ls-tree", "-r", "--name-only", commit, "--", folder).split("\n") if commit else []
    before = {path: git("show", f"{commit}:{path}") for path in names if path.endswith(".py")}
    grew = {path: size - tokens(before.get(path, "")) for path, size in sizes.items() if folder_of(path) == folder}
    return [f"{path} by {grew[path]:,}" for path in sorted(grew, key=lambda path: -grew[path])[:3]]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
