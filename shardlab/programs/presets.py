"""Published models, with the settings that they were trained with, as values of options.

GPT-2s and BERTs are those of Shoeybi et al. 2019 (1909.08053).

Sizes of GPT-2s are those of the scaling study (table 1, heads of 96), but for 355M, the smallest of those that were
trained (table 2; there the largest has 24 heads). BERTs have heads of 64 (table 4). The rest is section 4.2, and for
BERT what Devlin et al. 2018 have: dropout 0.1, 512 positions.

Llamas are those of Meta 2024 (2407.21783, table 3: Llama 3), Zhang et al. 2024 (2401.02385: TinyLlama), Allal et al.
2025 (2502.02737: SmolLM2) and Yang et al. 2025 (2505.09388: Qwen 3); Mixtral is that of Jiang et al. 2024 (2401.04088).
Sizes are those of the published checkpoints. Of Qwen's and Mixtral's training no batches or rates are published: theirs
are a Llama's of that size.

A preset says nothing of where it runs. The tensor parallelism of the paper for 1.2B, 2.5B, 4.2B and 8.3B is 1, 2, 4, 8.
"""
from typing import Any

# Of all models: mixed precision, activations of every layer recomputed, AdamW, and the norm clipped.
COMMON = {"fp16": True, "recompute_granularity": "full", "init_method_std": 0.02, "hidden_dropout": 0.1,
          "attention_dropout": 0.1, "weight_decay": 0.01, "clip_grad": 1.0, "make_vocab_size_divisible_by": 128}

GPT2 = COMMON | {"seq_length": 1024, "max_position_embeddings": 1024, "micro_batch_size": 8, "global_batch_size": 512,
                 "train_iters": 300_000, "lr": 1.5e-4, "min_lr": 1e-5, "lr_decay_style": "cosine",
                 "lr_warmup_iters": 3_000, "tokenizer_type": "GPT2BPETokenizer"}

BERT = COMMON | {"seq_length": 512, "max_position_embeddings": 512, "micro_batch_size": 4, "global_batch_size": 1024,
                 "train_iters": 2_000_000, "lr": 1e-4, "lr_decay_style": "linear", "lr_warmup_iters": 10_000,
                 "tokenizer_type": "BertWordPieceLowerCase"}


# Of the Llama family: no biases, no dropout, rope, RMS norms, a gate, and untied logits unless a model says otherwise.
LLAMA = {"bf16": True, "normalization": "RMSNorm", "layernorm_epsilon": 1e-5, "swiglu": True,
         "disable_bias_linear": True, "group_query_attention": True, "position_embedding_type": "rope",
         "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
         "weight_decay": 0.1, "clip_grad": 1.0, "adam_beta2": 0.95, "lr_decay_style": "cosine", "micro_batch_size": 1}
LLAMA_3 = LLAMA | {"rotary_base": 500_000.0, "seq_length": 8192, "max_position_embeddings": 8192,
                   "train_iters": 1_200_000, "lr_warmup_iters": 8_000}


def llama(ffn: int, groups: int, batch: int, lr: float, min_lr: float) -> dict[str, Any]:
    """Return the sizes that a GPT-2 does not have, the batch in samples, and the learning rates."""
    return {"ffn_hidden_size": ffn, "num_query_groups": groups, "global_batch_size": batch, "lr": lr, "min_lr": min_lr}


def sizes(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}


# Tokens of the models that bring a tokenizer.json of their own.
VOCABULARIES = {"smollm2-135m": 49_152, "tinyllama-1.1b": 32_000, "llama3-8b": 128_256, "llama3-70b": 128_256,
                "llama3-405b": 128_256, "qwen3-0.6b": 151_936, "mixtral-8x7b": 32_000}
# Of other models, padded: GPT-2's 50,257 to a multiple of 1,024, as in the papers; BERT's 30,522 to one of 128, by us.
VOCABULARY = {"gpt": 51_200, "bert": 30_592}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {       # by architecture and name
    "gpt": {"gpt2-355m": GPT2 | sizes(24, 1024, 16), "gpt2-1.2b": GPT2 | sizes(40, 1536, 16),
            "gpt2-2.5b": GPT2 | sizes(54, 1920, 20), "gpt2-4.2b": GPT2 | sizes(64, 2304, 24),
            "gpt2-8.3b": GPT2 | sizes(72, 3072, 32),
            "smollm2-135m": LLAMA | sizes(30, 576, 9) | llama(1536, 3, 1024, 3e-3, 0.0) | {
                "rotary_base": 100_000.0, "seq_length": 2048, "max_position_embeddings": 2048,
                "untie_embeddings_and_output_weights": False, "train_iters": 1_000_000, "lr_warmup_iters": 2_000},
            "tinyllama-1.1b": LLAMA | sizes(22, 2048, 32) | llama(5632, 4, 1024, 4e-4, 4e-5) | {
                "seq_length": 2048, "max_position_embeddings": 2048, "train_iters": 1_430_000,
                "lr_warmup_iters": 2_000},
            "llama3-8b": LLAMA_3 | sizes(32, 4096, 32) | llama(14_336, 8, 2048, 3e-4, 3e-6),
            "llama3-70b": LLAMA_3 | sizes(80, 8192, 64) | llama(28_672, 8, 2048, 1.5e-4, 1.5e-6),
            "llama3-405b": LLAMA_3 | sizes(126, 16_384, 128) | llama(53_248, 8, 2048, 8e-5, 8e-7),
            "qwen3-0.6b": LLAMA | sizes(28, 1024, 16) | llama(3072, 8, 1024, 3e-4, 3e-5) | {
                "kv_channels": 128, "qk_layernorm": True, "rotary_base": 1_000_000.0, "layernorm_epsilon": 1e-6,
                "untie_embeddings_and_output_weights": False, "seq_length": 4096, "max_position_embeddings": 4096,
                "train_iters": 1_000_000},
            "mixtral-8x7b": LLAMA | sizes(32, 4096, 32) | llama(14_336, 8, 512, 3e-4, 3e-6) | {
                "num_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.02, "rotary_base": 1_000_000.0,
                "seq_length": 32_768, "max_position_embeddings": 32_768, "train_iters": 1_000_000}},
    "bert": {"bert-336m": BERT | sizes(24, 1024, 16), "bert-1.3b": BERT | sizes(24, 2048, 32),
             "bert-3.9b": BERT | sizes(48, 2560, 40) | {"train_iters": 1_500_000, "lr_decay_iters": 2_000_000}},
}
