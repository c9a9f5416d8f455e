"""Plans: a model, its parallelism and its batch size, with the cost for a rank in memory, traffic and idle time, by the
papers' formulas. Nothing is run.

Mixed precision as in the papers, unless w is 4 or 8: 16 bits for parameters, gradients, activations and messages. The
time of a step depends on the hardware: reference/costs/step_time.py.
"""
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from reference.config import ModelConfig, ParallelConfig, check_model_fits, check_sequence_fits
from reference.costs.memory import activations_outside_layers, head_activations, layer_activations, most_in_flight
from reference.costs.parameters import dealt_parameters, parameters_of_stage
from reference.costs.volumes import (context_parallel_traffic, data_parallel_traffic, expert_parallel_traffic,
                                     pipeline_traffic, tensor_parallel_traffic)
from reference.parallel.model_states import states_with_experts
from reference.parallel.stages import layers_of_rank, schedule_of, stages_of_ranks
from reference.schedules.generators import check_microbatches
from reference.schedules.simulate import Timeline, Times, simulate

HALF = 2                    # bytes of a parameter, a gradient, an activation, and an element in a message


class PlanMemory(NamedTuple):
    """Bytes on the fullest rank: of the first stage, which embeds and has most in flight, or of the last, which has the
    logits.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float


class Messages(NamedTuple):
    """Bytes that a rank of the first stage sends in a step for its layers, each collective as a ring."""

    tensor: float
    pipeline: float
    data: float


class Exchanges(NamedTuple):
    """Bytes that it sends, besides, to ranks with other positions, and to those with other experts."""

    context: float
    expert: float


@dataclass(frozen=True)
class Plan:
    """A model, its parallelism, and its batch size: m microbatches of b samples for each replica. Numbers have w bytes.

    Raises UserError where they do not fit together.
    """

    model: ModelConfig
    parallel: ParallelConfig
    m: int
    b: int = 1
    w: int = HALF

    def __post_init__(self):
        check_model_fits(self.model, self.parallel)
        check_sequence_fits(self.model.max_position_embeddings, self.parallel)
        self.pipeline  # noqa: B018  raises for too few layers, or a v that does not suit the schedule
        check_microbatches(self.parallel.pipeline_schedule, self.parallel.pipeline_model_parallel_size, self.m)

    @cached_property
    def pipeline(self) -> "LayerPlacement":
        p = self.parallel
        return place_layers(self.model, p.pipeline_model_parallel_size, p.pipeline_schedule, p.virtual_pipeline_size)

    @property
    def layers(self) -> list[int]:
        """Return the layers of the first rank of a pipeline."""
        return self.pipeline.first

    @property
    def positions(self) -> int:
        """Return s/c, the positions of a rank."""
        return self.model.max_position_embeddings // self.parallel.context_parallel_size

    @cached_property
    def psi(self) -> int:
        """Return the number of parameters of that rank."""
        return parameters_of_stage(self.model, self.parallel.tensor_model_parallel_size, self.layers,
                                   self.parallel.expert_model_parallel_size)

    @cached_property
    def dealt(self) -> int:
        """Return the number of those that are of experts dealt out to e replicas."""
        return dealt_parameters(self.model, self.layers, self.parallel.tensor_model_parallel_size,
                                self.parallel.expert_model_parallel_size)

    @property
    def owned(self) -> float:
        """Return the number of parameters that its optimizer moves."""
        p = self.parallel
        return (self.psi - self.dealt) / p.shards + self.dealt / (p.expert_replicas if p.zero_stage else 1)

    @property
    def memory(self) -> PlanMemory:
        last = self.parallel.pipeline_model_parallel_size - 1
        return max((self.memory_of(rank) for rank in {0, last}), key=sum)

    def memory_of(self, rank: int) -> PlanMemory:
        """Return the memory of the first or the last rank of a pipeline, with one recomputed layer at a time.

        Where its stages have different numbers of layers, it counts as if those in flight were the largest.
        """
        c, p, s = self.model, self.parallel, self.positions
        t, v, last = p.tensor_model_parallel_size, p.virtual_pipeline_size or 1, p.pipeline_model_parallel_size - 1
        held = self.pipeline.last if rank else self.pipeline.first
        in_flight = most_in_flight(p.pipeline_schedule, last + 1, self.m, rank, v)
        largest = max(sum(self.layer_bytes(p.recompute.granularity, c.has_experts(layer)) for layer in layers)
                      for layers in self.pipeline.stages[rank].values())
        experts = any(map(c.has_experts, held))
        again = self.layer_bytes("none", experts) - self.layer_bytes(p.recompute.granularity, experts)
        outside = (head_activations(c, self.b, s, t, self.w) if rank else      # as with sequence parallelism
                   activations_outside_layers(c, self.b, s, t, last + 1, self.w))
        e = p.expert_model_parallel_size
        states = states_with_experts(parameters_of_stage(c, t, held, e), dealt_parameters(c, held, t, e),
                                     p.instance_size, e, p.zero_stage, self.w, self.w, self.adam)
        return PlanMemory(*states, activations=in_flight * largest + again + outside)

    @property
    def adam(self) -> int:
        """Return K, the bytes of Adam's states for a parameter: two moments, and of 16 bits a float32 copy, too."""
        return 12 if self.w == HALF else 2 * self.w

    def layer_bytes(self, recompute: str, experts: bool) -> float:
        """Return the bytes of a layer's activations. With context parallelism, blocks of scores are never kept; only
        ranks that exchanged heads for positions (`a2a`) have whole probabilities, of a c-th of the heads.
        """
        p = self.parallel
        found = layer_activations(self.model, self.b, self.positions, p.tensor_model_parallel_size,
                                  p.sequence_parallel, recompute, experts, self.w)
        ranks = p.context_parallel_size
        core = found.core * (ranks if p.cp_comm_type == "a2a" or ranks == 1 else 0)
        return found.replicated + found.split + core

    @property
    def messages(self) -> Messages:
        p, sizes = self.parallel, (self.b, self.positions, self.model.hidden_size)
        t, v = p.tensor_model_parallel_size, p.virtual_pipeline_size or 1
        in_layer = tensor_parallel_traffic(*sizes, t, p.sequence_parallel and not p.keep_gathered_inputs)
        if p.recompute.granularity == "full":                           # a second forward, half of both
            in_layer += tensor_parallel_traffic(*sizes, t) / 2
        sent = 2 * v - 1 if p.pipeline_model_parallel_size > 1 else 0   # all its stages forward, but the first backward
        return Messages(self.w * self.m * len(self.layers) * in_layer,
                        self.w * self.m * sent * pipeline_traffic(*sizes, t),
                        self.w * (data_parallel_traffic(self.psi - self.dealt, p.replicas, p.zero_stage, self.m,
                                                        p.num_distributed_optimizer_instances)
                                  + data_parallel_traffic(self.dealt, p.expert_replicas, p.zero_stage, self.m)))

    @property
    def exchanges(self) -> Exchanges:
        c, p, sizes = self.model, self.parallel, (self.b, self.positions)
        t, forwards = p.tensor_model_parallel_size, 2 if p.recompute.granularity == "full" else 1
        queries, keys = c.num_attention_heads // t * c.head_size, max(1, c.groups // t) * c.head_size
        context = context_parallel_traffic(p.cp_comm_type, *sizes, queries, keys, p.context_parallel_size, forwards)
        expert = expert_parallel_traffic(*sizes, c.hidden_size, c.experts.moe_router_topk if c.experts else 0,
                                         p.expert_model_parallel_size, forwards)
        return Exchanges(self.w * self.m * len(self.layers) * context,
                         self.w * self.m * sum(map(c.has_experts, self.layers)) * expert)

    @cached_property
    def timeline(self) -> Timeline:
        """Simulate a pipeline whose ranks take 1 for the forward of all their layers, and 2 for the backward."""
        each = 1 / (self.parallel.virtual_pipeline_size or 1)
        return simulate(schedule_of(self.parallel, self.m), Times(each, each, each))


# ---- shared by many plans -------------------------------------------------------------------------------------------


class LayerCounts(NamedTuple):
    """The part of the model on a stage or a rank, as far as it determines its time."""

    layers: int
    experts: int      # of these layers, those with experts
    embeds: bool
    has_logits: bool


def layer_counts(model: ModelConfig, layers: Collection[int]) -> LayerCounts:
    return LayerCounts(len(layers), sum(map(model.has_experts, layers)), 0 in layers, model.num_layers - 1 in layers)


class LayerPlacement(NamedTuple):
    """The placement of layers."""

    stages: list[dict[int, range]]    # for each rank, the layers of its stages
    first: list[int]                  # layers of the first rank
    last: list[int]                   # and of the last
    kinds: Counter[LayerCounts]       # of ranks


@cache
def place_layers(model: ModelConfig, p: int, schedule: str, v: int | None) -> LayerPlacement:
    """Place the layers. Raise UserError for too few layers, or for a schedule and v that do not go together."""
    stages = stages_of_ranks(model, ParallelConfig(1, p, 1, schedule, v))
    held = list(map(layers_of_rank, stages))
    return LayerPlacement(stages, held[0], held[-1], Counter(layer_counts(model, layers) for layers in held))
