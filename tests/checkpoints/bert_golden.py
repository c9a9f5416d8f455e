"""The results of transformers' BERTs: `python -m tests.checkpoints.bert_golden` writes it.

As gpt2_golden.py does: weights are a function of their name and index, so the file has none.
"""
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from reference.batches import CHOICES, BERTBatch, ChoiceBatch
from tests.checkpoints.gpt2_golden import direction, weight

GOLDEN = Path(__file__).with_suffix(".json")
SIZES = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "vocab_size": 11, "intermediate_size": 32,
         "max_position_embeddings": 7, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
KINDS: dict[str, tuple[str, dict]] = {
    "original": ("BertForPreTraining", {}),
    "rearranged": ("MegatronBertForPreTraining", {}),
    "words alone": ("MegatronBertForMaskedLM", {"hidden_act": "relu", "layer_norm_eps": 0.01}),
    "choices": ("BertForMultipleChoice", {"hidden_act": "gelu_new"}),
}
HEADS = {"BertForPreTraining": ("lm", "sop"), "MegatronBertForPreTraining": ("lm", "sop"), "BertForMaskedLM": ("lm",),
         "MegatronBertForMaskedLM": ("lm",), "BertForMultipleChoice": ("choice",),
         "MegatronBertForMultipleChoice": ("choice",)}


def golden_batch(heads) -> Any:
    """Return four samples of up to six tokens, or four questions, with two segments, masks and padding."""
    b, s = 4 * (CHOICES if "choice" in heads else 1), 6
    row, column = np.arange(b)[:, None], np.arange(s)[None]
    lengths = 6 - np.arange(b) % 3
    real = column < lengths[:, None]
    tokens = np.where(real, 1 + (7 * row + 3 * column + row * column**2) % 10, 0)       # 0 is padding, as transformers
    types = np.where(real, column > 2 - row % 2, 0)                                     # has it, and has no gradient
    if "choice" in heads:
        return ChoiceBatch(tokens, types, lengths, np.array([2, 0, 3, 1]), np.ones(4, np.int64))
    return BERTBatch(tokens, types, (tokens + 5 + column) % 11, (real & ((row + column) % 2 > 0)).astype(np.int64),
                     lengths, np.arange(b) // 2 % 2)


def golden_of(name: str, choices: dict) -> dict:
    """Compute the golden entry of one kind of model: config.json, the tensors' names and shapes, logits, losses, and
    each gradient's inner product with its direction.
    """
    import torch
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES, **choices)).double()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads(Path(folder, "config.json").read_text())
        with safe_open(Path(folder, "model.safetensors"), "np") as file:
            tensors = {name: file.get_slice(name).get_shape() for name in file.keys()}   # noqa: SIM118
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for tensor, shape in tensors.items():
            parameters[tensor].copy_(torch.from_numpy(weight(tensor, shape)))
    logits, losses, gradients = compute(model, golden_batch(HEADS[name]))
    along = {tensor: float((gradients[tensor] * direction(tensor, shape)).sum()) for tensor, shape in tensors.items()}
    return {"config": config, "tensors": tensors, "losses": losses, "gradients": along,
            "logits": {head: x.tolist() for head, x in logits.items()}}


def compute(model, batch) -> tuple[dict[str, np.ndarray], list[float], dict[str, np.ndarray]]:
    """Compute the logits of each head, its weighted mean loss, and the gradients of their sum, by name."""
    import torch

    model.zero_grad()
    heads, (rows, s) = HEADS[type(model).__name__], batch.tokens.shape
    shape = (-1, CHOICES, s) if "choice" in heads else (rows, s)
    mask = np.arange(s) < batch.lengths[:, None]
    out = model(**{name: torch.as_tensor(x).reshape(shape) for name, x in (
        ("input_ids", batch.tokens), ("token_type_ids", batch.token_types), ("attention_mask", mask.astype(int)))})
    found = [out.prediction_logits, out.seq_relationship_logits] if len(heads) == 2 else [out.logits]
    answers = {"lm": getattr(batch, "targets", None), "sop": getattr(batch, "swapped", None),
               "choice": getattr(batch, "answers", None)}
    losses = []
    for head, logits, weights in zip(heads, found, batch.weights_of_heads(heads), strict=True):
        each = torch.nn.functional.cross_entropy(logits.flatten(0, -2), torch.as_tensor(answers[head]).flatten(),
                                                 reduction="none")
        losses.append((each * torch.as_tensor(weights).flatten()).sum() / max(1, weights.sum()))
    sum(losses).backward()
    check_loss(model, out, batch, sum(losses).item())
    return ({head: logits.detach().numpy() for head, logits in zip(heads, found)}, [loss.item() for loss in losses],
            {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()})


def check_loss(model, out, batch, loss: float) -> None:
    """Check that our loss of a BERTBatch is the loss that transformers itself reports, where there is a token to
    predict.
    """
    import torch

    if isinstance(batch, ChoiceBatch) or not batch.weights.any():
        return
    labels = torch.as_tensor(np.where(batch.weights, batch.targets, -100))
    order = {"next_sentence_label": torch.as_tensor(batch.swapped)} if "seq_relationship_logits" in out else {}
    mask = torch.as_tensor((np.arange(labels.shape[1]) < batch.lengths[:, None]).astype(int))
    theirs = model(torch.as_tensor(batch.tokens), attention_mask=mask, labels=labels,
                   token_type_ids=torch.as_tensor(batch.token_types), **order).loss.item()
    assert abs(theirs - loss) < 1e-10 * max(1, loss)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({kind: golden_of(*made) for kind, made in KINDS.items()}) + "\n")
