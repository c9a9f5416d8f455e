"""The results of transformers' GPT-2: `python -m tests.checkpoints.gpt2_golden` writes it.

Weights are a function of their name and index, so the file has none: only the config.json that transformers wrote, the
names and shapes of the tensors, and what came out.
"""
import json
import tempfile
import zlib
from math import prod
from pathlib import Path

import numpy as np
from safetensors import safe_open

GOLDEN = Path(__file__).with_suffix(".json")
SIZES = {"n_layer": 2, "n_embd": 8, "n_head": 4, "vocab_size": 11, "n_positions": 6,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 10, "eos_token_id": 10}
KINDS = {"tied": {}, "untied": {"tie_word_embeddings": False, "activation_function": "gelu",
                                "layer_norm_epsilon": 0.01}}
TOKENS = [[3, 1, 4, 1, 5], [2, 6, 5, 3, 5], [9, 7, 9, 3, 2], [10, 8, 4, 6, 0]]


def numbers(what: str, shape) -> np.ndarray:
    """Return float64 [shape], distinct numbers between -1 and 1 that depend on the name."""
    phase = zlib.crc32(what.encode()) / 2**32
    return np.sin(1000 * phase + (1 + phase) * np.arange(prod(shape))).reshape(shape)


def weight(name: str, shape) -> np.ndarray:
    return 0.7 * numbers(name, shape)


def direction(name: str, shape) -> np.ndarray:
    """Return an array whose inner product with a gradient is a number that no other gradient is likely to give."""
    return numbers(f"direction of {name}", shape)


def golden_of(kind: dict) -> dict:
    """Compute the golden entry of one kind of model: config.json, the tensors' names and shapes, logits, the loss, and
    each gradient's inner product with its direction.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**SIZES, **kind)).double()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads(Path(folder, "config.json").read_text())
        with safe_open(Path(folder, "model.safetensors"), "np") as file:
            tensors = {name: file.get_slice(name).get_shape() for name in file.keys()}   # noqa: SIM118
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, shape in tensors.items():
            parameters[name].copy_(torch.from_numpy(weight(name, shape)))
    logits, loss, gradients = compute(model, TOKENS)
    along = {name: float((gradients[name] * direction(name, shape)).sum()) for name, shape in tensors.items()}
    return {"config": config, "tensors": tensors, "loss": loss, "logits": logits[0].tolist(), "gradients": along}


def compute(model, tokens):
    """Compute with transformers: sequences [B, s + 1] -> logits [B, s, V], their mean loss, its gradients by name.

    (Its own loss rounds the logits to float32 first. So the mean is taken here, of the same logits.)
    """
    import torch

    model.zero_grad()
    tokens = torch.as_tensor(tokens)
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert abs(model(tokens, labels=tokens).loss.item() - loss.item()) < 1e-6 * max(1, loss.item())
    return (logits.detach().numpy(), loss.item(),
            {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()})


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: golden_of(kind) for name, kind in KINDS.items()}) + "\n")
