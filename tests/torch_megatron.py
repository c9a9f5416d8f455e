"""A GPT of Megatron-core on gloo ranks, with tensor parallelism: torch_megatron.py FOLDER [BUG].

It needs no GPU: the model is made on the CPU, in float64, without Transformer Engine, which sequence and context
parallelism would need. The recorder is next to this file, as `shardlab recorder` prints it.
"""
from contextlib import nullcontext

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from shardlab_recorder import Recorder
from torch_training import on_ranks

V, S, B, STEPS = 32, 8, 2, 3

# Megatron's activations are [s, b, h]. A column-parallel linear's outputs are divided, and a row-parallel one's inputs.
DIMS = {
    "batch .*|forward (embedding|.*_embeddings|root) input|(forward|backward) root output": "b s",
    "(forward|backward) .*(linear_qkv|linear_fc1|core_attention|output_layer) output": "s b h[tp]",
    "(forward|backward) .*(linear_proj|linear_fc2) input": "s b h[tp]",
    "(forward|backward) .*(core_attention input|[qk]_layernorm (in|out)put)": "s b heads[tp] d",
    "(forward|backward) .*(scale_mask_softmax|attention_dropout) (in|out)put": "b heads[tp] s keys",
    "(forward|backward) .*(word|position)_embeddings output": "b s h",
    "(forward|backward) (embedding|decoder|output_layer)(|[.].*) (in|out)put": "s b h"}


def model_of(ranks, bug):
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()        # its states are a GPU's, and nothing is dropped
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, tensor_model_parallel_size=ranks, hidden_dropout=0,
        attention_dropout=0, use_cpu_initialization=True, params_dtype=torch.float64, pipeline_dtype=torch.float64,
        masked_softmax_fusion=False, bias_activation_fusion=False, gradient_accumulation_fusion=False)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=V, max_sequence_length=S,
                     share_embeddings_and_output_weights=False)
    if bug == "input_gradient_not_summed":
        linear = model.decoder.layers[1].mlp.linear_fc1
        linear.allreduce_dgrad, linear.disable_grad_reduce = False, True
    return model


def train(rank, ranks, folder, bug=""):
    torch.manual_seed(0)
    model = model_of(ranks, bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    axes = {"tp": parallel_state.get_tensor_model_parallel_group()}
    recorder = Recorder(folder, model, optimizer, axes=axes, dims=DIMS)
    position = torch.arange(S).expand(B, S)
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        text = torch.randint(V, (B, S + 1), generator=data)
        recorder.batch(tokens=text[:, :-1], labels=text[:, 1:])
        model(text[:, :-1], position, hidden, labels=text[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    on_ranks(train)
