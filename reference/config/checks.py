"""Checks of sizes and choices, each with an error sentence that names the option and what to do."""
from reference.errors import UserError

# The largest size that each option accepts: several times the largest published one, which the comment names, and small
# enough that every loop over layers, devices or divisors of a batch ends within seconds.
LARGEST = {
    "num_layers": 10_000,                       # 1,000: Wang et al. 2022 (DeepNet)
    "hidden_size": 1_000_000,                   # 25,600: Narayanan et al. 2021
    "num_attention_heads": 10_000,              # 160: the same model
    "kv_channels": 100_000,                     # 256: Chowdhery et al. 2022 (PaLM)
    "num_query_groups": 10_000,
    "ffn_hidden_size": 10_000_000,              # 102,400: Narayanan et al. 2021
    "num_experts": 10_000,                      # 2,048: Fedus et al. 2021 (Switch)
    "moe_router_topk": 10_000,
    "moe_layer_freq": 10_000,
    "moe_ffn_hidden_size": 10_000_000,
    "moe_shared_expert_intermediate_size": 10_000_000,
    "vocab_size": 1 << 31,                      # token ids are stored as int32; 256,000: Chowdhery et al. 2022 (PaLM)
    "make_vocab_size_divisible_by": 1 << 31,
    "max_position_embeddings": 100_000_000,     # 10 million: Meta 2025 (Llama 4)
    "seq_length": 100_000_000,
    "global_batch_size": 10_000_000,            # samples; 65,536: You et al. 2019 (BERT by LAMB)
    "micro_batch_size": 100_000,                # 64: Shoeybi et al. 2019
    "tensor_model_parallel_size": 10_000,       # one head a rank; 8 in the papers
    "pipeline_model_parallel_size": 1_000,      # 64: Narayanan et al. 2021
    "pipeline ranks p": 1_000,                  # the same, for a schedule alone
    "data_parallel_size": 1_000_000,
    "context_parallel_size": 10_000,            # 16: Meta 2024 (Llama 3)
    "num_gpus": 1_000_000,                      # 16,384: Meta 2024 (Llama 3)
    "muon_num_ns_steps": 1_000,                 # 5: Jordan 2024
    "train_iters": 100_000_000,                 # 2 million: Devlin et al. 2018 (BERT)
    "eval_iters": 1_000_000,
    "epochs": 10_000,
    "num_samples": 1_000_000,                   # texts for each prompt
    "tokens_to_generate": 100_000_000,
    "sample_tokens": 100_000_000,
    "batch_size": 1_000_000,                    # in the experiments with narrow models,
    "layers": 1_000,
    "seeds": 10_000,                            # and the seeds of each
    "ranks": 1_000,                             # processes that measure one machine
    "proofs": 1_000,                            # 1: it errs with a chance below 1e-19
}


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple that is not below n."""
    return -(-n // multiple) * multiple


def option(name: str) -> str:
    """Return the command line's form of a name: `hidden_size` -> `--hidden-size`, `p` -> `-p`. A formula stays."""
    dashes = "-" if len(name) == 1 else "--"
    return name if " " in name else dashes + name.replace("_", "-")


def require_positive(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{option(name)} is {value}, but must be at least 1.")
    require_not_too_large(name, value)


def require_not_negative(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise UserError(f"{option(name)} is {value}, but must be a number that is not negative.")
    require_not_too_large(name, value)


def require_not_too_large(name: str, value: float) -> None:
    if name in LARGEST and value > LARGEST[name]:
        raise UserError(f"{option(name)} is {value:,}, but must be at most {LARGEST[name]:,}, which is several times "
                        "the largest in use. Choose a smaller one.")


def require_divides(part: str, part_value: int, whole: str, whole_value: int, why: str) -> None:
    if whole_value % part_value:
        divisors = [n for n in range(1, min(whole_value, 1024) + 1) if whole_value % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - part_value))[:4])
        raise UserError(f"{option(part)} is {part_value}, but must divide {option(whole)}, which is {whole_value}. "
                        f"{why} Near {part_value}, these divide it: {', '.join(map(str, near))}.")


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{option(name)} is {value!r}, but must be one of {', '.join(choices)}.")
