"""Batches of requests, as data: which requests take part in each step of a model that serves them.

A step computes tokens of several requests, and reads each weight once for all of them. The first step of a request, its
*prefill*, computes all tokens of its prompt; each later one, its *decode* steps, one token. Every step gives each
of its requests the next token. So the only choice is which requests take part:

    static        the first that fit, and no other until all of these have finished
    continuous    the first that fit, chosen again before each step (Orca: Yu et al. 2022, "iteration-level scheduling")

The order is that of arrival, so no request starves. They fit if there are slots for them, and blocks of the KV cache,
each of a fixed number of positions, allocated when they are needed (Kwon et al. 2023). If none is free, the request
that arrived last leaves the step and loses its cache. When it fits again, it recomputes that in a second prefill
(section 4.5 of that paper). In blocks as long as the longest text no request grows, and none has to leave.
"""
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from reference.errors import UserError
from reference.generation.decoding import Sampling
from reference.kv_cache import PackedCache


class Request(NamedTuple):
    """A prompt, and how many tokens shall follow it."""

    arrival: float
    prompt: int      # tokens
    output: int      # tokens

    @property
    def positions(self) -> int:
        """Return the positions that it has in the KV cache at its end: the last token's are never read."""
        return self.prompt + self.output - 1


class Work(NamedTuple):
    """The part of one request in a step."""

    tokens: int        # that are computed: all in a prefill, then one
    positions: int     # in the request's KV cache after the step


class Step(NamedTuple):
    """One forward of the model: the work of each request, by its number, in order of arrival."""

    start: float
    end: float
    work: dict[int, Work]


@dataclass(frozen=True)
class Server:
    """The limits of a step, and its time: a sum, as if nothing overlapped."""

    slots: int                     # requests in a step, at most
    blocks: float = inf            # of the KV cache
    block: int = 1                 # positions in each
    step_time: float = 1.0         # of any step: the weights are read
    token_time: float = 0.0        # of each token: it is computed
    position_time: float = 0.0     # of each position in the KV cache: it is read

    def fitting(self, positions: Mapping[int, int]) -> list[int]:
        """Return the first of some requests that fit together. Each is given with its positions in the KV cache."""
        sums = accumulate(ceil(n / self.block) for n in positions.values())
        return [i for i, total in zip(positions, sums) if total <= self.blocks][:self.slots]

    def seconds(self, work: Mapping[int, Work]) -> float:
        """Return the time of a step."""
        return self.step_time + sum(self.token_time * one.tokens + self.position_time * one.positions
                                    for one in work.values())


def static_batches(requests: Sequence[Request], server: Server) -> list[Step]:
    """Serve batch after batch, each until its longest text is finished. A finished text costs nothing more."""
    def choose(positions, batch):
        return ([i for i in batch if i in positions] or
                server.fitting({i: requests[i].positions for i in positions}))

    return schedule(requests, server, choose)


def continuous_batches(requests: Sequence[Request], server: Server) -> list[Step]:
    """Let a waiting request take the place of a finished one in the next step."""
    return schedule(requests, server, lambda positions, batch: server.fitting(positions))


def schedule(requests: Sequence[Request], server: Server,
             choose: Callable[[dict[int, int], list[int]], list[int]]) -> list[Step]:
    """Return the steps in which all requests are served. Raise UserError for requests that cannot be.

    `choose` maps the requests that have arrived and are not finished, each with the positions that it needs in this
    step, and the last step's requests, to those that take part.
    """
    check(requests, server)
    done, cached, now, steps = [0] * len(requests), dict[int, int](), 0.0, list[Step]()
    while unfinished := [i for i, request in enumerate(requests) if done[i] < request.output]:
        now = max(now, requests[unfinished[0]].arrival)
        needed = {i: requests[i].prompt + done[i] for i in unfinished if requests[i].arrival <= now}
        cached = {i: cached.get(i, 0) for i in choose(needed, [*cached])}      # the others lose their caches
        work = {i: Work(needed[i] - seen, needed[i]) for i, seen in cached.items()}
        cached = {i: needed[i] for i in cached}
        for i in cached:
            done[i] += 1
        steps.append(Step(now, now + server.seconds(work), work))
        now = steps[-1].end
    return steps


def check(requests: Sequence[Request], server: Server) -> None:
    """Raise UserError unless the requests are in order, and each of them fits."""
    if [*requests] != sorted(requests, key=lambda request: request.arrival):
        raise UserError("The requests are not in the order of their arrivals, in which they are served. Sort them.")
    for request in requests:
        if min(request.prompt, request.output) < 1 or not server.fitting({0: request.positions}):
            raise UserError(f"{request} can never be served by {server}. It must have a prompt and an output, and with "
                            "both fit into the KV cache alone. Give the server more blocks, or leave it out.")


def latencies(requests: Sequence[Request], steps: Sequence[Step]) -> list[tuple[float, float]]:
    """Return each request's time from its arrival to its first token, and from a token to the next, on average."""
    ends = [[step.end for step in steps if i in step.work] for i in range(len(requests))]
    return [(own[0] - request.arrival, (own[-1] - own[0]) / max(1, request.output - 1))
            for request, own in zip(requests, ends)]


def throughput(steps: Sequence[Step]) -> float:
    """Return the tokens that follow prompts per unit of time, from the first step's start to the last one's end."""
    return sum(len(step.work) for step in steps) / (steps[-1].end - steps[0].start)


# ---- played with a model --------------------------------------------------------------------------------------------


def serve(prompts: Sequence[Sequence[int]], steps: Sequence[Step], sampling: Sampling, empty_cache: Callable,
          follow: Callable) -> list[list[int]]:
    """Play the steps with a model, whole or on ranks, and return the tokens that follow each prompt.

    `empty_cache()` returns a KVCache for each layer. `follow(tokens, kv_cache)` maps tokens [1, n] of all requests of
    a step, and their PackedCaches, to logits [requests, V].
    """
    texts, caches = [list(prompt) for prompt in prompts], dict[int, dict]()
    for step in steps:
        caches |= {i: empty_cache() for i, work in step.work.items() if work.tokens == work.positions}
        tokens = [texts[i][positions - new:positions] for i, (new, positions) in step.work.items()]
        packed = {layer: PackedCache([caches[i][layer] for i in step.work], [*map(len, tokens)])
                  for layer in empty_cache()}
        for i, logits in zip(step.work, follow([sum(tokens, [])], packed)):
            texts[i].append(sampling.choose(logits, len(texts[i]), i))
    return [text[len(prompt):] for text, prompt in zip(texts, prompts)]
