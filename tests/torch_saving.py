"""A training program that saves what it has trained: torch_saving.py FOLDER WAY [BUG].

The model and the ways to divide it are those of torch_training.py. Ranks write FOLDER/dcp; one process writes all kinds
of checkpoints.
"""
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch_training import GPT, B, S, V, divided, on_ranks


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


def save(rank, ranks, folder, way, bug=""):
    weights, states = trained(way, ranks)
    if bug and rank == ranks - 1:
        weights["layers.1.up.weight"].to_local()[-1, -1] += 1e-6
    dcp.save({"model": weights, "optimizer": states, "step": 2, "half": torch.ones(3, dtype=torch.bfloat16)},
             checkpoint_id=f"{folder}/dcp")
    if way == "alone":
        torch.save({"model": weights, "optimizer": states}, f"{folder}/saved.pt")
        save_file({f"model.{name}": x for name, x in weights.items()}, f"{folder}/saved.safetensors")


if __name__ == "__main__":
    on_ranks(save)
