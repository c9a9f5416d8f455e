"""Attention's core by cuDNN: FlashAttention (Dao et al. 2022), for halves, where nothing is dropped.

The package is `nvidia-cudnn-frontend`, an extra. cuDNN's own dropout draws other masks than ours, so attention.py
computes attention with dropout, and whatever else cuDNN does not support.

cuDNN does not define what it writes beyond the lengths that it is given. So we tell it that all queries are real, as
they are in the other implementations: their results are finite, and the keys get the right gradients from them. We
write zeros ourselves only into the gradients of padded keys and values.
"""
import warnings
from functools import cache, lru_cache
from importlib.util import find_spec
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.kernels.cuda.recording import Recording
from mpi_impl.runtime.arrays import counter_of, is_half
from reference.ops import CoreInputs, Keys, Queries

BLOCK = 128     # tokens, in cuDNN's backward


class FlashCache(NamedTuple):
    """The arrays that the backward needs."""

    q: Queries        # [b, s, a, d]
    k: Keys
    v: Keys
    causal: bool
    lengths: Any      # int64 [b], or None
    context: Any      # [b, s, a, d]
    stats: Any        # float32 [b, a, s, 1]: log of the sum of exp of each row of scores


def supports(inputs: CoreInputs) -> bool:
    """Report whether cuDNN has kernels for it: halves, no dropout, some sizes of heads, more than one token."""
    q, k, v, causal, site, lengths = inputs
    _, s, a, d = q.shape
    if not is_half(q) or site is not None or d % 8 or d > 128 or s == 1:
        return False
    if (counter := counter_of(q)):
        return counter.cudnn
    layouts = *map(layout, "qkv", (q, k, v)), ("context", q.shape, (s * a * d, a * d, d, 1))
    return is_available() and plan(forward_graph, layouts, causal, lengths, q.dtype) is not None


@cache
def is_available() -> bool:
    """Report whether cuDNN and the package are installed and recent, and the GPU is new enough (Ampere, 2020)."""
    if find_spec("cudnn") is None or find_spec("cupy") is None:
        return False
    try:
        import cudnn
        import cupy
        return cudnn.backend_version() >= 91002 and int(cupy.cuda.Device().compute_capability) >= 80
    except Exception as error:      # whatever the package raises: without cuDNN itself, with two of it, ...
        say_that_cudnn_declines(str(error))
        return False


@cache
def say_that_cudnn_declines(reason: str) -> None:
    warnings.warn(f"cuDNN declines attention, so other kernels compute it, more slowly: {reason}", stacklevel=2)


def attention_core(inputs: CoreInputs):
    q, k, v, causal, _, lengths = inputs
    b, s, a, _ = q.shape
    context = np.empty_like(q, order="C")
    stats = np.empty_like(q, shape=(b, a, s, 1), dtype=np.float32, order="C")
    run(forward_graph, {"q": q, "k": k, "v": v, "context": context}, stats, causal, lengths)
    return context, FlashCache(q, k, v, causal, lengths, context, stats)


def attention_core_backward(dcontext, cache: FlashCache):
    """Return dq, dk and dv, or None if cuDNN has a forward for this, and no backward."""
    q, k, v, causal, lengths, context, stats = cache
    dq, dk, dv = empty_together(q, k, v)
    seen = whole_lengths(q) if lengths is None and Recording.under_way and q.shape[1] % BLOCK else lengths
    if not run(backward_graph, {"q": q, "k": k, "v": v, "context": context, "dcontext": dcontext, "dq": dq, "dk": dk,
                                "dv": dv}, stats, causal, seen):
        return None
    if lengths is not None:
        clear_padding(dk, lengths)
        clear_padding(dv, lengths)
    return dq, dk, dv


def whole_lengths(q):
    """Return the lengths, int64 [b], of samples without padding.

    Where blocks do not divide them, cuDNN's backward reads lengths; if it gets none, from memory that is gone when a
    CUDA graph repeats it.
    """
    return np.full_like(q, q.shape[1], shape=q.shape[0], dtype=np.int64)


def empty_together(q, k, v):
    """Return arrays like q, k and v, without values. If they have one shape, they lie as a layer will stack them."""
    if k.shape != q.shape:
        return [np.empty_like(x, order="C") for x in (q, k, v)]
    b, s, a, d = q.shape
    whole = np.empty_like(q, shape=(b, s, 3, a, d), order="C")
    return [whole[:, :, i] for i in range(3)]


def clear_padding(x, lengths) -> None:
    """Write 0 beyond the lengths of halves [b, s, a, d]: bit by bit, since NaN times 0 is NaN."""
    bits = x.view(np.uint16)
    bits *= (np.arange(x.shape[1], like=lengths) < lengths[:, None])[:, :, None, None]


# ---- graphs: built once for each shape, layout and format; they name tensors by numbers ----------------------------


def run(build, arrays, stats, causal, lengths) -> bool:
    """Execute on the current stream the graph that `build` makes for arrays of these kinds [b, s, a, d], if cuDNN has
    kernels for it.
    """
    if (counter := counter_of(stats)):
        (b, s, a, d), backward = arrays["q"].shape, build is backward_graph
        # All s^2 scores count, also those that the mask hides: so the shares of the peak in a profile are measured.
        counter.attend((8 if backward else 4) * b * a * s * s * d, backward)
        return True
    found = plan(build, tuple(map(layout, arrays, arrays.values())), causal, lengths, arrays["q"].dtype)
    if found is None:
        return False
    import cupy
    graph, numbers = found
    workspace = cupy.empty(max(1, graph.get_workspace_size()), np.uint8)
    others = {"stats": stats}
    if lengths is not None:
        others |= {"queries": np.full_like(lengths, arrays["q"].shape[1], dtype=np.int32),
                   "keys": lengths.astype(np.int32)}
    pointers = {numbers[name]: x.data.ptr for name, x in {**arrays, **others}.items()}
    graph.execute(pointers, workspace.data.ptr, handle=current_handle())
    return True


def layout(name: str, x):
    """Return an array's name, its shape, and its strides in elements."""
    return name, x.shape, tuple(step // x.itemsize for step in x.strides)


def plan(build, layouts, causal, lengths, dtype):
    """Return what build_plan does, for this rank's GPU."""
    import cupy
    return build_plan(build, layouts, str(dtype), causal, lengths is not None, cupy.cuda.Device().id)


def current_handle():
    """Return this rank's handle for the current stream of its GPU."""
    import cupy
    return handle(cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr)


@cache
def handle(device: int, stream: int):
    """Make a handle for a stream of a GPU, which is the current one."""
    import cudnn
    made = cudnn.create_handle()
    cudnn.set_stream(handle=made, stream=stream)
    return made


@lru_cache(maxsize=1024)        # an evaluation has batches of many lengths
def build_plan(build, layouts, form: str, causal: bool, padded: bool, device: int):
    """Build a graph that is ready to run -> the graph, and the numbers of its tensors; or None if cuDNN declines it."""
    try:
        import cudnn
        graph, numbers = describe_graph(build, layouts, form, causal, padded, current_handle())
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, numbers
    except Exception as error:      # cudnnGraphNotSupportedError, or another one of cuDNN's, CUDA's or the package's
        say_that_cudnn_declines(str(error))
        return None


def describe_graph(build, layouts, form: str, causal: bool, padded: bool, its_handle=None):
    """Describe a graph, which needs no GPU -> the graph, and its tensors' numbers by name."""
    import cudnn
    graph = cudnn.pygraph(io_data_type=getattr(cudnn.data_type, {"float16": "HALF", "bfloat16": "BFLOAT16"}[form]),
                          intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT,
                          handle=its_handle)
    shapes = {name: heads_first(shape, steps) for name, shape, steps in layouts}
    lengths = lengths_of(cudnn, graph, shapes["q"][0][0]) if padded else {}
    seen = dict(use_causal_mask=causal, use_padding_mask=padded, seq_len_q=lengths.get("queries"),
                seq_len_kv=lengths.get("keys"))
    tensors = build(cudnn, graph, shapes, seen) | lengths
    for number, (name, tensor) in enumerate(tensors.items()):
        tensor.set_uid(number)
        if name in OUTPUTS[build.__name__] and name != "stats":
            dim, stride = shapes[name]
            tensor.set_output(True).set_dim(dim).set_stride(stride)
    return graph, {name: number for number, name in enumerate(tensors)}


def heads_first(shape, steps):
    """Reorder the shape and strides of an array [b, s, a, d] to cuDNN's [b, a, s, d]."""
    return [[x[0], x[2], x[1], x[3]] for x in (shape, steps)]


def lengths_of(cudnn, graph, b: int):
    """Declare how many queries and keys of each sample cuDNN shall see: int32 [b, 1, 1, 1]."""
    return {name: graph.tensor(name=name, dim=[b, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32)
            for name in ("queries", "keys")}


def forward_graph(cudnn, graph, shapes, seen):
    q, k, v = inputs_of(graph, shapes, "q", "k", "v")
    context, stats = graph.sdpa(q=q, k=k, v=v, attn_scale=1 / sqrt(shapes["q"][0][-1]), generate_stats=True, **seen)
    stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    return {"q": q, "k": k, "v": v, "context": context, "stats": stats}


def backward_graph(cudnn, graph, shapes, seen):
    q, k, v, context, dcontext = inputs_of(graph, shapes, "q", "k", "v", "context", "dcontext")
    b, a, s, d = shapes["q"][0]
    stats = graph.tensor(name="stats", dim=[b, a, s, 1], stride=[a * s, s, 1, 1], data_type=cudnn.data_type.FLOAT)
    dq, dk, dv = graph.sdpa_backward(q=q, k=k, v=v, o=context, dO=dcontext, stats=stats, attn_scale=1 / sqrt(d),
                                     **seen)
    return {"q": q, "k": k, "v": v, "context": context, "dcontext": dcontext, "stats": stats, "dq": dq, "dk": dk,
            "dv": dv}


OUTPUTS = {"forward_graph": ("context", "stats"), "backward_graph": ("dq", "dk", "dv")}


def inputs_of(graph, shapes, *names):
    return [graph.tensor(name=name, dim=shapes[name][0], stride=shapes[name][1]) for name in names]
