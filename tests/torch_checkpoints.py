"""A training program that saves what it has trained: torch_checkpoints.py RANK RANKS PORT WAY FOLDER [BUG].

The model and the ways to divide it are those of torch_training.py, which is beside this file. One process writes all
kinds of checkpoints, ranks write FOLDER/dcp.
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch_training import GPT, B, S, V, divided


def trained(way, ranks):
    torch.manual_seed(0)
    model, number, of = GPT(), 0, 1
    if way != "alone":
        model, mesh = divided(model, way, ranks, "")
        number, of = mesh["dp"].get_local_rank(), mesh["dp"].size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    data = torch.Generator().manual_seed(1)
    for _ in range(2):
        text = torch.randint(V, (B, S + 1), generator=data).chunk(of)[number]
        model(text[:, :-1], text[:, 1:])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return get_state_dict(model, optimizer)


def main():
    rank, ranks, port, way, folder, *bug = sys.argv[1:]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE=ranks)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    weights, states = trained(way, int(ranks))
    if bug and int(rank) == int(ranks) - 1:
        weights["layers.1.up.weight"].to_local()[-1, -1] += 1e-6
    dcp.save({"model": weights, "optimizer": states, "step": 2, "half": torch.ones(3, dtype=torch.bfloat16)},
             checkpoint_id=f"{folder}/dcp")
    if way == "alone":
        torch.save({"model": weights, "optimizer": states}, f"{folder}/saved.pt")
        named = {f"model.{name}": x for name, x in weights.items()}
        save_file(named, f"{folder}/saved.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
