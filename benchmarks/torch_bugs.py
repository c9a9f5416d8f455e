"""Mistakes to plant in contenders/parallel_gpt.py, and the tensor in which each is wrong first.

tests/test_their_bugs.py plants them, and lets `shardlab compare` name that tensor.
Those with the source "zoo" are the bugs of that title in tests/zoo, made in PyTorch; others have the thread that
reports the mistake, with "after" where the mistake there is only a similar one, or are classics, known to everybody.
"""
from typing import NamedTuple

CLIP = ("--clip", "0.1")
SP = ("--sequence-parallel",)
LOOP = 'for p in model.parameters():\n        if SP and not hasattr(p, "is_shard"):'
NAMED_LOOP = "for name, p in model.named_parameters():\n"
NAMED = f'{NAMED_LOOP}        if SP and not hasattr(p, "is_shard")'
OUTPUT = 'name.endswith(("out.bias", "down.bias"))'
LAST_BIAS = "step 1, gradients: gradient of layers.1.down.bias"
LAST_NORM = "step 1, gradients: gradient of norm.bias"       # of all gradients the first in the backward
CLIPPED = f"{LAST_NORM}, call 2"
WORDS, WORD_TABLE = "step 1, forward: word output", "step 1, parameters: word.weight"
LOSSES, LOGITS = "step 1, forward: loss output", "step 1, backward: gradient of head output"
LAST_HIDDEN = "step 1, backward: gradient of norm output"
POSITIONS, TOKENS = "step 1, forward: position input", "step 1, batch: tokens"
SHOWN, CORE = "step 1, forward: shown loss", "step 1, forward: layers.0.attention.core output"


class Layout(NamedTuple):
    """The numbers of ranks that divide layers, positions and samples, and options of the program."""

    t: int = 1
    c: int = 1
    d: int = 1
    options: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.t * self.c * self.d

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}{size}" for axis, size in zip("tcd", self) if size != 1) or "one rank"
        return " ".join([sizes, *("sp" if option == SP[0] else option.lstrip("-") for option in self.options)])


class TorchBug(NamedTuple):
    """A wrong text in the place of a right one."""

    name: str
    source: str
    axis: str
    layout: Layout
    place: str          # the first tensor that is wrong
    right: str
    wrong: str


T2, T2_SP, C2, D2 = Layout(2), Layout(2, options=SP), Layout(c=2), Layout(d=2)
T2_D2, T2_D2_SP, T2_C2_D2_SP = Layout(2, 1, 2), Layout(2, 1, 2, SP), Layout(2, 2, 2, SP)
CONTROLS = [T2, Layout(4), T2_SP, C2, D2, Layout(2, 2), T2_D2, T2_D2_SP, T2_C2_D2_SP, Layout(2, options=CLIP),
            Layout(c=2, options=CLIP)]

BUGS = [TorchBug(*one) for one in (
    # ---- tensor parallelism
    ("f without its all-reduce", "zoo", "TP", T2, LAST_HIDDEN, "else all_reduce(dx, TP)", "else dx"),
    ("f sums a copy", "zoo; NVIDIA/Megatron-LM #5338", "TP", T2, LAST_HIDDEN,
     "else all_reduce(dx, TP)", "else (all_reduce(dx, TP), dx)[1]"),
    ("g without its all-reduce", "zoo", "TP", T2, WORDS, "else all_reduce(x, TP)", "else x"),
    ("g all-reduces backward too", "zoo", "TP", T2, "step 1, backward: gradient of layers.1.up output",
     "if SP else dy", "if SP else all_reduce(dy, TP)"),
    ("the fused backward of the logits forgets to sum", "zoo", "TP", T2, LAST_HIDDEN,
     "F.linear(Enter.apply(x), self.weight)\n", "F.linear(x, self.weight)\n"),
    ("the row-parallel bias added t times", "zoo", "TP", T2, "step 2, forward: layers.0.attention.out output",
     "F.linear(x, self.weight)) + self.bias", "F.linear(x, self.weight, self.bias))"),
    ("the output bias gets t times its gradient", "zoo", "TP", T2, LAST_BIAS, LOOP,
     f"{NAMED_LOOP}        if {OUTPUT}:"),
    ("QKV split across, not by heads", "zoo", "TP", T2, "step 1, parameters: layers.0.attention.qkv.weight",
     ".transpose(0, 1)       #", "       #"),
    ("the head's size taken from the shard", "after huggingface/transformers #48519", "TP", T2,
     "step 1, forward: layers.0.attention.core input", "HEADS // TP.size", "HEADS"),
    ("every rank draws the same shard", "zoo", "TP", T2, WORD_TABLE,
     "shard(whole, TP, dim).clone()", "whole.chunk(TP.size, dim)[0].clone()"),
    ("replicas of a weight are drawn by each rank", "NVIDIA-NeMo/Automodel #3822", "TP", T2,
     "step 1, parameters: position.weight", "nn.Embedding(S, H)\n",
     "nn.Embedding(S, H)\n        nn.init.normal_(self.position.weight, generator=torch.Generator().manual_seed("
     "TP.rank))\n"),
    ("one rank's epsilon differs", "zoo", "TP", T2, "step 1, forward: layers.0.norm_1 output",
     "nn.LayerNorm(H), Attention()", "nn.LayerNorm(H, 1e-5 * (1 + TP.rank)), Attention()"),
    ("the tied table is a copy", "after NVIDIA/Megatron-LM #6164", "TP", T2,
     "step 1, gradients: gradient of word.weight", "Head(self.word.weight)",
     "Head(nn.Parameter(self.word.weight.detach().clone()))"),
    # ---- the vocabulary
    ("tokens of other ranks not zeroed", "zoo", "TP", T2, WORDS, "x.masked_fill(elsewhere[..., None], 0)", "x"),
    ("the vocabulary's offset off by one", "zoo", "TP", T2, WORDS,
     "ids = tokens - TP.rank * len(self.weight)", "ids = tokens - TP.rank * (len(self.weight) + 1)"),
    ("the maximum not shared", "zoo", "TP", T2, LOSSES, "all_reduce(logits.amax(-1), TP, dist.ReduceOp.MAX)",
     "logits.amax(-1)"),
    ("the sum of exp not shared", "zoo", "TP", T2, LOSSES, "all_reduce(logits.exp().sum(-1), TP)",
     "logits.exp().sum(-1)"),
    ("the target's logit from every rank", "zoo", "TP", T2, LOSSES, "[..., 0].masked_fill(elsewhere, 0), TP)",
     "[..., 0], TP)"),
    ("the loss's gradient stays with the target's rank", "zoo", "TP", T2, LOGITS, "* dlosses[..., None]",
     "* here * dlosses[..., None]"),
    ("every rank subtracts one at its first column", "zoo", "TP", T2, LOGITS, "ids, -here)",
     "ids, -torch.ones_like(here))"),
    # ---- sequence parallelism
    ("an all-gather without its reduce-scatter", "zoo", "SP", T2_SP, LAST_HIDDEN,
     "return reduce_scatter(dx, TP, 1)", "return shard(dx, TP, 1)"),
    ("a reduce-scatter of identical arrays", "zoo", "SP", T2_SP, WORDS,
     "x.masked_fill(elsewhere[..., None], 0)", "all_reduce(x.masked_fill(elsewhere[..., None], 0), TP)"),
    ("every rank's positions begin at 0", "zoo", "SP", T2_SP, POSITIONS,
     "shard(positions, TP, 0) if SP", "positions[:len(positions) // TP.size] if SP"),
    ("gradients of replicated tensors not summed", "zoo", "SP", T2_SP, LAST_NORM, LOOP,
     LOOP.replace("if SP", "if False")),
    ("the norms' gradients not summed", "zoo", "SP", T2_SP, LAST_NORM, LOOP, f'{NAMED} and "norm" not in name:'),
    ("the final norm's gradient not summed", "zoo", "SP", T2_SP, LAST_NORM, LOOP,
     f'{NAMED} and name[:4] != "norm":'),
    ("the biases' gradients not summed", "zoo", "SP", T2_SP, LAST_BIAS, LOOP, f"{NAMED} and not {OUTPUT}:"),
    ("the positions' gradients not summed", "zoo", "SP", T2_SP, "step 1, gradients: gradient of position.weight", LOOP,
     f'{NAMED} and name[:8] != "position":'),
    ("the norms' gradients averaged", "zoo", "SP", T2_SP, LAST_NORM,
     "p.grad = all_reduce(p.grad, TP)", "p.grad = all_reduce(p.grad, TP) / TP.size"),
    ("split tensors' gradients summed, too", "zoo", "SP", T2_SP, "step 1, gradients: gradient of layers.1.down.weight",
     LOOP, "for p in model.parameters():\n        if SP:"),
    ("replicated gradients summed over the world", "zoo", "SP", T2_D2_SP, LAST_NORM,
     "p.grad = all_reduce(p.grad, TP)", "p.grad = all_reduce(p.grad, Axis(None, 0, 0))"),
    # ---- context parallelism
    ("the loss over a rank's own positions", "zoo", "CP", C2, LAST_NORM, "/= CP.size * DP.size", "/= DP.size"),
    ("the loss over a rank's own positions, then clipping", "classic", "CP", C2._replace(options=CLIP), LAST_NORM,
     "/= CP.size * DP.size", "/= DP.size"),
    ("gradients summed over data-parallel ranks alone", "zoo", "CP", T2_C2_D2_SP, LAST_NORM,
     "        p.grad = all_reduce(p.grad, CP)\n", ""),
    ("gathered keys without the reduce-scatter", "zoo", "CP", C2,
     "step 1, backward: gradient of layers.1.attention.qkv output",
     "return reduce_scatter(dkv, CP, 2)", "return shard(dkv, CP, 2)"),
    ("every context rank's positions begin at 0", "zoo", "CP", C2, POSITIONS,
     "positions = positions_of(CP.rank)\n        x", "positions = torch.arange(tokens.shape[1])\n        x"),
    ("targets made from a rank's own tokens", "zoo", "CP", C2, "step 1, batch: targets",
     "rows[:, 1:][:, positions]", "torch.cat((rows[:, positions][:, 1:], rows[:, -1:]), 1)"),
    ("exchanged positions in the order of the ranks", "zoo", "CP", C2, CORE,
     "of_keys = torch.cat([positions_of(rank) for rank in range(CP.size)])", "of_keys = torch.arange(S)"),
    ("a rank's mask begins at position 0", "classic", "CP", C2, CORE,
     "seen = positions_of(CP.rank)[:, None]", "seen = torch.arange(q.shape[1])[:, None]"),
    ("tokens in a row, though all else is zigzag", "classic", "CP", C2, TOKENS,
     "DP, 0), positions_of(CP.rank)", "DP, 0), torch.arange(S).chunk(CP.size)[CP.rank]"),
    # ---- data parallelism
    ("replicas' gradients not summed", "zoo", "DP", D2, LAST_NORM, "        p.grad = all_reduce(p.grad, DP)\n", ""),
    ("gradients averaged, though the loss is the global mean", "zoo", "DP", D2,
     "step 1, backward: gradient of loss output", "loss.backward()", "(loss / DP.size).backward()"),
    ("gradients summed over the model's ranks", "zoo", "DP", T2_D2, LAST_NORM,
     "p.grad = all_reduce(p.grad, DP)", "p.grad = all_reduce(p.grad, Axis(None, 0, 0))"),
    ("the optimizer steps before gradients are summed", "classic", "DP", D2, LAST_NORM,
     "        reduce_gradients(model)\n", "        optimizer.step()\n        reduce_gradients(model)\n"),
    ("gradients of the step before kept", "zoo", "DP", D2, LAST_NORM.replace("1", "2", 1), "optimizer.zero_grad()",
     "pass"),
    ("every replica reads the same samples", "zoo", "DP", D2, TOKENS,
     "shard(torch.randint(V, (B, S + 1), generator=data), DP, 0)",
     "torch.randint(V, (B, S + 1), generator=data)[:B // DP.size]"),
    ("replicas begin with different weights", "zoo", "DP", D2, WORD_TABLE, "manual_seed(0)", "manual_seed(DP.rank)"),
    ("the loss of one replica", "zoo", "DP", D2, SHOWN, "all_reduce(all_reduce(loss.detach(), CP), DP) / (CP.size * "
     "DP.size)", "all_reduce(loss.detach(), CP) / CP.size"),
    ("the displayed loss not summed over cp", "pytorch/torchtitan #3280", "CP", Layout(2, 2), SHOWN,
     "all_reduce(all_reduce(loss.detach(), CP), DP)", "all_reduce(loss.detach(), DP)"),
    # ---- the optimizer
    ("weight decay on biases and norms", "zoo", "optimizer", D2, "step 1, optimizer parameters: layers.0.norm_1.weight",
     '"weight_decay": 0', '"weight_decay": DECAY'),
    ("weight decay on one rank's norms", "classic", "optimizer", T2,
     "step 1, optimizer parameters: layers.0.norm_1.weight", '"weight_decay": 0', '"weight_decay": DECAY * TP.rank'),
    ("a first step on gradients of 0 to make the moments", "NVIDIA/Megatron-LM #5976", "optimizer", D2, WORD_TABLE,
     "    recorder = ", "    for p in parameters:\n        p.grad = torch.zeros_like(p)\n    optimizer.step()\n"
     "    recorder = "),
    ("replicated weights counted t times in the norm", "zoo", "TP", Layout(2, options=CLIP), CLIPPED,
     "all_reduce(sum(shards), TP) + sum(whole)", "all_reduce(sum(shards) + sum(whole), TP)"),
    ("the norm over one rank's shard", "zoo", "TP", Layout(2, options=CLIP), CLIPPED,
     "all_reduce(sum(shards), TP)", "sum(shards)"),
    ("the tied table counted twice in the norm", "zoo", "TP", Layout(2, options=CLIP), CLIPPED,
     "clip(parameters, options", "clip([*parameters, model.head.weight], options"))]
