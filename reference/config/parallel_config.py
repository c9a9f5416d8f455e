"""Sizes and choices of parallelism."""
from dataclasses import dataclass, field
from math import prod

from reference.config.checks import option, require_divides, require_one_of, require_positive
from reference.config.recompute import Recompute
from reference.errors import UserError

CP_COMM_TYPES = ("p2p", "all_gather", "a2a")     # layers/context_attention.py has the three ways


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes and choices of parallelism: the ranks of one model (t, p), the number of replicas (d, and c of each), the
    pipeline's schedule, the reduction of gradients, and the model states and activations that each rank keeps.

    Raises UserError for sizes below 1, and for choices that do not go together.
    """

    tensor_model_parallel_size: int = 1    # t
    pipeline_model_parallel_size: int = 1  # p
    data_parallel_size: int = 1            # d
    pipeline_schedule: str = "1f1b"        # a name in reference/schedules/generators.py
    virtual_pipeline_size: int | None = None   # v, for a schedule with several stages on each rank
    scatter_gather_tensors_in_pipeline: bool = True   # whether each of t ranks sends 1/t of an activation
    ddp_bucket_size: int = 1 << 20         # the fewest gradient elements in one all-reduce over the replicas
    zero_stage: int = 0                    # the replicas shard optimizer states (1), gradients (2), parameters (3)
    cpu_offload: bool = False              # whether a rank's shards of parameters and moments are offloaded
    sequence_parallel: bool = False        # whether activations outside the regions are sharded by positions
    keep_gathered_inputs: bool = False     # whether the regions' gathered inputs are kept for the backward
    recompute: Recompute = field(default_factory=Recompute)
    context_parallel_size: int = 1         # c
    cp_comm_type: str = "p2p"              # how attention over c ranks communicates: a name in CP_COMM_TYPES
    expert_model_parallel_size: int = 1    # e, of the replicas: neighbours among them deal out the experts
    num_distributed_optimizer_instances: int = 1    # groups of neighbours among the replicas; each shards a copy
    whole_matrices: bool = False           # whether ZeRO's owners have whole matrices: those of Muon

    def __post_init__(self):
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size",
                     "ddp_bucket_size", "context_parallel_size", "expert_model_parallel_size",
                     "num_distributed_optimizer_instances"):
            require_positive(name, getattr(self, name))
        require_divides("expert_model_parallel_size", self.expert_model_parallel_size,
                        "data-parallel size x context-parallel size", self.replicas,
                        "Experts are dealt out to ranks that hold copies of everything else.")
        check_zero_stage(self.zero_stage)
        check_instances(self)
        if self.whole_matrices and self.zero_stage > 1:
            raise UserError(f"--optimizer is muon, which needs whole matrices to update them, but --zero-stage "
                            f"{self.zero_stage} shards gradients wherever a part of the buffer ends. Choose stage 1, "
                            "in which the owner of a matrix has all of it, or 0.")
        require_one_of("cp_comm_type", self.cp_comm_type, CP_COMM_TYPES)
        if self.cpu_offload and self.zero_stage == 0:
            raise UserError("--cpu-offload offloads a rank's shard of the model's states, but without ZeRO there are "
                            "no shards. Choose --zero-stage 1, 2 or 3.")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise UserError("--sequence-parallel shards the sequence over the tensor-parallel ranks, but "
                            "--tensor-model-parallel-size is 1. Choose at least 2, or leave the option out.")
        if self.keep_gathered_inputs and not self.sequence_parallel:
            raise UserError("--keep-gathered-inputs needs --sequence-parallel: without it nothing is gathered.")

    @classmethod
    def for_world(cls, world_size: int, t: int, p: int = 1, **choices) -> "ParallelConfig":
        """Derive the data-parallel size from the world size, t, p and c. `choices` are the other fields."""
        c = choices.get("context_parallel_size", 1)
        return cls(t, p, data_parallel_size(world_size, t, p, c), **choices)

    @property
    def world_size(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.replicas

    @property
    def replicas(self) -> int:
        """Return the number of ranks that hold the same parameters: those of d samples, each dealt out to c ranks."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def expert_replicas(self) -> int:
        """Return the number of ranks that hold the same experts."""
        return self.replicas // self.expert_model_parallel_size

    @property
    def sequence_shards(self) -> int:
        """Return the number of shards of the sequence outside the tensor-parallel regions."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    @property
    def scattered_parts(self) -> int:
        """Return the number of shards into which a rank's activation is scattered for the next stage, which gathers it.

        With sequence parallelism it is sharded already, and the receivers need not gather.
        """
        whole = self.sequence_parallel or not self.scatter_gather_tensors_in_pipeline
        return 1 if whole else self.tensor_model_parallel_size

    @property
    def sent_parts(self) -> int:
        """Return the number of shards of a stage's result [b, s, h], of which each rank sends one."""
        return self.sequence_shards * self.scattered_parts

    @property
    def instance_size(self) -> int:
        """Return the number of replicas that share one copy of the model's states: with hybrid sharding, not all."""
        return self.replicas // self.num_distributed_optimizer_instances

    @property
    def shards(self) -> int:
        """Return the number of shards that the replicas make of the flat buffers."""
        return self.instance_size if self.zero_stage else 1

    @property
    def bucket_size(self) -> int:
        """Return the smallest size of a bucket, in elements. ZeRO-3 gathers unit by unit."""
        return 1 if self.zero_stage == 3 else self.ddp_bucket_size


def data_parallel_size(world_size: int, t: int, p: int = 1, c: int = 1) -> int:
    """Return the number of replicas that t, p and c leave to the world. Raises UserError if they do not divide it."""
    sizes = {"tensor_model_parallel_size": t, "pipeline_model_parallel_size": p, "context_parallel_size": c}
    for name, size in sizes.items():
        require_positive(name, size)
    together = prod(sizes.values())
    if world_size % together:
        given = " and ".join(f"{option(name)} is {size}" for name, size in sizes.items()
                             if size > 1 or name == "tensor_model_parallel_size")
        raise UserError(f"{given}, so the number of ranks must be a multiple of {together}, but it is "
                        f"{world_size}. Start {-(-world_size // together) * together} ranks, or choose a size that "
                        f"divides {world_size}.")
    return world_size // together


def check_instances(p: ParallelConfig) -> None:
    """Raise UserError for hybrid sharding that cannot be."""
    name, instances = "num_distributed_optimizer_instances", p.num_distributed_optimizer_instances
    require_divides(name, instances, "data-parallel size x context-parallel size", p.replicas,
                    "Each group of neighbouring replicas shards a copy of the model's states.")
    if instances > 1 and p.zero_stage == 0:
        raise UserError(f"{option(name)} is {instances}, but without ZeRO every replica holds a copy of its own, and "
                        "there are no groups. Choose --zero-stage 1, 2 or 3.")
    if instances > 1 and p.expert_model_parallel_size > 1:
        raise UserError(f"{option(name)} is {instances}, but --expert-model-parallel-size is "
                        f"{p.expert_model_parallel_size}: the ranks with the same experts shard one copy of them. "
                        "Choose 1 for one of the two.")


def check_zero_stage(stage: int) -> None:
    if stage not in range(4):
        raise UserError(f"--zero-stage is {stage}, but must be 0 (nothing is sharded), 1 (optimizer states), 2 (and "
                        "gradients) or 3 (and parameters).")
