"""The texts that all contenders of generation.py continue, and their answers to the referee."""
import json
import random
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple, Self

from turns import serve

VOCABULARY = 50257      # of a GPT-2


class Texts(NamedTuple):
    """A batch of prompts of one length, and the number of tokens that follow each."""

    b: int
    prompt: int
    new: int

    @classmethod
    def read(cls, argument: str) -> Self:
        return cls(*map(int, argument.split(",")))

    @property
    def argument(self) -> str:
        """Return the sizes as the contenders' programs take them: '8,128,64'."""
        return ",".join(map(str, self))

    def prompts(self, vocabulary: int = VOCABULARY) -> list[list[int]]:
        draw = random.Random(0)
        return [draw.choices(range(vocabulary), k=self.prompt) for _ in range(self.b)]


Extend = Callable[[Sequence[Sequence[int]], int], list[list[int]]]     # prompts, count -> the tokens that follow each


def serve_texts(extend: Extend, argument: str, path: str) -> None:
    """Write all new tokens to a file. Then extend the texts on request: alternately by one token, which is the time of
    the prompts, and by all.
    """
    texts = Texts.read(argument)
    prompts, counts = texts.prompts(), cycle((1, texts.new))
    Path(path).write_text(json.dumps(extend(prompts, texts.new)))
    serve(lambda: extend(prompts, next(counts)))
