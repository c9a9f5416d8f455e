"""Megatron-LM in one file: train a GPT on t x p x d ranks, prove its weights equal to one process's, let it write.

    python microshard.py                                   one process
    mpirun -np 8 python microshard.py --t 2 --p 2          8 ranks: 2 shards of each layer x 2 stages x 2 replicas

    tensor    t ranks share each layer: each holds some heads, columns and rows         (Shoeybi et al. 2019)
    pipeline  p stages share the layers: each computes L/p of them and sends x on       (Narayanan et al. 2021)
    data      d replicas share the batch: each learns from B/d of its samples

A layer is a function that returns its result and its `backward`, which maps the gradient of the result to that of the
input, and adds the gradients of the weights w to dw. Where t ranks share it stand Megatron's two operators: g sums the
results forward, f sums the gradients backward. Letters: b samples in a microbatch, B in a batch, s tokens in a sample;
h hidden size, L layers, a attention heads of e numbers each, h = a e; V tokens in the vocabulary; c: all these sizes.
"""
import argparse
import os
import sys
from collections import Counter, deque
from functools import partial, reduce

os.environ.setdefault("OMP_NUM_THREADS", "1")              # a rank is one core; threads would fight over the others
import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

V = 256                                                    # a token is a byte of text
einsum = partial(np.einsum, optimize=True)                 # sums over the letters that are not in the result
sent = Counter[str]()                                      # the bytes that this rank sent, by the name of the group

# ---- 1. messages ----------------------------------------------------------------------------------------------------
def all_reduce(x, group, op=MPI.SUM):
    """Combine one array per rank, element by element. Every rank gets the result."""
    result = np.array(x, order="C")
    group.Allreduce(MPI.IN_PLACE, result, op)
    sent[group.name] += 2 * (group.size - 1) * x.nbytes // group.size     # by a ring: 2 (n - 1) messages, each 1/n of x
    return result

def send(x, to, group):
    """Start sending an array, and go on: two ranks that each wait until the other receives would deadlock."""
    sent[group.name] += x.nbytes
    return group.Isend(np.ascontiguousarray(x), to)

def receive(shape, source, group):
    """Wait for an array from another rank."""
    group.Recv(x := np.empty(shape), source)
    return x


# ---- 2. layers, on one of t tensor-parallel ranks -------------------------------------------------------------------
def mlp(x, w, dw, tensor):
    """Y = GeLU(X A + a) B + b: a rank's columns of A give GeLU complete sums, which B's rows take as they are."""
    z = x @ w["A"] + w["a"]                                # [b, s, h] @ [h, 4h/t] -> [b, s, 4h/t]
    tanh = np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))            # [b, s, 4h/t]
    y = 0.5 * z * (1 + tanh)                               # [b, s, 4h/t]: GeLU, about z P(n < z) for a normal number n
    out = y @ w["B"]                                       # [b, s, 4h/t] @ [4h/t, h] -> [b, s, h], a partial sum
    out = all_reduce(out, tensor) + w["b"]                 # g: the sum over all 4h columns; and the bias only once
    def backward(dout):                                    # [b, s, h], identical on the t ranks
        dw["b"] += dout.sum((0, 1))                        # [h]
        dw["B"] += einsum("bsf,bsh->fh", y, dout)          # [4h/t, h]
        inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z**2)            # [b, s, 4h/t]: derivative of tanh's argument
        slope = 0.5 * (1 + tanh + z * (1 - tanh**2) * inner)              # [b, s, 4h/t]: GeLU's derivative
        dz = dout @ w["B"].T * slope                       # [b, s, h] @ [h, 4h/t] -> [b, s, 4h/t]
        dw["a"] += dz.sum((0, 1))                          # [4h/t]
        dw["A"] += einsum("bsh,bsf->hf", x, dz)            # [h, 4h/t]
        dx = dz @ w["A"].T                                 # [b, s, 4h/t] @ [4h/t, h] -> [b, s, h]
        return all_reduce(dx, tensor)                      # f: all t ranks read x, so its gradient is their sum
    return out, backward

def attention(x, w, dw, tensor):
    """Attend to this token and those before it. Heads do not look at one another: a rank computes a/t of them."""
    s, e = x.shape[1], w["qkv"].shape[-1]
    qkv = einsum("bsh,hjae->jbase", x, w["qkv"])           # [b, s, h], [h, 3, a/t, e] -> [3, b, a/t, s, e]
    q, k, v = qkv + w["qkv bias"][:, None, :, None]        # each [b, a/t, s, e]
    scores = einsum("baqe,bake->baqk", q, k) / np.sqrt(e)  # [b, a/t, s, s]
    scores += np.triu(np.full((s, s), -np.inf), 1)         # [s, s]: no query q sees a key k that comes later
    exp = np.exp(scores - scores.max(-1, keepdims=True))   # [b, a/t, s, s]
    probs = exp / exp.sum(-1, keepdims=True)               # [b, a/t, s, s]
    context = einsum("baqk,bake->baqe", probs, v)          # [b, a/t, s, e]
    out = einsum("base,aeh->bsh", context, w["out"])       # [b, s, h], a partial sum
    out = all_reduce(out, tensor) + w["out bias"]          # g: the sum over all a heads; and the bias only once
    def backward(dout):                                    # [b, s, h], identical on the t ranks
        dw["out bias"] += dout.sum((0, 1))                 # [h]
        dw["out"] += einsum("base,bsh->aeh", context, dout)               # [a/t, e, h]
        dcontext = einsum("bsh,aeh->base", dout, w["out"])                # [b, a/t, s, e]
        dprobs = einsum("baqe,bake->baqk", dcontext, v)                   # [b, a/t, s, s]
        dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdims=True)) / np.sqrt(e)     # [b, a/t, s, s]
        dq = einsum("baqk,bake->baqe", dscores, k)         # [b, a/t, s, e]
        dk = einsum("baqk,baqe->bake", dscores, q)         # [b, a/t, s, e]
        dv = einsum("baqk,baqe->bake", probs, dcontext)    # [b, a/t, s, e]
        dqkv = np.stack([dq, dk, dv])                      # [3, b, a/t, s, e]
        dw["qkv bias"] += dqkv.sum((1, 3))                 # [3, a/t, e]
        dw["qkv"] += einsum("bsh,jbase->hjae", x, dqkv)    # [h, 3, a/t, e]
        dx = einsum("jbase,hjae->bsh", dqkv, w["qkv"])     # [b, s, h]
        return all_reduce(dx, tensor)                      # f: all t ranks read x, so its gradient is their sum
    return out, backward

def layer_norm(x, w, dw, tensor):
    """Give each token's h numbers mean 0 and variance 1, then a gain and a shift. Each rank does it all: no message."""
    deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-5)   # [b, s, 1]
    normed = (x - x.mean(-1, keepdims=True)) / deviation   # [b, s, h]
    def backward(dout):                                    # [b, s, h]
        dw["gain"] += (dout * normed).sum((0, 1))          # [h]
        dw["shift"] += dout.sum((0, 1))                    # [h]
        dnormed = dout * w["gain"]                         # [b, s, h]
        along = normed * (dnormed * normed).mean(-1, keepdims=True)       # [b, s, h]: scaling x changes nothing,
        return (dnormed - dnormed.mean(-1, keepdims=True) - along) / deviation                # nor does shifting it
    return normed * w["gain"] + w["shift"], backward

def residual(branch, x, w, dw, tensor):
    """x + branch(norm(x))."""
    normed, norm_backward = layer_norm(x, w, dw, tensor)   # [b, s, h]
    y, branch_backward = branch(normed, w, dw, tensor)     # [b, s, h]
    return x + y, lambda dout: dout + norm_backward(branch_backward(dout))

def embedding(tokens, w, dw, tensor):
    """Look up each token's row in a table that is sharded by rows: rank i holds V/t of them, from i V/t on."""
    rows, here = find_rows(tokens, w["word"], tensor)      # each [b, s]
    x = w["word"][rows] * here[..., None]                  # [b, s, h], zero for a token of another rank
    x = all_reduce(x, tensor) + w["position"]              # g: one rank has the row, the others add zero
    def backward(dx):                                      # [b, s, h], identical on the t ranks
        np.add.at(dw["word"], rows[here], dx[here])        # [V/t, h]: a row that was read many times gets the sum
        dw["position"] += dx.sum(0)                        # [s, h]
    return x, backward

def loss(targets, x, w, dw, tensor):
    """Sum -log softmax(x word^T) at the targets. Logits stay sharded: three numbers per token are sent, not V."""
    logits = x @ w["word"].T                               # [b, s, h] @ [h, V/t] -> [b, s, V/t]
    top = all_reduce(logits.max(-1), tensor, MPI.MAX)      # [b, s]: all ranks subtract the same, so that exp is finite
    exp = np.exp(logits - top[..., None])                  # [b, s, V/t]
    total = all_reduce(exp.sum(-1), tensor)                # [b, s]: softmax divides by the sum over all V
    rows, here = find_rows(targets, w["word"], tensor)     # each [b, s]
    hit = np.take_along_axis(logits, rows[..., None], -1)[..., 0]         # [b, s]
    hit = all_reduce(hit * here, tensor)                   # [b, s]: one rank has the target's logit
    def backward(dloss):                                   # a number
        dlogits = dloss * exp / total[..., None]           # [b, s, V/t]: softmax,
        dlogits[here, rows[here]] -= dloss                 # less 1 at the target
        dw["word"] += einsum("bsv,bsh->vh", dlogits, x)    # [V/t, h]
        dx = dlogits @ w["word"]                           # [b, s, V/t] @ [V/t, h] -> [b, s, h]
        return all_reduce(dx, tensor)                      # f: all t ranks read x, so its gradient is their sum
    return (np.log(total) + top - hit).sum(), backward

def find_rows(tokens, table, tensor):
    """Return each token's row in this rank's piece of the table, and whether the piece has it."""
    rows = tokens - tensor.rank * len(table)
    here = (rows >= 0) & (rows < len(table))
    return np.where(here, rows, 0), here


# ---- 3. the model: its weights, and the layers of one of p stages ---------------------------------------------------
AXIS = {"word": 0, "qkv": 2, "qkv bias": 1, "out": 0, "A": 1, "a": 0, "B": 0}      # sharded; the others are replicated

def initial_weights(c):
    """Draw the whole model. All ranks draw the same and keep their shards, so every topology trains the same model."""
    rng, h, e = np.random.default_rng(0), c.h, c.h // c.a
    end = 0.02 / np.sqrt(2 * c.L)                          # 2 L branches add up in x: each is smaller in a deep model
    norm = {"gain": np.ones(h), "shift": np.zeros(h)}
    model = {"embedding": {"word": rng.normal(0, 0.02, (V, h)), "position": rng.normal(0, 0.02, (c.s, h))},
             "final norm": norm}
    for i in range(c.L):
        model[f"attention {i}"] = norm | {
            "qkv": rng.normal(0, 0.02, (h, 3, c.a, e)), "qkv bias": np.zeros((3, c.a, e)),
            "out": rng.normal(0, end, (c.a, e, h)), "out bias": np.zeros(h)}
        model[f"mlp {i}"] = norm | {
            "A": rng.normal(0, 0.02, (h, 4 * h)), "a": np.zeros(4 * h),
            "B": rng.normal(0, end, (4 * h, h)), "b": np.zeros(h)}
    return {(layer, name): x for layer, tensors in model.items() for name, x in tensors.items()}

def stage_layers(c, pipeline):
    """List the layers of this rank's stage, in order: each one's function and name."""
    first, count = pipeline.rank * c.L // pipeline.size, c.L // pipeline.size
    layers = [(embedding, "embedding")] if pipeline.rank == 0 else []
    layers += [(partial(residual, branch), f"{branch.__name__} {i}")
               for i in range(first, first + count) for branch in (attention, mlp)]
    return layers + ([(layer_norm, "final norm"), (loss, "embedding")] if pipeline.rank == pipeline.size - 1 else [])

def own_part(whole, c, tensor, pipeline):
    """Return what this rank holds: its stage's tensors (two stages hold the word table), 1/t of each sharded one."""
    held = {name for _, name in stage_layers(c, pipeline)}
    return {(layer, name): np.split(x, tensor.size, AXIS[name])[tensor.rank].copy() if name in AXIS else x.copy()
            for (layer, name), x in whole.items() if layer in held and not (name == "position" and pipeline.rank > 0)}

def stage(x, targets, w, dw, c, tensor, pipeline):
    """Map tokens [b, s], or the x [b, s, h] of the stage before, to x [b, s, h], or on the last stage to the loss."""
    backwards = []
    for function, layer in stage_layers(c, pipeline):
        own, gradients = ({name: tree[at, name] for at, name in tree if at == layer} for tree in (w, dw))
        function = partial(loss, targets) if function is loss else function
        x, backward = function(x, own, gradients, tensor)
        backwards.append(backward)
    return x, lambda dx: reduce(lambda dx, backward: backward(dx), reversed(backwards), dx)


# ---- 4. training on t x p x d ranks ---------------------------------------------------------------------------------
def make_groups(world, t, p):
    """Arrange the ranks in a box p x d x t. Its lines are the groups; tensor, the busiest, joins neighbours.

    `Split(colour)` puts ranks that give the same number, such as their place on the other two axes, into one group.
    """
    d = world.size // (t * p)
    at_p, at_d, at_t = (int(i) for i in np.unravel_index(world.rank, (p, d, t)))
    tensor, pipeline, data = world.Split(at_p * d + at_d), world.Split(at_d * t + at_t), world.Split(at_p * t + at_t)
    ends = pipeline.Split(at_p in (0, p - 1))              # the stages that hold the word table: first and last
    tensor.name, pipeline.name, data.name, ends.name = "tensor", "pipeline", "data", "pipeline"
    return tensor, pipeline, data, ends

def gradients(samples, w, dw, c, tensor, pipeline):
    """Add the gradients of microbatches [m, b, s + 1] to dw, in the order called 1F1B; return the sum of the losses."""
    r, p, m = pipeline.rank, pipeline.size, len(samples)
    ahead = min(p - 1 - r, m)                              # forwards that give the stages after this one work
    total, rows, waiting, sending = 0.0, iter(samples), deque(), []
    for action in "F" * ahead + "FB" * (m - ahead) + "B" * ahead:
        if action == "F":
            row = next(rows)                                                                  # [b, s + 1]
            x = row[:, :-1] if r == 0 else receive((c.b, c.s, c.h), r - 1, pipeline)          # [b, s] or [b, s, h]
            y, backward = stage(x, row[:, 1:], w, dw, c, tensor, pipeline)                    # [b, s, h], or the loss
            waiting.append(backward)
            if r < p - 1:
                sending.append(send(y, r + 1, pipeline))   # the next stage goes on from here
            else:
                total += y
        else:
            dy = 1 / (c.B * c.s) if r == p - 1 else receive((c.b, c.s, c.h), r + 1, pipeline)
            dx = waiting.popleft()(dy)                     # [b, s, h]. Frees what its forward kept: at most p - r wait
            if r > 0:
                sending.append(send(dx, r - 1, pipeline))  # the stage before goes on from here
    MPI.Request.Waitall(sending)
    return total

def train(world, c, t, p, text, report):
    """Train c.steps steps on the ranks of a communicator; return this rank's weights."""
    tensor, pipeline, data, ends = make_groups(world, t, p)
    w = own_part(initial_weights(c), c, tensor, pipeline)
    means, squares = ({key: np.zeros_like(x) for key, x in w.items()} for _ in range(2))
    for i in range(1, c.steps + 1):
        starts = np.random.default_rng(i).integers(0, len(text) - c.s, c.B)         # [B], identical on all ranks
        batch = text[starts[:, None] + np.arange(c.s + 1)]                                    # [B, s + 1]
        samples = batch.reshape(data.size, -1, c.b, c.s + 1)[data.rank]                       # [m, b, s + 1]
        dw = {key: np.zeros_like(x) for key, x in w.items()}
        total = gradients(samples, w, dw, c, tensor, pipeline)
        if ("embedding", "word") in dw:                    # two stages have the table: its gradient is the sum of both
            dw["embedding", "word"] = all_reduce(dw["embedding", "word"], ends)
        for key, mean in means.items():
            gradient = all_reduce(dw[key], data)           # replicas saw other samples. (Not over `tensor`: there the
            mean += 0.1 * (gradient - mean)                # gradients of replicated weights are identical already.)
            squares[key] += 0.001 * (gradient**2 - squares[key])
            w[key] -= c.lr * mean / (1 - 0.9**i) / (np.sqrt(squares[key] / (1 - 0.999**i)) + 1e-8)             # Adam
        mean_loss = world.allreduce(total) / t / (c.B * c.s)                 # all t ranks of the last stage have it
        report(f"t {t} x p {p} x d {data.size}   step {i:3}   loss {mean_loss:.4f}")
    return w


# ---- 5. a run, its proof, and what the model writes -----------------------------------------------------------------
def write(w, c, text, alone=MPI.COMM_SELF):
    """Return s tokens after the first s of the text: draw each from the softmax of its logits. One process does it."""
    tokens, rng = list(text[:c.s]), np.random.default_rng(0)
    while len(tokens) < 2 * c.s:
        x = np.array([tokens[-c.s:]])                      # [1, s]
        for function, layer in stage_layers(c, alone)[:-1]:               # all but the loss: x is [1, s, h]
            x, _ = function(x, {name: w[at, name] for at, name in w if at == layer}, None, alone)
        logits = x[0, -1] @ w["embedding", "word"].T       # [h] @ [h, V] -> [V]
        tokens.append(np.argmax(logits + rng.gumbel(size=V)))             # such noise draws from the softmax
    return bytes(tokens[c.s:]).decode(errors="replace")

def main():
    world, parser = MPI.COMM_WORLD, argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = lambda text: sys.exit(f"error: {text}" if world.rank == 0 else 2)
    parser.add_argument("text", nargs="?", default=__file__, help="the file to learn from (default: this program)")
    for name, default, about in (
            ("t", 1, "tensor-parallel ranks"), ("p", 1, "pipeline stages"), ("steps", 30, "steps of training"),
            ("L", 4, "layers"), ("h", 64, "hidden size"), ("a", 8, "attention heads"), ("s", 64, "tokens in a sample"),
            ("b", 2, "samples in a microbatch"), ("B", 16, "samples in a batch"), ("lr", 3e-3, "learning rate")):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{about} (default: {default})")
    c = parser.parse_args()
    if min(c.t, c.p, c.L, c.h, c.a, c.s, c.b, c.B, c.steps) < 1 or max(c.L * c.h**2, c.B * c.s, c.b*c.a * c.s**2) > 1e7:
        parser.error("every size must be at least 1, and each of L h h, B s and b a s s at most 10,000,000")
    d = world.size // (c.t * c.p)
    for what, n, of, divisor in (
            ("the number of ranks", world.size, "t p", c.t * c.p), ("B", c.B, "b d", c.b * d), ("L", c.L, "p", c.p),
            ("h", c.h, "a", c.a), ("a", c.a, "t", c.t), ("V", V, "t", c.t)):
        if n % divisor:
            parser.error(f"{what} is {n}, but must be a multiple of {of}, which is {divisor}")
    if not os.path.isfile(c.text) or os.path.getsize(c.text) <= c.s:
        parser.error(f"{c.text} is not a file of more than {c.s} bytes, the length of a sample")

    report = print if world.rank == 0 else lambda line: None
    text = np.fromfile(c.text, np.uint8).astype(int)       # every byte is a token
    w = train(world, c, c.t, c.p, text, report)
    for axis in ("tensor", "pipeline", "data"):
        report(f"{axis:8} {world.allreduce(sent[axis]) / c.steps:14,.0f} bytes a step, sent by all ranks together")
    whole = world.bcast(train(MPI.COMM_SELF, c, 1, 1, text, lambda line: None) if world.rank == 0 else None)
    part = own_part(whole, c, *make_groups(world, c.t, c.p)[:2])
    error = world.allreduce(max(abs(part[key] - w[key]).max() for key in w), MPI.MAX)
    report(f"the same steps in one process: {'equal' if error < 1e-9 else 'WRONG'}, to {error:.0e} in every weight")
    report(f"it writes {write(whole, c, text)!r}")
    sys.exit(int(not error < 1e-9))


if __name__ == "__main__":
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), MPI.COMM_WORLD.Abort(1))  # one rank's error ends all
    main()
