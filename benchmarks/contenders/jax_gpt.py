"""JAX's side of cpu_step.py: the same GPT in one process, whose devices share heads, columns and words by shardings.

Its arguments are the sizes of a work and `--threads n`, the number of its devices and the most cores that it uses. XLA
finds out by itself what to send, as JAX's users have it. With `--bf16` products are in bfloat16; weights and AdamW are
in float32. What the first step takes for compiling does not count.
"""
import os
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from turns import serve
from works import Work

# Shapes of a block's tensors by the sizes of a work, the axis that is split, and the mean of what they begin as.
BLOCK = {"norm_1": ("h", None, 1), "shift_1": ("h", None, 0), "norm_2": ("h", None, 1), "shift_2": ("h", None, 0),
         "qkv": ("h3ad", 2, 0), "qkv_bias": ("3ad", 1, 0), "out": ("adh", 0, 0), "out_bias": ("h", None, 0),
         "w_in": ("hf", 1, 0), "in_bias": ("f", 0, 0), "w_out": ("fh", 0, 0), "out_bias_2": ("h", None, 0)}
WHOLE = {"word": ("Vh", 0, 0), "position": ("sh", None, 0), "norm": ("h", None, 1), "shift": ("h", None, 0)}


def tensors(work, mesh):
    """Draw all tensors, each on its devices."""
    sizes = {"h": work.h, "f": work.f, "a": work.a, "d": work.h // work.a, "V": work.V, "s": work.s, "3": 3}
    key = iter(jax.random.split(jax.random.key(0), 1000))

    def draw(shape, axis, mean):
        spec = P(*("tensor" if i == axis else None for i in range(len(shape))))
        x = mean + 0.02 * (mean == 0) * jax.random.normal(next(key), [sizes[letter] for letter in shape])
        return jax.device_put(x, NamedSharding(mesh, spec))

    return {**{name: draw(*how) for name, how in WHOLE.items()},
            "blocks": [{name: draw(*how) for name, how in BLOCK.items()} for _ in range(work.L)]}


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def layer_norm(x, weight, bias):
    x = wide(x)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * weight + bias


def block(x, p, form):
    """Map x [b, s, h] to y."""
    half = {name: w.astype(form) for name, w in p.items()}
    normed = layer_norm(x, p["norm_1"], p["shift_1"]).astype(form)
    qkv = jnp.einsum("bsh,hzad->bszad", normed, half["qkv"]) + half["qkv_bias"]
    y = jax.nn.dot_product_attention(*(qkv[:, :, i] for i in range(3)), is_causal=True)
    x = x + jnp.einsum("bsad,adh->bsh", y, half["out"]) + half["out_bias"]
    normed = layer_norm(x, p["norm_2"], p["shift_2"]).astype(form)
    return x + jax.nn.gelu(normed @ half["w_in"] + half["in_bias"]) @ half["w_out"] + half["out_bias_2"]


def loss_of(p, tokens, targets, form):
    x = p["word"][tokens] + p["position"]
    for one in p["blocks"]:
        x = block(x, one, form)
    logits = wide(layer_norm(x, p["norm"], p["shift"]).astype(form) @ p["word"].T.astype(form))
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def update(p, grads, m, v, step, rate=1e-4, decay=0.01):
    """Take a step of AdamW."""
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
    p = jax.tree.map(lambda p, m, v: p * (1 - rate * decay) - rate * m / (1 - 0.9**step) / (
        jnp.sqrt(v / (1 - 0.999**step)) + 1e-8), p, m, v)
    return p, m, v


def main():
    work, threads = Work.read(sys.argv[1]), int(sys.argv[sys.argv.index("--threads") + 1])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])      # before XLA makes its threads
    jax.config.update("jax_num_cpu_devices", threads)
    form = jnp.bfloat16 if "--bf16" in sys.argv else jnp.float32
    p = tensors(work, jax.make_mesh((threads,), ("tensor",), axis_types=(AxisType.Auto,)))
    state = [p, jax.tree.map(jnp.zeros_like, p), jax.tree.map(jnp.zeros_like, p)]
    tokens, targets = jax.random.randint(jax.random.key(1), (2, work.b, work.s), 0, work.V)

    def one_step(p, m, v, step):
        return update(p, jax.grad(loss_of)(p, tokens, targets, form), m, v, step)

    compiled, count = jax.jit(one_step, donate_argnums=(0, 1, 2)), 0

    def step():
        nonlocal count
        count += 1
        state[:] = jax.block_until_ready(compiled(*state, jnp.float32(count)))

    serve(step)


if __name__ == "__main__":
    main()
