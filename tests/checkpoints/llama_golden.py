"""The results of transformers' Llama, Mistral, Qwen 2 and 3: `python -m tests.checkpoints.llama_golden` writes them.

Weights are a function of their name and index, so the file has none: only the config.json that transformers wrote, the
names and shapes of the tensors, and what came out: logits, loss and gradients, and the weights after three steps.
"""
import copy
import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.checkpoints.gpt2_golden import compute, direction, weight

GOLDEN = Path(__file__).with_suffix(".json")
SIZES = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 11,
         "intermediate_size": 12, "max_position_embeddings": 6, "bos_token_id": 10, "eos_token_id": 10,
         "pad_token_id": None}
ROPE = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}
KINDS = {"Llama": {"rope_parameters": ROPE, "head_dim": 8},
         "Mistral": {"sliding_window": None, "num_key_value_heads": 1},
         "Qwen2": {"tie_word_embeddings": True}, "Qwen3": {"head_dim": 6, "tie_word_embeddings": True}}
TOKENS = [[3, 1, 4, 1, 5], [2, 6, 5, 3, 5], [9, 7, 9, 3, 2], [10, 8, 4, 6, 0]]
STEPS, RATE, DECAY = 3, 1e-2, 0.1


def golden_of(name: str, kind: dict) -> dict:
    """Compute the golden entry of one kind of model."""
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES | kind)
    kind_of_model = getattr(transformers, f"{name}ForCausalLM")
    with tempfile.TemporaryDirectory() as folder:
        kind_of_model(config).double().save_pretrained(folder)
        written, file = json.loads(Path(folder, "config.json").read_text()), Path(folder, "model.safetensors")
        tensors = {tensor: weight(tensor, x.shape) for tensor, x in sorted(load_file(file).items())}
        save_file(tensors, file, {"format": "pt"})
        model = in_float64(kind_of_model.from_pretrained(folder, dtype=torch.float64))
    logits, loss, gradients = compute(model, TOKENS)
    after = learn(model, [TOKENS] * STEPS)

    def along(arrays):
        return {tensor: float((x * direction(tensor, x.shape)).sum())
                for tensor, x in sorted(as_in_files(model, arrays).items())}

    return {"config": written, "tensors": {tensor: list(x.shape) for tensor, x in tensors.items()}, "loss": loss,
            "logits": logits[0].tolist(), "gradients": along(gradients), "after": along(after)}


def as_in_files(model, arrays: dict) -> dict[str, np.ndarray]:
    """Return arrays, one for each parameter, as transformers would save them: it stacks experts in memory alone."""
    import torch

    other = copy.deepcopy(model)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for name, parameter in other.named_parameters():
            parameter.copy_(torch.from_numpy(arrays[name]))
        other.save_pretrained(folder)
        return load_file(Path(folder, "model.safetensors"))


def in_float64(model):
    """Return the model in float64, with all in it that transformers computes in float32: norms, rope's angles, and the
    probabilities of a router.
    """
    import torch

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight

    def angles(self, x, position_ids):
        found = position_ids[..., None].double() * self.exact
        return torch.cat([found, found], -1).cos(), torch.cat([found, found], -1).sin()

    def route(self, x):
        logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
        weights, chosen = torch.topk(logits.softmax(-1), self.top_k)
        if getattr(self, "norm_topk_prob", True):            # a Mixtral has no such choice
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    model.config._experts_implementation = "eager"       # the usual one has no float64
    for module in model.double().modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = route.__get__(module)
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm.__get__(module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.exact = frequencies(model.config, 2 * len(module.inv_freq))
            torch.testing.assert_close(module.exact, module.inv_freq.double(), rtol=1e-6, atol=0)
            module.forward = angles.__get__(module)
    return model


def frequencies(config, size: int):
    """Return rope's frequencies as transformers computes them, step by step, but in float64."""
    import torch

    rope = config.rope_parameters
    found = 1 / rope["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    if rope["rope_type"] == "default":
        return found
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, wavelength = rope["original_max_position_embeddings"], 2 * torch.pi / found
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * found / rope["factor"] + smooth * found
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    slow = torch.where(wavelength > original / low, found / rope["factor"], found)
    return torch.where(medium, smoothed, slow)


def learn(model, batches) -> dict[str, np.ndarray]:
    """Return the weights after a step of AdamW on each batch; norms and biases do not decay."""
    import torch

    groups = [{"params": [x for x in model.parameters() if (x.ndim > 1) == decays],
               "weight_decay": DECAY if decays else 0.0} for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    for tokens in batches:
        compute(model, tokens)
        optimizer.step()
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: golden_of(name, kind) for name, kind in KINDS.items()}) + "\n")
