"""An entry of the bug zoo: a mistake, where it comes from, and the theorem that catches it."""
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

ABOUT_FORMULAS = ("rank_theorems", "textbook_theorems", "context_theorems")
BELOW_ROUNDING = "below rounding"      # a kind: floats cannot see it, so the theorem about floats must stay silent
KINDS = ("missing communication", "extra communication", "wrong group", "scaling", "computation", "scheduling",
         "aliasing", "state and checkpoint", "precision", "random numbers", "memory", BELOW_ROUNDING)
AXES = ("TP", "SP", "CP", "PP", "DP", "EP", "ZeRO", "recompute", "optimizer", "checkpoint", "data", "model")

# A repository and the thread that reports this mistake; with "after" where the mistake there is only a similar one.
# TrainVerify's are the broken models of its artifact. A classic is known to everybody, and reported by nobody.
SOURCE = r"classic|(after )?[\w.-]+/[\w.-]+ (#\d+|mutation \d+|commit [0-9a-f]{7})"


class Bug(NamedTuple):
    """A wrong text in the place of a right one."""

    module: str
    right: str
    wrong: str

    @property
    def file(self) -> str:
        """Return the module's path in the repository."""
        return self.module.replace(".", "/") + ".py"


class Theorem(NamedTuple):
    """A theorem by its name, such as "rank_theorems.mlp_equals_whole", so that the zoo can be read without it."""

    name: str       # of a function in a module of `tests`
    ranks: int      # it is run as function(group, *args) by so many ranks, or with 0 as function(*args) here
    args: tuple

    @property
    def function(self) -> Callable[..., Any]:
        """Import the function."""
        module, name = self.name.rsplit(".", 1)
        return getattr(import_module(f"tests.{module}"), name)

    @property
    def exact(self) -> "Theorem | None":
        """Return the same theorem about exact numbers (reference/exact/), or None if it has no such meaning."""
        file, name = self.name.split(".", 1)
        about_formulas = file in ABOUT_FORMULAS and name != "gradients_are_derivatives"
        if not about_formulas and name != "training_equals_one_process":
            return None
        args = self.args[0].exactly(), *self.args[1:]
        return Theorem("exact_theorems.proved", self.ranks, (self.function, *args)) if self.ranks else (
            self._replace(args=args))


class Entry(NamedTuple):
    """A mistake that people make: what it changes, why it looks right, and the theorem that falls."""

    name: str
    kind: str       # one of KINDS
    axis: str       # one of AXES
    source: str     # of the form SOURCE
    story: str      # a sentence: what a person did, and why it looks right
    bug: Bug
    theorem: Theorem

    @property
    def silent(self) -> bool:
        """Report whether the theorem, being about floats, must not see it."""
        return self.kind == BELOW_ROUNDING
