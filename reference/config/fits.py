"""Checks that a model, a sequence and a batch can be divided among the ranks."""
from math import lcm

from reference.config.checks import option, require_divides, require_positive
from reference.config.model_config import ModelConfig
from reference.config.parallel_config import ParallelConfig
from reference.errors import UserError


def check_model_fits(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise UserError unless every tensor-parallel rank gets whole heads, and as many columns of the MLP as others."""
    t, g = parallel.tensor_model_parallel_size, model.groups
    require_divides("tensor_model_parallel_size", t, "num_attention_heads", model.num_attention_heads,
                    "A rank holds whole attention heads.")
    if g % t and t % g:
        raise UserError(f"--tensor-model-parallel-size is {t} and --num-query-groups is {g}, but one must divide the "
                        "other: a rank holds whole heads of keys and values, or several ranks hold the same one. "
                        f"Near {t}, these do: {nearest(t, model)}.")
    require_divides("tensor_model_parallel_size", t, "hidden_size", model.hidden_size,
                    "Each rank sends 1/t of an activation to the next stage.")
    require_divides("tensor_model_parallel_size", t, "ffn_hidden_size", model.ffn_size,
                    "Every rank has the same number of columns of the MLP.")
    if parallel.cp_comm_type == "a2a":
        check_exchange_fits(model, t, parallel.context_parallel_size)
    check_experts_fit(model, parallel)
    if model.share_layers and parallel.zero_stage == 3:
        raise UserError("--zero-stage 3 gathers the parameters of a layer before its use and frees them after it, but "
                        "with --share-layers every layer uses the same ones, so that none could be freed before the "
                        "last. Choose --zero-stage 2, or leave --share-layers out.")


def check_exchange_fits(model: ModelConfig, t: int, c: int) -> None:
    """Raise UserError unless a rank's heads, of keys and values too, can be dealt out to c ranks."""
    name = "num_attention_heads" if model.num_query_groups is None else "num_query_groups"
    heads, unit = model.groups, t * c
    if heads % unit:
        fit = [n for n in range(2, heads // t + 1) if heads % (t * n) == 0]
        smaller = f"choose --context-parallel-size {' or '.join(map(str, fit))}, or " if fit else ""
        raise UserError(f"--cp-comm-type a2a deals out the heads of a rank to --context-parallel-size {c} ranks, so "
                        f"{option(name)} must be a multiple of --tensor-model-parallel-size {t} x {c} = {unit}, but is "
                        f"{heads}. The nearest that fits is {nearest_multiple(heads, unit)}; {smaller}choose p2p or "
                        "all_gather.")


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


def nearest(t: int, model: ModelConfig) -> str:
    """Return the tensor-parallel sizes near t that divide the heads, and fit the groups."""
    heads, g = model.num_attention_heads, model.groups
    fit = [n for n in range(1, min(heads, 1024) + 1) if heads % n == 0 and (g % n == 0 or n % g == 0)]
    return ", ".join(map(str, sorted(sorted(fit, key=lambda n: abs(n - t))[:4])))


def check_sequence_fits(seq_length: int, parallel: ParallelConfig) -> None:
    """Raise UserError unless context and sequence parallelism give every rank the same number of positions."""
    t, c = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    unit = lcm(2 * c, c * t if parallel.sequence_parallel else 1)
    if c > 1 and seq_length % unit:
        sharded = f", of which --sequence-parallel gives each of {t} ranks the same part" if unit > 2 * c else ""
        raise UserError(f"--seq-length is {seq_length}, but must be a multiple of {unit}: --context-parallel-size {c} "
                        f"deals out {2 * c} chunks of one size, two to each rank{sharded}. The nearest that fits is "
                        f"{nearest_multiple(seq_length, unit)}.")
    if parallel.sequence_parallel:
        require_divides("tensor_model_parallel_size", parallel.tensor_model_parallel_size, "seq_length", seq_length,
                        "With --sequence-parallel every rank has the same number of positions.")


def nearest_multiple(n: int, unit: int) -> int:
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
                        f"The nearest that fits is {nearest_multiple(global_batch_size, together)}.")
    return global_batch_size // together
