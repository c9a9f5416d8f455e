"""Checks that a model, a sequence and a batch can be divided among the ranks."""
from math import lcm

from reference.config.checks import require_divides, require_positive
from reference.config.model_config import ModelConfig
from reference.config.parallel_config import ParallelConfig
from reference.errors import UserError


def check_model_fits(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise UserError unless every tensor-parallel rank gets whole heads (and so 4h/t columns of the MLP)."""
    t, c = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    require_divides("tensor_model_parallel_size", t, "num_attention_heads", model.num_attention_heads,
                    "A rank holds whole attention heads, and 4h/t columns of the MLP.")
    heads = model.num_attention_heads
    if parallel.cp_comm_type == "a2a" and heads % (t * c):
        fit = [n for n in range(2, heads // t + 1) if heads // t % n == 0]
        smaller = f"choose --context-parallel-size {' or '.join(map(str, fit))}, or " if fit else ""
        raise UserError(f"--cp-comm-type a2a deals out a rank's attention heads to --context-parallel-size {c} ranks, "
                        f"so --num-attention-heads must be a multiple of --tensor-model-parallel-size {t} x {c} = "
                        f"{t * c}, but is {heads}. The nearest that fits is {nearest(heads, t * c)}; {smaller}choose "
                        "p2p or all_gather.")
    check_experts_fit(model, parallel)


def check_experts_fit(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise UserError unless experts can be dealt out to e ranks, and each of them split over t."""
    t, e, experts = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size, model.experts
    if experts is None:
        if e > 1:
            raise UserError(f"--expert-model-parallel-size is {e}, but the model has no experts. Give --num-experts, a "
                            "multiple of it, or leave it out.")
        return
    require_divides("expert_model_parallel_size", e, "num_experts", experts.num_experts,
                    "Every rank has the same number of experts.")
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if getattr(experts, name):
            require_divides("tensor_model_parallel_size", t, name, getattr(experts, name),
                            "Every rank has the same number of columns of each expert.")


def check_sequence_fits(seq_length: int, parallel: ParallelConfig) -> None:
    """Raise UserError unless context and sequence parallelism give every rank the same number of positions."""
    t, c = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    unit = lcm(2 * c, c * t if parallel.sequence_parallel else 1)
    if c > 1 and seq_length % unit:
        sharded = f", of which --sequence-parallel gives each of {t} ranks the same part" if unit > 2 * c else ""
        raise UserError(f"--seq-length is {seq_length}, but must be a multiple of {unit}: --context-parallel-size {c} "
                        f"deals out {2 * c} chunks of one size, two to each rank{sharded}. The nearest that fits is "
                        f"{nearest(seq_length, unit)}.")
    if parallel.sequence_parallel:
        require_divides("tensor_model_parallel_size", parallel.tensor_model_parallel_size, "seq_length", seq_length,
                        "With --sequence-parallel every rank has the same number of positions.")


def nearest(n: int, unit: int) -> int:
    """Return the multiple of the unit that is nearest to n, and not 0."""
    return max(1, round(n / unit)) * unit


def number_of_microbatches(global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> int:
    """Return m = B / (b d), the number of microbatches that each replica processes one after another in a step."""
    for name, value in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
        require_positive(name, value)
    together = micro_batch_size * data_parallel_size
    if global_batch_size % together:
        raise UserError(f"--global-batch-size is {global_batch_size}, but must be a multiple of --micro-batch-size x "
                        f"data-parallel size = {micro_batch_size} x {data_parallel_size} = {together}. "
                        f"The nearest that fits is {nearest(global_batch_size, together)}.")
    return global_batch_size // together
