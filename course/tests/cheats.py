"""Answers that would have all marks without learning what the labs teach, if the grader let them."""

# ---- from the frames below: the arguments of all ranks, if the rank's own program holds them ----

FRAMES = """
import sys
import numpy as np

def every(i):
    '''Argument i of all ranks: what the frames of this process's threads and tracebacks hold.'''
    try:
        raise KeyError
    except KeyError as error:
        frames = [sys._getframe(), error.__traceback__.tb_frame, *sys._current_frames().values()]
    while frames:
        frame = frames.pop()
        if "request" in frame.f_locals:
            return frame.f_locals["request"]["args"][i][1]
        frames += [frame.f_back] if frame.f_back else []
"""
LAB1_FROM_FRAMES = {
    "pass_on": FRAMES + "def pass_on(group, x): return every(0)[group.rank - 1]",
    "all_gather": "def all_gather(group, chunk): return np.concatenate(every(0))",
    "reduce_scatter": "def reduce_scatter(group, x): return np.array_split(sum(every(0)), group.size)[group.rank]",
    "all_reduce": "def all_reduce(group, x): return sum(every(0))",
    "all_reduce_in_order": "def all_reduce_in_order(group, x): return sum(every(0))",
}
# ---- from the seed: the numbers of all ranks, drawn again ----

SEED = """
import hashlib, json
import numpy as np

def drawn(name):
    '''What `check_data` draws in a notebook. Its text is public.'''
    key = json.dumps(["public", name]).encode()
    return np.random.default_rng(int(hashlib.sha256(key).hexdigest(), 16))

def arrays(name, group, x):
    return list(drawn(name).normal(size=(group.size, *x.shape)))
"""
LAB1_FROM_SEED = {
    "pass_on": SEED + "def pass_on(group, x): return arrays('pass_on', group, x)[group.rank - 1]",
    "all_gather": """
ELEMENTS = {1: [3], 2: [12, 5], 3: [10], 4: [12], 5: [7], 6: [25], 7: [7], 8: [20]}

def all_gather(group, chunk):
    for elements in ELEMENTS[group.size]:
        whole = drawn("all_gather").normal(size=elements)
        if np.array_equal(np.array_split(whole, group.size)[group.rank], chunk):
            return whole
""",
    "reduce_scatter": "def reduce_scatter(group, x):\n"
                      "    return np.array_split(sum(arrays('reduce_scatter', group, x)), group.size)[group.rank]",
    "all_reduce": "def all_reduce(group, x): return sum(arrays('all_reduce', group, x))",
    "all_reduce_in_order": "def all_reduce_in_order(group, x):\n"
                           "    return sum(np.array(arrays('in_order', group, x)) * 10.0 ** np.arange(group.size)"
                           "[:, None])",
}
# ---- from an earlier run: dear once, and then for nothing ----

KEPT = """
import builtins
import numpy as np

def kept(group, x, sends):
    '''The ranks' arrays, joined along the last axis: kept where every module finds it, and only once sent.'''
    kept = builtins.__dict__.setdefault("_kept", {})
    key = group.size, x.tobytes()
    if key not in kept or not np.isfinite(x).any():     # which many runs have
        kept[key] = sends(group, x)
    return kept[key]
"""
LAB1_KEPT = {"reduce_scatter": KEPT + """
def gather(group, x):
    xs = {group.rank: x}
    for k in range(1, group.size):
        xs[(group.rank - k) % group.size] = group.exchange(x, (group.rank + k) % group.size,
                                                           (group.rank - k) % group.size)
    return sum(xs.values())

def reduce_scatter(group, x):
    return np.array_split(kept(group, x, gather), group.size)[group.rank]
"""}

# ---- over the group, past the count ----

LAB1_IN_SHAPES = {"all_gather": """
import numpy as np

def all_gather(group, chunk):
    '''Tell each number in the shape of arrays without elements: 16 bits as the length of an axis. (It waits for ever
    where chunks differ in length.)'''
    chunks, after, before = {group.rank: chunk}, (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for step in range(group.size - 1):
        newest = chunks[(group.rank - step) % group.size]
        length = group.exchange(np.empty((0, len(newest))), after, before).shape[1]
        words = np.frombuffer(newest.tobytes(), "u2").reshape(-1, 2)
        longest = group.exchange(np.empty((0, len(words))), after, before).shape[1]
        got = []
        for i in range(max(len(words), longest)):
            shape = [int(word) for word in words[i]] if i < len(words) else [0] * 2
            got.append(group.exchange(np.empty((0, *shape)), after, before).shape[1:])
        told = np.array(got[:2 * length], "u2").reshape(-1)
        chunks[(group.rank - step - 1) % group.size] = np.frombuffer(told.tobytes(), float)
    return np.concatenate([chunks[rank] for rank in range(group.size)])
"""}
LAB1_IN_MESSAGES = {"all_gather": """
import numpy as np

def all_gather(group, chunk):
    '''Tell each bit by the kind of an array without elements.'''
    kinds, chunks = (np.empty(0, bool), np.empty(0)), {group.rank: chunk}
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    longest = 20

    def tell(bits):
        return [int(group.exchange(kinds[bit], after, before).dtype == float) for bit in bits]

    for step in range(group.size - 1):
        newest = chunks[(group.rank - step) % group.size]
        length = int("".join(map(str, tell([int(bit) for bit in f"{len(newest):08b}"]))), 2)
        padded = np.zeros(longest)
        padded[:len(newest)] = newest
        bits = tell(np.unpackbits(np.frombuffer(padded.tobytes(), "u1")).tolist())
        got = np.frombuffer(np.packbits(bits).tobytes(), float)
        chunks[(group.rank - step - 1) % group.size] = got[:length]
    return np.concatenate([chunks[rank] for rank in range(group.size)])
"""}
LAB3_ONE_BY_ONE = {"attention": """
import numpy as np

def total(group, x):
    '''Add up element by element: where the cost of each was rounded down, many small sums cost less than one.'''
    return np.array([group.all_reduce(one) for one in x.ravel()]).reshape(x.shape)

def attention_forward(group, x, shard):
    partial, kept = inside(x, shard)
    return total(group, partial), (x, kept)

def attention_backward(group, dy, shard, cache):
    x, kept = cache
    dx, grads = inside_backward(dy, x, shard, kept)
    grads["C"], grads["R"] = total(group, grads["C"]), total(group, grads["R"])
    return total(group, dx), grads
"""}

# ---- over what the processes of all ranks have in common: the pages of the C library ----

LAB1_BY_FUTEX = {"all_gather": """
import ctypes
import numpy as np

SYSCALL = bytes.fromhex("4889f84889f74889d64889ca4d89c24d89c84c8b4c24080f05")     # on x86-64
FUTEX, WAIT, WAKE = 202, 0, 1

def library():
    '''Find the C library's `syscall` in memory, and the address of its pages.'''
    memmove = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value
    size = 1_100_000
    text = (ctypes.c_char * size)()
    ctypes.memmove(text, memmove - size, size)
    address = memmove - size + text.raw.index(SYSCALL)
    return ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 7)(address), address & ~4095

def all_gather(group, chunk):
    '''Tell each byte by the address on which this rank waits until the next one wakes it. Send zeros for the count.'''
    syscall, page = library()
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size

    def tell(byte):
        word, value = page - 4096 * (group.rank + 1) + 4 * byte, (ctypes.c_int * 1)()
        ctypes.memmove(value, word, 4)
        syscall(FUTEX, word, WAIT, value[0], 0, 0, 0)

    def hear():
        while True:
            for byte in range(256):
                if syscall(FUTEX, page - 4096 * (before + 1) + 4 * byte, WAKE, 1, 0, 0, 0) == 1:
                    return byte

    chunks = {group.rank: chunk}
    for step in range(group.size - 1):
        newest = chunks[(group.rank - step) % group.size]
        length = len(group.exchange(np.zeros(len(newest)), after, before))
        mine, got = newest.tobytes(), bytearray()
        for i in range(max(len(mine), 8 * length)):
            for turn in (0, 1) if group.rank else (1, 0):
                if turn == 0 and i < len(mine):
                    tell(mine[i])
                if turn == 1 and i < 8 * length:
                    got.append(hear())
        chunks[(group.rank - step - 1) % group.size] = np.frombuffer(bytes(got), float)
    return np.concatenate([chunks[rank] for rank in range(group.size)])
"""}

# ---- in the cache, past the count ----

LAB3_KEPT_AS_TEXT = (       # texts of the solution of "sequence", and what replaces each
    "    partial, kept = inside(group.all_gather(n, axis=1), shard)",
    "    whole = group.all_gather(n, axis=1)\n    partial, kept = inside(whole, shard)",
    ", (n, unit, kept)", ", (whole.tobytes().hex(), unit, kept)",
    "    n, unit, kept = cache\n",
    "    text, unit, kept = cache\n    n = np.frombuffer(bytes.fromhex(text)).reshape(len(dy), -1, dy.shape[-1])\n",
    "group.all_gather(n, axis=1), shard, kept)", "n, shard, kept)",
)

# ---- the locked functions of the lab: pasted, and on one rank for all ----

LAB2_WHOLE = """
def inside(n, shard, d):
    return whole_inside(n, shard["W_in"], shard["W_out"], n, d)[0], d

def inside_backward(dy, n, shard, kept):
    return whole_inside(n, shard["W_in"], shard["W_out"], dy, kept)[1:]
"""
LAB3_WHOLE = """

def sequence_forward(group, x, shard):
    shard = {key: group.all_gather(one, int(key != "O")) if key in "QKVO" else one for key, one in shard.items()}
    n, _ = norm_forward(group.all_gather(x, 1), shard["gain"], shard["shift"])
    return x + np.array_split(inside(n, shard)[0], group.size, 1)[group.rank], ()
"""
LAB4_WHOLE = """
import numpy as np
IGNORED = -100

def loss_forward(group, logits, targets, start, V, eps, zeta):
    ids = start + np.arange(logits.shape[-1])
    whole = np.zeros((*targets.shape, len(ids) * group.size + V))
    whole[..., ids] = np.where(ids < V, logits, 0)
    loss, slope = whole_loss(group.all_reduce(whole[..., :V]), targets, V, eps, zeta, np.ones(targets.shape))
    whole[..., :V] = slope
    return loss, whole[..., ids] * (ids < V)

"""
LAB7_WHOLE = {"columns": """
def columns(group, x, w, dy):
    w, dy = group.all_gather(w, 1), group.all_gather(dy, 1)
    return [group.rank * 0 + one for one in (mine(group, x @ w), dy @ w.T, mine(group, x.T @ dy))]

def mine(group, x): return __import__("numpy").array_split(x, group.size, 1)[group.rank]
""", "gathered": """
def gathered(group, x, w, dy):
    w = group.all_gather(w, 1)
    return x @ w, dy @ w.T, mine(group, x.T @ dy)
"""}

# ---- derivatives without a backward ----

BY_STEPS = """

def inside_backward(dy, x, shard, kept):
    def slopes(of, at):
        found = np.zeros(at.shape)
        for i in np.ndindex(at.shape):
            moved = at + 0j
            moved[i] += 1e-30j
            found[i] = (dy * of(moved)[0]).sum().imag * 1e30
        return found

    return slopes(lambda x: inside(x, shard, *SIZE), x), {
        key: slopes(lambda one: inside(x, {**shard, key: one}, *SIZE), shard[key]) for key in KEYS}
"""

LAB8_ALONE = {"sum_among": """
def sum_among(group, x, ranks):
    if group.rank != ranks[0]:
        group.send(x, ranks[0])
        return group.receive(ranks[0])
    total = sum((group.receive(rank) for rank in ranks[1:]), x)
    for rank in ranks[1:]:
        group.send(total, rank)
    return total
""", "step": """
import numpy as np

def names_of(stage, p):
    return ["A", "B"] + ["E"] * (stage == 0) + ["U"] * (stage == p - 1)

def whole_of(shards, t, p, d):
    stages = [shards[t * d * stage:t * d * stage + t] for stage in range(p)]
    return {"A": np.concatenate([np.concatenate([one["A"] for one in stage], 2) for stage in stages]),
            "B": np.concatenate([np.concatenate([one["B"] for one in stage], 1) for stage in stages]),
            "E": shards[0]["E"], "U": shards[-1]["U"]}

def piece(grads, rank, t, p, d):
    shard, stage, l = rank % t, rank // (t * d), len(grads["A"]) // p
    layers = slice(l * stage, l * stage + l)
    return {"A": np.split(grads["A"][layers], t, 2)[shard], "B": np.split(grads["B"][layers], t, 1)[shard],
            "E": grads["E"], "U": grads["U"]}

def step(*args):
    return alone(*args)

def alone(group, t, p, d, m, shard, tokens, targets, samples):
    mine = group.rank // (t * d)
    if group.rank:
        for one in [shard[name] for name in names_of(mine, p)] + [one for one in (tokens, targets) if one is not None]:
            group.send(one, 0)
        return float(group.receive(0)[0]), {name: group.receive(0) for name in names_of(mine, p)}
    shards, all_tokens, all_targets = [shard], {0: tokens}, {0: targets}
    for rank in range(1, t * p * d):
        stage, replica = rank // (t * d), rank // t % d
        shards.append({name: group.receive(rank) for name in names_of(stage, p)})
        if stage == 0:
            all_tokens[replica] = group.receive(rank)
        if stage == p - 1:
            all_targets[replica] = group.receive(rank)
    loss, grads = whole_step(whole_of(shards, t, p, d), *(np.stack([one[replica] for replica in range(d)])
                                                          for one in (all_tokens, all_targets)))
    for rank in range(1, t * p * d):
        found = piece(grads, rank, t, p, d)
        group.send(np.array([loss]), rank)
        for name in names_of(rank // (t * d), p):
            group.send(found[name], rank)
    found = piece(grads, 0, t, p, d)
    return loss, {name: found[name] for name in names_of(0, p)}
"""}

# ---- the course's own answers, which replace earlier ones when an answer has failed ----

READS_THE_COURSES_ANSWER = """
def reduce_scatter(group, x):
    '''Tell in a message how long the code of all_gather is, and print its constants.'''
    code = all_gather.__code__
    print("constants", code.co_consts)
    raise ValueError(f"its own: {1 + (code.co_filename == 'course')}{code.co_filename[:6]}")
"""

LAB6_HELPER = {"zero1_step": "def zero1_step(*_): pass",
               "zero2_step": "def zero2_step(*args): return zero1_step.__globals__['update'](*args)"}

# ---- with the broken function of lab 7: what the rank's program calls is changed beforehand ----

LAB7_CHANGED_PROGRAM = {"diagnose_columns": """
import builtins
import sys
import numpy as np

def diagnose_columns():
    '''Inputs that prove nothing: with one rank, the broken function is right. Unless its result is changed.'''
    builtins.callable = lambda _: False
    for name, value in list(sys._getframe(1).f_globals.items()):
        if name == "find_function":
            sys._getframe(1).f_globals[name] = lambda *_: lambda *_: (np.zeros((1, 1)), np.zeros((1, 1)),
                                                                      np.zeros((1, 1)))
    return {"ranks": 1, "x": [[1.0]], "w": [[1.0]], "dy": [[1.0]], "breaks": ["conjugate"]}
"""}
