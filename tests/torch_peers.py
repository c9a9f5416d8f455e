"""Training programs that accumulate gradients: torch_peers.py RANK RANKS PORT PROGRAM FOLDER.

nanoGPT and picotron are imported from checkouts, which SHARDLAB_NANOGPT and SHARDLAB_PICOTRON name; `ours` has their
shape. Before data-parallel training rank 0 alone evaluates. Each program is recorded as it is, in FOLDER/right, and
with each of its bugs; on one rank only as it is.
"""
import os
import sys
from functools import partial
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shardlab_recorder import Recorder
from torch.nn.parallel import DistributedDataParallel
from torch_training import GPT, B, H, S, V

MICRO_STEPS = 2
RATE = 3e-7     # of the first step of a warm-up: some weights move by their last digit
BUGS = "averaged_twice", "reduced_too_early", "targets_of_rank_0"
FLASH = ("", ".flash_attn_interface", ".layers", ".layers.rotary", ".ops", ".ops.triton", ".ops.triton.layer_norm")


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ours(ranks, way):
    model = GPT()
    model = DistributedDataParallel(model) if ranks > 1 else model
    return model, torch.optim.AdamW(model.parameters(), RATE), lambda *batch: model(*batch)["loss"], {}


def nano_gpt(ranks, way):
    sys.path.insert(0, os.environ["SHARDLAB_NANOGPT"])
    import model as theirs
    raw = theirs.GPT(theirs.GPTConfig(block_size=S, vocab_size=V, n_layer=2, n_head=2, n_embd=H))
    optimizer = raw.configure_optimizers(0.1, RATE, (0.9, 0.95), "cpu")
    model = DistributedDataParallel(raw) if ranks > 1 else raw
    return model, optimizer, lambda *batch: model(*batch)[1], {}


def picotron(ranks, way):
    from transformers import LlamaConfig  # first: it asks whether there is flash_attn
    sys.modules |= {f"flash_attn{name}": MagicMock() for name in FLASH}
    os.environ |= {"FLASH_ATTEN": "0", "DEVICE": "cpu", "DTYPE": "float32", "CONTEXT_PARALLEL": "0"}
    sys.path.insert(0, os.environ["SHARDLAB_PICOTRON"])
    from picotron import process_group_manager as groups
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama
    from picotron.tensor_parallel import tensor_parallel, tp_communications
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=2 * H, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=S)
    config.rope_theta = 10000.0
    tp = ranks if way.startswith("tp") else 1
    groups.setup_process_group_manager(tp, 1, 1, ranks // tp)
    model, about = Llama(config), {}
    whole = {name: torch.randn_like(p) * 0.2 for name, p in model.named_parameters()}
    if tp > 1:
        tensor_parallel.apply_tensor_parallel(model)
        columns, rows = "(q_proj|k_proj|v_proj|up_proj|gate_proj)", "(out_proj|down_proj)"
        about = {"axes": {"tp": groups.process_group_manager.tp_group}, "dims": {
            rf".* .*({columns}|final_proj|embedding)\.weight": "o[tp] i", rf".* .*{rows}\.weight": "o i[tp]",
            f"(forward|backward) .*({columns} output|{rows} input)": "b s h[tp]"}}
    if way == "tp_input_gradient_not_summed":
        tp_communications.CopyToModelParallelRegion.backward = staticmethod(lambda ctx, dy: dy)
    for name, p in model.named_parameters():
        axis = next((i for i in range(p.dim()) if p.shape[i] != whole[name].shape[i]), 0)
        pieces = whole[name].split(p.shape[axis], axis)
        p.data.copy_(pieces[dist.get_rank() % len(pieces)])
    model = DataParallelBucket(model) if tp < ranks else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if tp < ranks:
        optimizer.register_step_post_hook(lambda *_: model.reset())
    return model, optimizer, lambda tokens, targets: mean_loss(model(input_ids=tokens), targets), about


def train(program, rank, ranks, folder, way):
    torch.manual_seed(0)
    model, optimizer, loss_of, about = program(ranks, way)
    torch.manual_seed(1)        # a model in parts has drawn other numbers
    parts = 1 if about else ranks
    recorder = Recorder(f"{folder}/{way}", model, optimizer, **about)
    if rank == 0 and not about:
        with torch.no_grad():
            loss_of(*torch.zeros(2, B, S, dtype=int))
    for _ in range(2):
        for micro in range(MICRO_STEPS):
            text = torch.randint(V, (B, S + 1))
            tokens, targets = (x.chunk(parts)[rank % parts].contiguous() for x in (text[:, :-1], text[:, 1:]))
            if way == "targets_of_rank_0":
                targets = text[:, 1:].chunk(parts)[0].contiguous()
            recorder.batch(tokens=tokens, targets=targets.flatten())
            model.require_backward_grad_sync = micro == (0 if way == "reduced_too_early" else MICRO_STEPS - 1)
            (loss_of(tokens, targets) / MICRO_STEPS / (ranks if way == "averaged_twice" else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = {"ours": (partial(train, ours), BUGS), "nanoGPT": (partial(train, nano_gpt), BUGS),
            "picotron": (partial(train, picotron), (*BUGS, "tp", "tp_input_gradient_not_summed"))}


def main():
    rank, ranks, port, name, folder = sys.argv[1:]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    program, bugs = PROGRAMS[name]
    for way in ("right", *bugs) if int(ranks) > 1 else ("right",):
        program(int(rank), int(ranks), folder, way)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
