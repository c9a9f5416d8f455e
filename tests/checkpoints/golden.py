"""The results of transformers' models, of each kind that we read: `python -m tests.checkpoints.golden` writes them.

Weights are a function of their name and index, so the file has none: only the config.json that transformers wrote, the
names and shapes of the tensors, and what came out: losses and gradients, of GPTs the logits of the first sequence, and
where rope is used the weights after three steps. (Without the load-balancing loss: transformers' is
over the tokens of all layers together.)
"""
import copy
import json
import tempfile
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from reference.batches import CHOICES, BERTBatch, ChoiceBatch, GPTBatch

GOLDEN = Path(__file__).with_suffix(".json")
ENDS = {"bos_token_id": 10, "eos_token_id": 10}
GPT2 = {"n_layer": 2, "n_embd": 8, "n_head": 4, "vocab_size": 11, "n_positions": 6, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, **ENDS}
SIZES = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "vocab_size": 11}
BERT = SIZES | {"intermediate_size": 32, "max_position_embeddings": 7, "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0}
LLAMA = SIZES | {"num_key_value_heads": 2, "intermediate_size": 12, "max_position_embeddings": 6, **ENDS,
                 "pad_token_id": None}
ROPE = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}
KINDS: dict[str, tuple[str, dict]] = {      # transformers' class, and its configuration
    "tied": ("GPT2LMHeadModel", GPT2),
    "untied": ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu",
                                          "layer_norm_epsilon": 0.01}),
    "original": ("BertForPreTraining", BERT),
    "rearranged": ("MegatronBertForPreTraining", BERT),
    "words alone": ("MegatronBertForMaskedLM", BERT | {"hidden_act": "relu", "layer_norm_eps": 0.01}),
    "choices": ("BertForMultipleChoice", BERT | {"hidden_act": "gelu_new"}),
    "Llama": ("LlamaForCausalLM", LLAMA | {"rope_parameters": ROPE, "head_dim": 8}),
    "Mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": None, "num_key_value_heads": 1}),
    "Qwen2": ("Qwen2ForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 6, "tie_word_embeddings": True}),
    "Mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2,
                                               "tie_word_embeddings": True}),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", LLAMA | {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 6,
                                                 "moe_intermediate_size": 8, "norm_topk_prob": False}),
}
FAMILIES = [["tied", "untied"], ["choices", "original", "rearranged", "words alone"],
            ["Llama", "Mistral", "Qwen2", "Qwen3"], ["Mixtral", "Qwen3Moe"]]
HEADS = {"BertForPreTraining": ("lm", "sop"), "MegatronBertForPreTraining": ("lm", "sop"), "BertForMaskedLM": ("lm",),
         "MegatronBertForMaskedLM": ("lm",), "BertForMultipleChoice": ("choice",),
         "MegatronBertForMultipleChoice": ("choice",)}       # of BERTs; any other model has "lm" alone
TOKENS = [[3, 1, 4, 1, 5], [2, 6, 5, 3, 5], [9, 7, 9, 3, 2], [10, 8, 4, 6, 0]]
STEPS, RATE, DECAY = 3, 1e-2, 0.1


def numbers(what: str, shape) -> np.ndarray:
    """Return float64 [shape], distinct numbers between -1 and 1 that depend on the name."""
    phase = zlib.crc32(what.encode()) / 2**32
    return np.sin(1000 * phase + (1 + phase) * np.arange(prod(shape))).reshape(shape)


def weight(name: str, shape) -> np.ndarray:
    return 0.7 * numbers(name, shape)


def along(name: str, x) -> float:
    """Return an array's inner product with a direction of its name: a number that no other array is likely to give."""
    return float((x * numbers(f"direction of {name}", x.shape)).sum())


def golden_batch(class_name: str) -> Any:
    """Return four sequences of tokens; or of a BERT four samples of up to six tokens, or four questions, with two
    segments, masks and padding.
    """
    if class_name not in HEADS:
        return GPTBatch.unpack(np.array(TOKENS))
    b, s = 4 * (CHOICES if "choice" in HEADS[class_name] else 1), 6
    row, column = np.arange(b)[:, None], np.arange(s)[None]
    lengths = 6 - np.arange(b) % 3
    real = column < lengths[:, None]
    tokens = np.where(real, 1 + (7 * row + 3 * column + row * column**2) % 10, 0)       # 0 is padding, as transformers
    types = np.where(real, column > 2 - row % 2, 0)                                     # has it, and has no gradient
    if "choice" in HEADS[class_name]:
        return ChoiceBatch(tokens, types, lengths, np.array([2, 0, 3, 1]), np.ones(4, np.int64))
    return BERTBatch(tokens, types, (tokens + 5 + column) % 11, (real & ((row + column) % 2 > 0)).astype(np.int64),
                     lengths, np.arange(b) // 2 % 2)


def golden_of(class_name: str, choices: dict) -> dict:
    """Compute the golden entry of one kind of model."""
    import torch
    import transformers

    kind = getattr(transformers, class_name)
    with tempfile.TemporaryDirectory() as folder:
        kind(kind.config_class(**choices)).double().save_pretrained(folder)
        config, file = json.loads(Path(folder, "config.json").read_text()), Path(folder, "model.safetensors")
        tensors = {tensor: weight(tensor, x.shape) for tensor, x in sorted(load_file(file).items())}
        save_file(tensors, file, {"format": "pt"})
        model = in_float64(kind.from_pretrained(folder, dtype=torch.float64))
    batch = golden_batch(class_name)
    logits, losses, gradients = compute(model, batch)
    found = {"config": config, "tensors": {tensor: list(x.shape) for tensor, x in tensors.items()}, "losses": losses,
             "gradients": {tensor: along(tensor, x) for tensor, x in as_in_files(model, gradients).items()}}
    if class_name not in HEADS:
        found["logits"] = logits["lm"][0].tolist()
    if choices.keys() >= LLAMA.keys():
        after = as_in_files(model, learn(model, [batch] * STEPS))
        found["after"] = {tensor: along(tensor, x) for tensor, x in after.items()}
    return found


def as_in_files(model, arrays: dict) -> dict[str, np.ndarray]:
    """Return arrays, one for each parameter, as transformers would save them: it stacks experts in memory alone."""
    import torch

    other = copy.deepcopy(model)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for name, parameter in other.named_parameters():
            parameter.copy_(torch.from_numpy(arrays[name]))
        other.save_pretrained(folder)
        return dict(sorted(load_file(Path(folder, "model.safetensors")).items()))


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


def compute(model, batch) -> tuple[dict[str, np.ndarray], list[float], dict[str, np.ndarray]]:
    """Compute the logits of each head, its weighted mean loss, and the gradients of their sum, by name."""
    import torch

    model.zero_grad()
    heads, (rows, s) = HEADS.get(type(model).__name__, ("lm",)), batch.tokens.shape
    inputs = {"input_ids": batch.tokens}
    if not isinstance(batch, GPTBatch):
        inputs |= {"token_type_ids": batch.token_types,
                   "attention_mask": (np.arange(s) < batch.lengths[:, None]).astype(int)}
    shape = (-1, CHOICES, s) if "choice" in heads else (rows, s)
    inputs = {name: torch.as_tensor(x).reshape(shape) for name, x in inputs.items()}
    out = model(**inputs)
    found = [out.prediction_logits, out.seq_relationship_logits] if len(heads) == 2 else [out.logits]
    answers = {"lm": getattr(batch, "targets", None), "sop": getattr(batch, "swapped", None),
               "choice": getattr(batch, "answers", None)}
    losses = []
    for head, logits, weights in zip(heads, found, batch.weights_of_heads(heads), strict=True):
        each = torch.nn.functional.cross_entropy(logits.flatten(0, -2), torch.as_tensor(answers[head]).flatten(),
                                                 reduction="none")
        losses.append((each * torch.as_tensor(weights).flatten()).sum() / max(1, weights.sum()))
    sum(losses).backward()
    return ({head: logits.detach().numpy() for head, logits in zip(heads, found)}, [loss.item() for loss in losses],
            {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()})


def learn(model, batches) -> dict[str, np.ndarray]:
    """Return the weights after a step of AdamW on each batch; norms and biases do not decay."""
    import torch

    groups = [{"params": [x for x in model.parameters() if (x.ndim > 1) == decays],
               "weight_decay": DECAY if decays else 0.0} for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    for batch in batches:
        compute(model, batch)
        optimizer.step()
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({kind: golden_of(*made) for kind, made in KINDS.items()}) + "\n")
