"""Small programs, as the type checker of the package spmd_types judges them, and what they compute on two ranks.

    pip install spmd_types==0.3.1 torch==2.13.0
    python benchmarks/contenders/spmd_types_rules.py

Each is checked under the package's `typecheck`, in PyTorch's fake process group; and run for each rank, on its arrays,
and on the whole ones, in this process. It needs nothing else of this project.
"""
import re
import sys
import warnings
from contextlib import contextmanager

try:
    import spmd_types as spmd
    import spmd_types.checker as checker
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
except ModuleNotFoundError as error:
    print(f"error: {error.name} is not installed. Install both packages, as in `pip install spmd_types==0.3.1 "
          "torch==2.13.0`.", file=sys.stderr)
    sys.exit(2)
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

ARRAYS = {      # by name: the type, and what each of the two ranks holds
    "p": ("P", [1.0], [2.0]), "q": ("P", [3.0], [5.0]), "r": ("R", [6.0], [6.0]), "half": ("P", [0.5], [0.5]),
    "odd": ("P", [1.0], [3.0]), "row": ("P", [1.0, 2.0, 3.0], [10.0, 20.0, 30.0]), "index": ("P", [1], [1]),
    "v": ("V", [1.0, 2.0], [10.0, 20.0]), "zeros": ("R", [0.0, 0.0], [0.0, 0.0]), "P": ("P", [[1.0]], [[2.0]]),
    "Q": ("P", [[3.0]], [[5.0]]), "R": ("R", [[6.0]], [[6.0]]), "mean": ("R", [0.0], [0.0]), "var": ("R", [1.0], [1.0]),
    "samples": ("V", [[1.0], [3.0]], [[10.0], [30.0]])}
PROGRAMS = [    # an expression, or statements before one
    "p * r", "p + q", "p / 2", "p + r", "p * q", "torch.div(r, p)", "zeros.add_(v); zeros",
    "torch.div(r, other=p)", "torch.div(odd, 2, rounding_mode='floor')", "p + True",
    "torch.sum(half, dtype=torch.int64)", "torch.addmm(mat1=P, mat2=Q, input=R)",
    "torch.index_select(row, 0, index)", "zeros[0] = v[0]; zeros",
    "y = zeros.view(-1); y.add_(v); zeros", "F.batch_norm(samples, mean, var, training=True, momentum=1.0); mean"]


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group(backend="fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    print("| program | type | on the ranks | whole | |\n|---|---|---|---|---|")
    for program in PROGRAMS:
        print_row(program, *run(program, mesh))
    print_row("s * s, a Scalar", *squares(mesh))
    print_row("torch.autograd.backward(loss); w.grad", *gradients(mesh))


def print_row(program: str, kind: str, ranks=(), whole=()) -> None:
    """Print a row. What is partial must add up to the whole; all ranks must have what is replicated."""
    total = [sum(numbers) for numbers in zip(*ranks)]
    right = total == whole if kind == "P" else kind == "V" or all(one == (whole or ranks[0]) for one in ranks)
    added = f", sum {shown(total)}" if kind == "P" else ""
    print(f"| `{program}` | {kind} | {'; '.join(map(shown, ranks))}{added} | {shown(whole)} |",
          "|" if not ranks else "right |" if right else "**wrong** |")


def shown(numbers) -> str:
    return " ".join(f"{one:g}" for one in numbers)


@contextmanager
def checked(mesh):
    with spmd.set_current_mesh(mesh), checker.typecheck(local=True):
        yield


def run(program: str, mesh) -> tuple:
    """Return a program's type by the checker, each rank's numbers, and the whole ones if nothing varies."""
    used = {name: ARRAYS[name] for name in dict.fromkeys(re.findall(r"\w+", program)) if name in ARRAYS}
    ranks = [{name: torch.tensor(one[rank]) for name, one in used.items()} for rank in (1, 2)]
    whole = {name: sum(each[name] for each in ranks) if of == "P" else ranks[0][name].clone()
             for name, (of, *_) in used.items()}
    inputs = {name: torch.tensor(first) for name, (_, first, _) in used.items()}
    with checked(mesh):
        for name, (of, *_) in used.items():
            spmd.assert_type(inputs[name], {"tp": getattr(spmd, of)})
        try:
            kind, = spmd.get_local_type(result_of(program, inputs)).values()
        except spmd.SpmdTypeError:
            return "refused",
    numbers = [result_of(program, each).reshape(-1).tolist() for each in (*ranks, whole)]
    return kind.name, numbers[:2], () if "V" in [of for of, *_ in used.values()] else numbers[2]


def result_of(program: str, arrays):
    *statements, last = program.split("; ")
    names = {**arrays, "torch": torch, "F": F}
    exec("\n".join(statements), names)
    return eval(last, names)


def squares(mesh) -> tuple:
    """Square a partial number of Python's: 2 on one rank, 3 on the other."""
    with checked(mesh):
        found = [s * s for s in (spmd.Scalar(one, {mesh.get_group("tp"): spmd.P}) for one in (2.0, 3.0))]
    kind, = found[0].local_type.values()
    return kind.name, [[one.value] for one in found], [5.0**2]


def gradients(mesh) -> tuple:
    """Differentiate the sum of w v over the ranks, which all of them hold, by a function that the checker accepts."""
    group = mesh.get_group("tp")

    def differentiate(w, v):
        torch.autograd.backward(spmd.all_reduce(spmd.reinterpret(w * v, group, src=spmd.V, dst=spmd.P), group,
                                                dst=spmd.R))

    w, v = torch.ones((), requires_grad=True), torch.tensor(3.0)
    with checked(mesh):
        differentiate(spmd.assert_type(w, {"tp": spmd.R}), spmd.assert_type(v, {"tp": spmd.V}))
    with LocalTensorMode(2):
        w = LocalTensor({rank: torch.ones(()) for rank in range(2)}).requires_grad_(True)
        differentiate(w, LocalTensor({0: torch.tensor(3.0), 1: torch.tensor(5.0)}))
        grads = [w.grad._local_tensors[rank].item() for rank in range(2)]
    return "P", [[one] for one in grads], [3.0 + 5.0]      # the gradient of what is replicated is partial


if __name__ == "__main__":
    main()
