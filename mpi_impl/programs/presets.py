"""The models of Shoeybi et al. 2019 (1909.08053), with the settings that they were trained with, as values of options.

Sizes of GPT-2s are those of the scaling study (table 1, heads of 96), but for 355M, the smallest of those that were
trained (table 2; there the largest has 24 heads). BERTs have heads of 64 (table 4). The rest is section 4.2, and for
BERT what Devlin et al. 2018 have: dropout 0.1, 512 positions.

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


def sizes(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}


PRESETS: dict[str, dict[str, dict[str, Any]]] = {       # by architecture and name
    "gpt": {"gpt2-355m": GPT2 | sizes(24, 1024, 16), "gpt2-1.2b": GPT2 | sizes(40, 1536, 16),
            "gpt2-2.5b": GPT2 | sizes(54, 1920, 20), "gpt2-4.2b": GPT2 | sizes(64, 2304, 24),
            "gpt2-8.3b": GPT2 | sizes(72, 3072, 32)},
    "bert": {"bert-336m": BERT | sizes(24, 1024, 16), "bert-1.3b": BERT | sizes(24, 2048, 32),
             "bert-3.9b": BERT | sizes(48, 2560, 40) | {"train_iters": 1_500_000, "lr_decay_iters": 2_000_000}},
}
