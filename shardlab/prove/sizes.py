"""The sizes of a proof: the smallest that keep every structure of a run.

The ranks, the schedule, ZeRO and recomputation stay as they are. What a run has several of, its proof has two of: heads
and positions on a rank, samples of a microbatch, layers of a stage. Layers that do not divide evenly do so in the
proof, too, and the vocabulary needs the same kind of padding.
"""
from dataclasses import dataclass, replace
from math import lcm

from mpi_impl.runtime.tables import count
from reference.config import ExpertsConfig, ModelConfig, ParallelConfig, Recompute
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.stages import layouts_of_ranks, stages_of_ranks
from reference.schedules.generators import shrink_microbatches
from shardlab.programs.settings import PretrainingSettings

UNKNOWN_VOCABULARY = 4095   # with padding, since that is the harder case
MOST_HIDDEN, MOST_WORK = 256, 1e8       # columns; multiplications of a step: a million take ten seconds or more


@dataclass(frozen=True)
class ProofSizes:
    """A model, its parallelism, and the size of its steps."""

    model: ModelConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    micro_batch_size: int
    microbatches: int      # of each replica in each step
    seq_length: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.microbatches * self.parallel.data_parallel_size

    def describe(self, name: str) -> str:
        """Describe the model, a GPT or a BERT by its `name`, and its steps."""
        m, t = self.model, self.parallel.tensor_model_parallel_size
        padded = m.padded_vocab_size(t)
        vocabulary = f"{m.vocab_size} words" + (f" padded to {padded}" if padded > m.vocab_size else "")
        groups = f" in {count(m.groups, 'group')}" if m.num_query_groups else ""
        experts = f", {count(m.experts.num_experts, 'expert')}" if m.experts else ""
        return (f"a {name} of {count(m.num_layers, 'layer')}, hidden size {m.hidden_size}, "
                f"{count(m.num_attention_heads, 'head')}{groups}{experts}, {vocabulary}; steps of "
                f"{count(self.global_batch_size, 'sample')} of {count(self.seq_length, 'token')}, in "
                f"{count(self.microbatches, 'microbatch')} of {self.micro_batch_size} on each replica")


def shrink(settings: PretrainingSettings) -> ProofSizes:
    """Return the sizes of the proof for a run. Raise UserError for a run that is large at its smallest."""
    args, parallel = settings.args, settings.parallel
    full = settings.model(UNKNOWN_VOCABULARY if args.vocab_size is None else args.vocab_size)
    t = parallel.tensor_model_parallel_size
    layers, recompute = shrink_layers(full.num_layers, stages(parallel), parallel.recompute)
    heads, groups = shrink_heads(full, t * (parallel.context_parallel_size if parallel.cp_comm_type == "a2a" else 1))
    size = shrink_head(full)
    s = shrink_sequence(args.seq_length, parallel)
    positions = s + (full.max_position_embeddings > args.seq_length)
    model = replace(full, num_layers=layers, num_attention_heads=heads, num_query_groups=groups,
                    kv_channels=full.kv_channels and size, hidden_size=heads * size + t * bool(full.kv_channels),
                    ffn_hidden_size=3 * t if full.swiglu or full.ffn_hidden_size else None,
                    vocab_size=shrink_vocabulary(full, t), make_vocab_size_divisible_by=words_of_rank(t),
                    max_position_embeddings=positions, experts=shrink_experts(full.experts, parallel))
    parallel = replace(parallel, recompute=recompute, ddp_bucket_size=shrink_bucket(full, model, parallel))
    found = ProofSizes(model, parallel, settings.optimizer, min(args.micro_batch_size, 2),
                       shrink_microbatches(settings.microbatches, parallel.pipeline_schedule,
                                           parallel.pipeline_model_parallel_size), s)
    check_small(found)
    return found


def stages(parallel: ParallelConfig) -> int:
    """Return the number of stages of a schedule; those of a V have two on each rank."""
    one_each = replace(ModelConfig(1, 1, 1, 1, 1), num_layers=10_000)
    return sum(map(len, stages_of_ranks(one_each, parallel)))


def shrink_layers(layers: int, stages: int, recompute: Recompute) -> tuple[int, Recompute]:
    """Return the number of layers, and how they are recomputed.

    A stage gets two layers if the run has a stage with several; three if it has groups of several recomputed layers
    and others.
    """
    each, more = divmod(layers, stages)
    largest, n = each + (more > 0), recompute.num_layers
    wanted = min(largest, 3 if recompute.granularity == "full" and 1 < n < largest else 2)
    n = n if n == 1 else 2 if n < largest else wanted
    return stages * (wanted - (more > 0)) + more, replace(recompute, num_layers=n)


def shrink_sequence(s: int, parallel: ParallelConfig) -> int:
    """Return the sequence length: two positions on each rank of sequence parallelism, or three without it; and two in
    each chunk of context parallelism.
    """
    c, shards = parallel.context_parallel_size, parallel.sequence_shards
    unit = lcm(2 * c, c * shards) if c > 1 else shards
    return unit * min(2, s // unit) if unit > 1 else min(s, 3)


def shrink_heads(full: ModelConfig, t: int) -> tuple[int, int | None]:
    """Return the numbers of heads of queries, and of keys and values.

    A rank has two of each, if it has several in the run, and a group has two. Where there are fewer groups than ranks,
    there are as many as in the run, and as many copies of each.
    """
    if full.num_query_groups is None or full.groups <= t:
        return t * min(2, full.num_attention_heads // t), full.num_query_groups
    groups = t * min(2, full.groups // t)
    return groups * min(2, full.num_attention_heads // full.groups), groups


def shrink_head(full: ModelConfig) -> int:
    """Return the smallest size of a head of which rope rotates pairs, and all or a part as in the run."""
    if full.position_embedding_type != "rope":
        return min(full.head_size, 2)
    rotated = {size: int(size * full.rotary_percent) for size in range(2, full.head_size)}
    return next((size for size, pairs in rotated.items() if pairs > 0 and pairs % 2 == 0
                 and (pairs < size) == (full.rotary_size < full.head_size)), full.head_size)


def shrink_experts(full: ExpertsConfig | None, parallel: ParallelConfig) -> ExpertsConfig | None:
    """Return the experts: two on each rank, of two columns on each of t ranks, of which each token has as many as in
    the run, up to three.
    """
    if full is None:
        return None
    t, e = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    n = e * min(2, full.num_experts // e)
    k = min(full.moe_router_topk, n, 3)
    return replace(full, num_experts=n, moe_router_topk=k, moe_ffn_hidden_size=2 * t,
                   moe_router_pre_softmax=full.moe_router_pre_softmax or k == 1,
                   moe_shared_expert_intermediate_size=full.moe_shared_expert_intermediate_size and 2 * t)


def shrink_vocabulary(full: ModelConfig, t: int) -> int:
    """Return the vocabulary's size: as many ranks as in the run hold only padding, and one more in part if one does."""
    shard = full.padded_vocab_size(t) // t
    ranks, words = divmod(t * shard - full.vocab_size, shard)
    return words_of_rank(t) * (t - ranks) - (words > 0)


def words_of_rank(t: int) -> int:
    """Return the number of words on each rank, padding included: three, or more where ranks are few."""
    return max(3, 8 // t)


def shrink_bucket(full: ModelConfig, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the bucket size that makes about as many buckets as in the run."""
    (large, *_), (small, *_) = layouts_of_ranks(full, parallel), layouts_of_ranks(model, parallel)
    return max(1, round(parallel.ddp_bucket_size * small.size / large.size))


def check_small(sizes: ProofSizes) -> None:
    """Raise UserError for a proof that would take hours."""
    h = sizes.model.hidden_size
    if h > MOST_HIDDEN:
        raise UserError(f"The smallest model that keeps the structure of yours has a hidden size of {h}, but a proof "
                        f"takes at most {MOST_HIDDEN}, since its numbers are slow. Choose a smaller "
                        "--tensor-model-parallel-size, or a larger --rotary-percent.")
    tokens = sizes.global_batch_size * sizes.seq_length
    work = 36 * tokens * h * h * sizes.model.num_layers
    if work > MOST_WORK:
        raise UserError(f"The smallest step that keeps the structure of yours takes {work:.0e} multiplications, but a "
                        f"proof takes at most {MOST_WORK:.0e}, since its numbers are slow. Choose fewer ranks, or a "
                        "smaller --global-batch-size.")
