"""The results of transformers' Mixtral and Qwen 3 with experts, as llama_golden.py has those of models without:
`python -m tests.checkpoints.mixtral_golden` writes them.

The load-balancing loss is left out: transformers' is another one than ours, over the tokens of all layers together.
"""
import json
from pathlib import Path

from tests.checkpoints.llama_golden import golden_of

GOLDEN = Path(__file__).with_suffix(".json")
KINDS = {"Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
         "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "head_dim": 6,
                      "norm_topk_prob": False}}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: golden_of(name, kind) for name, kind in KINDS.items()}) + "\n")
