"""The models of other libraries in benchmarks/ are ours: the same loss from the same weights."""
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from reference.models.bert import bert_forward, bert_tensors
from reference.models.gpt import gpt_forward, gpt_tensors
from reference.params import initialize

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.15.0")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def contenders(monkeypatch):
    """Return the module `works`, and a function that imports a contender as if it were the only rank."""
    for folder in (BENCHMARKS, BENCHMARKS / "contenders"):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("BENCHMARK_PROCESS", "0")
    before = set(sys.modules)
    torch.set_default_dtype(torch.float64)
    yield import_module
    torch.set_default_dtype(torch.float32)
    for name in {"works", "models", "pytorch_gpt", "pytorch_gpu", "pytorch_experts", "pytorch_bert", "jax_gpt",
                 "shardlab_gpt", "gpu_times", "turns"} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.parametrize("name, kind, more", [("pytorch_gpt", "TorchGPT", {}),
                                              ("pytorch_gpt", "TorchGPT", {"g": 2}),
                                              ("pytorch_gpt", "TorchGPT", {"g": 2, "E": 4}),
                                              ("pytorch_bert", "TorchBERT", {"bert": 1})])
def test_the_same_loss_from_the_same_weights(contenders, name, kind, more):
    work = contenders("works").Work(h=32, L=2, a=4, s=6, b=2, V=128, **more)
    ours = contenders("shardlab_gpt")
    config, batch = ours.model_of(work), ours.batch_of(work)
    weights = initialize((bert_tensors if work.bert else gpt_tensors)(config), seed=1, dtype=np.float64)
    model = getattr(contenders(name), kind)(work)
    parameters = dict(model.named_parameters())
    found = as_torch(weights, work)
    assert parameters.keys() == found.keys() and sum(one.numel() for one in parameters.values()) == sum(
        one.size for one in found.values())
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(torch.as_tensor(found[key]))
        loss = float(model(*map(torch.as_tensor, as_torch_batch(batch))))
    assert loss == pytest.approx(whole_loss(weights, config, batch), rel=1e-12)


def curve(contenders, **choices) -> list[float]:
    """Return the losses of a few steps of a Mixtral, as cuda_step.py's peer trains it, on the CPU."""
    torch.set_default_dtype(torch.float32)
    work = contenders("works").Work(h=32, L=2, a=4, s=8, b=2, V=128, g=2, E=4)
    choices = {"compile": None, "weights": "float32", **choices}
    training = contenders("pytorch_gpu").Training(Namespace(work=work.argument, step_graph=True, **choices), "cpu")
    return [float(training()) for _ in range(6)]


@pytest.mark.parametrize("weights, tolerance", [("masters", 2e-3), ("bfloat16", 2e-2)])
def test_formats_of_weights_have_the_same_losses(contenders, weights, tolerance):
    losses = curve(contenders)
    assert curve(contenders, weights=weights) == pytest.approx(losses, abs=tolerance) and losses[-1] < losses[0] - 0.02


@pytest.mark.deep
@pytest.mark.parametrize("weights", ["float32", "masters"])
def test_compiled_steps_have_the_same_losses(contenders, weights):
    eager = curve(contenders, weights=weights)
    assert curve(contenders, weights=weights, compile="default") == pytest.approx(eager, abs=2e-3)


def test_jax_has_the_same_loss_from_the_same_weights(contenders):
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")
    jax.config.update("jax_enable_x64", True)
    work = contenders("works").Work(h=32, L=2, a=4, s=6, b=2, V=128)
    ours = contenders("shardlab_gpt")
    config, batch = ours.model_of(work), ours.batch_of(work)
    weights = initialize(gpt_tensors(config), seed=1, dtype=np.float64)
    found = {"word": weights.embedding.word, "position": weights.embedding.position,
             "blocks": [as_jax_block(block, work) for block in weights.blocks.values()],
             **as_jax_norm("", weights.final_layernorm)}
    loss = contenders("jax_gpt").loss_of(found, batch.tokens, batch.targets, np.float64)
    assert float(loss) == pytest.approx(whole_loss(weights, config, batch), rel=1e-8)   # softmax in float32


def as_jax_block(block, work) -> dict[str, np.ndarray]:
    attention, mlp = block.attention, block.mlp
    return {**as_jax_norm("_1", block.input_layernorm), **as_jax_norm("_2", block.post_attention_layernorm),
            "qkv": attention.w_qkv, "qkv_bias": attention.b_qkv, "out": attention.w_out.reshape(work.a, -1, work.h),
            "out_bias": attention.b_out, "w_in": mlp.w_in, "in_bias": mlp.b_in, "w_out": mlp.w_out,
            "out_bias_2": mlp.b_out}


def as_jax_norm(number: str, p) -> dict[str, np.ndarray]:
    return {f"norm{number}": p.weight, f"shift{number}": p.bias}


def whole_loss(weights, config, batch) -> float:
    """Return the textbook's loss, the sum of its heads' means."""
    if config.causal:
        return float(gpt_forward(batch.tokens, weights, config, batch.targets)[0].mean())
    losses, _ = bert_forward(None, weights, config, batch)
    return sum(float(np.average(loss, weights=weight))
               for loss, weight in zip(losses, batch.weights_of_heads(config.heads)))


def as_torch_batch(batch) -> list[np.ndarray]:
    """Return what PyTorch's model reads: a BERT's has targets of -100 where nothing is predicted."""
    if not hasattr(batch, "lengths"):
        return [batch.tokens, batch.targets]
    return [batch.tokens, batch.token_types, np.where(batch.weights, batch.targets, -100), batch.lengths, batch.swapped]


def as_torch(weights, work) -> dict[str, np.ndarray]:
    """Return the whole weights under the names, and in the layouts, of PyTorch's model."""
    found = {"word": weights.embedding.word} | norm("norm", weights.final_layernorm)
    found |= {"head": weights.output} if work.g else {"position": weights.embedding.position}
    if work.bert:
        head = weights.lm_head
        found |= {"token_type": weights.embedding.token_type, "bias": head.bias} | norm("head_norm", head.layernorm)
        for name, layer in (("dense", head.dense), ("pooler", weights.pooler), ("order", weights.binary_head)):
            found |= {f"{name}.weight": layer.w.T, f"{name}.bias": layer.b}
    for i, block in weights.blocks.items():
        attention, mlp, at = block.attention, block.mlp, f"blocks.{i}."
        found |= norm(f"{at}norm_1", block.input_layernorm) | norm(f"{at}norm_2", block.post_attention_layernorm)
        found[f"{at}out.weight"] = attention.w_out.T
        if work.g:
            qkv = np.concatenate([attention.w_q, *np.moveaxis(attention.w_kv, 1, 0)], 1)     # heads of Q, of K, of V
            found[f"{at}qkv.weight"] = matrix(qkv)
            if work.E:
                found |= {f"{at}experts.router": mlp.router, f"{at}experts.w_out": mlp.experts.w_out,
                          f"{at}experts.w_in": mlp.experts.w_in.reshape(work.E, work.h, -1)}
            else:
                found |= {f"{at}w_in.weight": matrix(mlp.w_in), f"{at}w_out.weight": mlp.w_out.T}
        else:
            found |= {f"{at}qkv.weight": matrix(attention.w_qkv), f"{at}qkv.bias": attention.b_qkv.reshape(-1),
                      f"{at}out.bias": attention.b_out, f"{at}w_in.weight": mlp.w_in.T, f"{at}w_in.bias": mlp.b_in,
                      f"{at}w_out.weight": mlp.w_out.T, f"{at}w_out.bias": mlp.b_out}
    return found


def matrix(w) -> np.ndarray:
    """Return w [h, ...] as PyTorch's [columns, h]."""
    return w.reshape(len(w), -1).T


def norm(name: str, p) -> dict[str, np.ndarray]:
    return {f"{name}.{field}": value for field, value in vars(p).items()}
