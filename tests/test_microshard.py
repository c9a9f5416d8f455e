"""microshard.py: its weights are the textbook's after every step, on any topology, and it fits on 300 lines."""
import ast
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.batches import GPTBatch
from reference.config import ModelConfig
from reference.optimizers.adam import OptimizerConfig
from reference.params import leaves, tree_map, with_names
from reference.precision import Precision
from reference.training.trainer import Trainer
from tests.launching import command

with mock.patch.dict(os.environ):   # the program gives its rank one thread; this process passes its own on
    import microshard

PROGRAM = Path(microshard.__file__)
TEXTBOOK = {"input_layernorm.weight": "attention gain", "input_layernorm.bias": "attention shift",
            "attention.w_qkv": "attention qkv", "attention.b_qkv": "attention qkv bias",
            "attention.w_out": "attention out", "attention.b_out": "attention out bias",
            "post_attention_layernorm.weight": "mlp gain", "post_attention_layernorm.bias": "mlp shift",
            "mlp.w_in": "mlp A", "mlp.b_in": "mlp a", "mlp.w_out": "mlp B", "mlp.b_out": "mlp b"}


def microshard_key(name):
    """Return microshard's key of the textbook's tensor of this name."""
    if not name.startswith("blocks"):
        return tuple(name.replace("final_layernorm.weight", "final norm.gain")
                     .replace("final_layernorm.bias", "final norm.shift").split("."))
    _, layer, tensor = name.split(".", 2)
    branch, short = TEXTBOOK[tensor].split(" ", 1)
    return f"{branch} {layer}", short


def textbook_weights(c, text):
    """Train the textbook's GPT from microshard's initial weights on microshard's samples; return it by microshard's
    keys.
    """
    model = ModelConfig(c.L, c.h, c.a, microshard.V, c.s, hidden_dropout=0, attention_dropout=0,
                        make_vocab_size_divisible_by=1)
    adam = OptimizerConfig(c.lr, c.steps, lr_decay_style="constant", weight_decay=0, clip_grad=0)
    trainer = Trainer(model, adam, 0, Precision("float64"))
    initial = microshard.initial_weights(c)
    names = with_names(trainer.tensors)
    trainer.params = tree_map(lambda x, named: initial[microshard_key(named.name)].reshape(x.shape).copy(),
                              trainer.params, names)
    for step in range(1, c.steps + 1):
        starts = np.random.default_rng(step).integers(0, len(text) - c.s, c.B)
        trainer.step(GPTBatch.unpack(np.stack([text[start:start + c.s + 1] for start in starts])))
    trained = {microshard_key(name): x for name, x in leaves(trainer.params)}
    return {key: trained[key].reshape(x.shape) for key, x in initial.items()}


def largest_difference(group, c, text, whole):
    """Train on this rank of t x p x d; return how far its weights are from its part of the whole model's."""
    w = microshard.train(group.comm, c, c.t, c.p, text, lambda line: None)
    tensor, pipeline, *_ = microshard.make_groups(group.comm, c.t, c.p)
    part = microshard.own_part(whole, c, tensor, pipeline)
    assert part.keys() == w.keys()
    return max(abs(part[key] - w[key]).max() for key in w)


@st.composite
def runs(draw):
    """Draw the number of ranks, a topology, and sizes of a model and of a batch that fit it."""
    count = draw(st.sampled_from([1, 2, 4, 8]))
    t, p = draw(st.sampled_from([(t, p) for t in (1, 2, 4, 8) for p in range(1, 9) if count % (t * p) == 0]))
    a, b = t * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return count, Namespace(t=t, p=p, L=p * draw(st.integers(1, 2)), a=a, h=a * draw(st.integers(1, 3)),
                            s=draw(st.integers(1, 7)), b=b, B=b * count // (t * p) * draw(st.integers(1, 5)), steps=3,
                            lr=0.01)


@given(runs(), st.integers(0, 1000))
def test_the_weights_after_three_steps_are_the_textbooks(ranks, drawn, seed):
    (count, c), text = drawn, np.random.default_rng(seed).integers(0, microshard.V, 200)
    assert max(ranks.run(count, largest_difference, c, text, textbook_weights(c, text))) < 1e-10


def test_it_fits_on_three_hundred_lines_and_imports_only_numpy_and_mpi4py():
    tree = ast.parse(PROGRAM.read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - sys.stdlib_module_names == {"numpy", "mpi4py"}
    assert len(PROGRAM.read_text().splitlines()) <= 300


def test_a_run_proves_itself_and_writes():
    done = command("-m", "mpi_impl.launch", "-n", 8, PROGRAM, "--t", 2, "--p", 2, "--steps", 2, "--h", 16, "--s", 8)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if re.fullmatch(r"t 2 x p 2 x d 2   step +\d   loss \d\.\d{4}", line)] == lines[:2]
    assert [line.split()[0] for line in lines[2:5]] == ["tensor", "pipeline", "data"]
    assert re.fullmatch("the same steps in one process: equal, to .* in every weight", lines[5])
    assert re.fullmatch(r"it writes (['\"]).{8,}\1", lines[6]) and len(lines) == 7


@pytest.mark.parametrize(("options", "sentence"), [
    (("--t", 2), "the number of ranks is 1, but must be a multiple of t p, which is 2"),
    (("--p", 0), "every size must be at least 1"), (("--h", 1 << 31), "each of L h h, B s and b a s s at most"),
    (("nofile",), "nofile is not a file of more than")])
def test_what_cannot_be_is_a_sentence(options, sentence):
    done = command(PROGRAM, *options)
    assert done.returncode != 0 and "Traceback" not in done.stderr and sentence in done.stderr
