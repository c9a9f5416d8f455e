"""The cases of the theorems, and the equality of arrays: sizes of a model and of a batch, with a seed for the numbers,
and the parallelism of a run.

Ranks import this, so it does without hypothesis, with which `tests/strategies.py` draws cases.
"""
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from reference.batches import BERTBatch, ClassBatch, GPTBatch, SpanBatch
from reference.comm.regions import TENSOR_PARALLEL, SequenceParallelRegion
from reference.config import ModelConfig, OptimizerConfig, ParallelConfig, Recompute
from reference.exact.array import ExactArray, random_array
from reference.models.bert import SCORES
from reference.models.model import batch_type, sequences_of
from reference.params import leaves, tree_map, with_names
from reference.random.dropout import Dropout

KEEP_ALL = Recompute()      # nothing is computed again


@dataclass(frozen=True)
class Case:
    """A model on t tensor-parallel ranks, and a batch. Numbers are a function of the seed."""

    t: int
    model: ModelConfig
    b: int
    s: int
    seed: int
    integers: bool = False   # whole numbers: their sums and products are exact, in any order
    sequence_parallel: bool = False
    keep_gathered_inputs: bool = False
    main = np.float64        # the dtype of gradients
    exact = False            # whether the numbers are those of a prime field

    @property
    def region(self):
        """Return the textbook's region for this case."""
        return SequenceParallelRegion(self.keep_gathered_inputs) if self.sequence_parallel else TENSOR_PARALLEL

    @property
    def dropout(self) -> Dropout:
        """Return the Dropout of a microbatch that is not the first, in some step and layer."""
        return Dropout(self.model, self.seed, step=3, sample=2, layer=1)

    def exactly(self) -> "ExactCase":
        """Return the same case with exact numbers."""
        return ExactCase(**vars(self))

    def array(self, what: str, *shape):
        """Draw float64 of order 1, independently for each name."""
        rng = np.random.default_rng([self.seed, *what.encode()])
        return rng.integers(-4, 5, shape).astype(float) if self.integers else rng.normal(size=shape)

    def ids(self, what: str, *shape):
        """Draw tokens of the vocabulary, int64."""
        return np.random.default_rng([self.seed, *what.encode()]).integers(0, self.model.vocab_size, shape)

    def batch(self, what: str, count: int):
        """Draw a batch of samples for the model (reference/batches.py), with any lengths and weights."""
        kind, s = batch_type(self.model), self.s
        if kind is GPTBatch:
            return GPTBatch(self.ids(f"tokens {what}", count, s), self.ids(f"targets {what}", count, s))
        rng = np.random.default_rng([self.seed, *what.encode()])
        n = sequences_of(self.model)
        rows, tuned = count * n, kind is not BERTBatch
        tokens, types = self.ids(f"tokens {what}", rows, s), rng.integers(0, 2, (rows, s))
        lengths, weights = rng.integers(1, s + 1, rows), rng.integers(0, 2, count if tuned else (rows, s))
        if tuned:
            answers = (rng.integers(0, lengths[:, None], (count, 2)) if kind is SpanBatch else
                       rng.integers(0, SCORES[self.model.heads[0]] if kind is ClassBatch else n, count))
            return kind(tokens, types, lengths, answers, weights)
        weights[np.cumsum(weights, 1) > self.model.most_predicted(s)] = 0
        targets, swapped = self.ids(f"targets {what}", rows, s), rng.integers(0, 2, rows)
        return BERTBatch(tokens, types, targets, weights, lengths, swapped)

    def params(self, tensors):
        """Draw a tree of whole tensors, biases and norms too. Sums of h elements are of order 1."""
        scale = 1.0 if self.integers else 1 / np.sqrt(self.model.hidden_size)
        return tree_map(lambda named: scale * self.array(named.name, *named.leaf.shape), with_names(tensors))

    def x(self, what: str = "x"):
        """Draw x [b, s, h]."""
        return self.array(what, self.b, self.s, self.model.hidden_size)


@dataclass(frozen=True)
class ExactCase(Case):
    """A case with numbers of a prime field (reference/exact/), of which equal ones are equal formulas."""

    exact = True

    def array(self, what: str, *shape):
        return random_array(shape, self.seed, what)


def random_numbers(seed: int, what: str, shape, exact: bool = False):
    """Draw float64 of order 1, or exact numbers, independently for each name."""
    if exact:
        return random_array(shape, seed, what)
    return np.random.default_rng([seed, *what.encode()]).normal(size=shape)


class MuonChoices(NamedTuple):
    """Muon's choices, as fields of an OptimizerConfig."""

    muon_tp_mode: str = "duplicated"
    muon_use_nesterov: bool = False
    muon_num_ns_steps: int = 5
    muon_scale_mode: str = "spectral"


LONG_NAMES = {"c": "context_parallel_size", "e": "expert_model_parallel_size", "schedule": "pipeline_schedule",
              "chunks": "virtual_pipeline_size", "scatter_gather": "scatter_gather_tensors_in_pipeline",
              "bucket_size": "ddp_bucket_size", "instances": "num_distributed_optimizer_instances"}


@dataclass(frozen=True)
class Plan:
    """The parallelism of a case beside t: the pipeline, the replicas, the states that each keeps, c ranks for the
    positions of each sample, e for the experts, and the instances of hybrid sharding.
    """

    p: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    scatter_gather: bool = True
    bucket_size: int = 1000
    zero_stage: int = 0
    cpu_offload: bool = False
    recompute: Recompute = KEEP_ALL
    c: int = 1
    cp_comm_type: str = "p2p"
    e: int = 1
    instances: int = 1
    muon: MuonChoices | None = None     # None: Adam

    def parallel(self, world_size: int, case: Case) -> ParallelConfig:
        """Return the config: a field of the plan or of the case is the config's field of that name, or of a longer one.
        """
        named = {LONG_NAMES.get(name, name): value for name, value in {**vars(case), **vars(self)}.items()}
        choices = {one.name: named[one.name] for one in fields(ParallelConfig) if one.name in named}
        return ParallelConfig.for_world(world_size, case.t, self.p, whole_matrices=self.muon is not None, **choices)

    def optimizer(self, lr: float, lr_decay_iters: int, **choices) -> OptimizerConfig:
        """Return the settings of the plan's optimizer, with these of the others."""
        muon = {"optimizer": "muon", **self.muon._asdict()} if self.muon else {}
        return OptimizerConfig(lr, lr_decay_iters, **muon, **choices)


def take(batch, samples: slice):
    """Return some samples of a batch."""
    if isinstance(batch, GPTBatch):
        return GPTBatch(batch.tokens[samples], batch.targets[samples])
    return type(batch).unpack(batch.pack()[samples])


def close(actual, expected, tolerance=1e-11):
    """Assert equality within the tolerance, relative to the largest expected element (or to 1, if that is larger)."""
    assert actual.shape == expected.shape, f"shape {actual.shape} is not {expected.shape}"
    if isinstance(expected, ExactArray):
        differ = (actual != expected).sum()
        assert not differ, f"{differ} of {expected.size} elements are other formulas"
        return
    difference = np.abs(actual - expected).max(initial=0)
    limit = tolerance * max(1.0, np.abs(expected).max(initial=0))
    assert difference <= limit, f"largest difference {difference:.1e}, allowed {limit:.1e}"


def trees_close(actual, expected, tolerance=1e-11):
    """Assert that two trees have the same tensors, each close. An error names the tensor."""
    for (name, x), (other, y) in zip(leaves(actual), leaves(expected), strict=True):
        assert name == other
        try:
            close(x, y, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
