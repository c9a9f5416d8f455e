"""Programs of PyTorch, recorded as their users would: right ones agree however they are divided, and bugs are named."""
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.compare.their_runs import RECORDER, compared
from shardlab.compare.their_runs.differences import Comparison
from shardlab.compare.their_runs.frameworks import in_common_names
from shardlab.compare.their_runs.records import read
from shardlab.compare.their_runs.replay import replay


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a function that runs a program on ranks, tests/torch_training.py or another, and returns its recording."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.15.0")
    tmp = tmp_path_factory.mktemp("torch")
    for path in (RECORDER, *Path(__file__).parents[1].glob("torch_*.py")):
        shutil.copy(path, tmp)

    def record(way, ranks, *bug, program="torch_training.py"):
        folder, port = tmp / "-".join((program, way, str(ranks), *bug)), free_port()
        if not folder.exists():
            started = [subprocess.Popen([sys.executable, program, str(rank), str(ranks), port, way,
                                         str(folder), *bug], cwd=tmp) for rank in range(ranks)]
            assert [one.wait(200) for one in started] == [0] * ranks
        return str(folder)

    return record


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.deep
@pytest.mark.parametrize("way, ranks", [("ddp", 2), ("fsdp", 2), ("tp", 2), ("fsdp_tp", 4)])
def test_pytorch_is_the_same_run_however_it_is_divided(recorded, way, ranks):
    """Nothing is said of the places of the parts: the recorder takes them from the tensors."""
    text, differ = compared(recorded("alone", 1), recorded(way, ranks))
    assert not differ and re.match(r"A and B agree: 36\d tensors of steps 1 and 2 were compared", text), text


@pytest.mark.deep
@pytest.mark.parametrize("bug, way, said", [
    ("same_samples", "ddp", ("A and B were given different batches", "step 1, batch: tokens")),
    ("other_weights", "tp", ("A and B begin with different weights", "step 1, parameters: word.weight")),
    ("loss_divided_twice", "ddp", ("step 1, backward: gradient of root output", "5.0e-01 of the largest")),
    ("gradients_not_summed", "ddp", ("step 1, gradients: gradient of head.weight", "ranks 0, 1 of B")),
    ("one_norm_off", "tp", ("step 1, forward: layers.1.norm_2 output", "rank 1 of B, layer 1"))])
def test_a_bug_in_a_program_of_pytorch_is_named(recorded, bug, way, said):
    text, differ = compared(recorded("alone", 1), recorded(way, 2, bug))
    assert differ and all(one in text for one in said), text


@pytest.mark.deep
def test_stages_of_a_pipeline_are_one_model(recorded):
    """Though a stage first runs once on zeros, and returns what only another stage is given."""
    one, two, wrong = (recorded(*run) for run in (("mean", 1), ("mean", 2), ("sum", 2)))
    text, differ = compared(one, two)
    assert not differ and re.match(r"A and B agree: \d+ tensors of steps 1 and 2 were compared", text), text
    text, differ = compared(one, wrong)
    assert differ and "step 1, backward: gradient of head output" in text, text
    assert "B is 12 times A, everywhere" in text, text


ACCUMULATED = {"right": "", "averaged_twice": "B is 0.5 times A, everywhere",
               "reduced_too_early": "step 1, gradients: ", "targets_of_rank_0": "step 1, batch: targets"}
NORM = "step 1, backward: gradient of final_norm output"
PEERS = {"ours": ACCUMULATED, "nanoGPT": ACCUMULATED,
         "picotron": ACCUMULATED | {"tp": "", "tp_input_gradient_not_summed": NORM}}


@pytest.mark.deep
@pytest.mark.parametrize("program", PEERS)
def test_programs_that_accumulate_gradients_are_right_or_their_bug_is_named(recorded, program):
    """In float32. Before the first step rank 0 evaluates; one process has as many micro-steps as two ranks."""
    variable = f"SHARDLAB_{program.upper()}"
    if program in ("nanoGPT", "picotron") and not os.environ.get(variable):
        pytest.skip(f"{variable} does not name a checkout of {program}")
    one, two = (recorded(program, n, program="torch_peers.py") for n in (1, 2))
    for way, said in PEERS[program].items():
        text, differ = compared(f"{one}/right", f"{two}/{way}")
        assert differ == bool(said) and (said in text if said else text.startswith("A and B agree")), (way, text)


@pytest.mark.deep
def test_megatron_core(recorded, tmp_path):
    """Its loss is in float32, and the textbook agrees with it. The bug: a layer does not sum its input's gradient."""
    pytest.importorskip("megatron.core", reason="Megatron-core is not installed: pip install megatron-core==0.16.1")
    one, two, wrong = (recorded("tp", *run, program="torch_megatron.py")
                       for run in ((1,), (2,), (2, "input_gradient_not_summed")))
    text, differ = compared(one, two)
    assert not differ and re.match(r"A and B agree: 41\d tensors of steps 1 and 2 were compared", text), text
    text, differ = compared(one, wrong)
    assert differ and "step 1, backward: gradient of decoder.layers.1.pre_mlp_layernorm output" in text, text
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 32, "n_positions": 8,
        "activation_function": "gelu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-5}))
    for folder, is_right in ((one, True), (two, True), (wrong, False)):
        recorded_run = read(folder)
        both = in_common_names(replay(recorded_run, str(tmp_path)), recorded_run)
        found = Comparison(*both, unseen="float32").findings()
        assert (not found.differences) == is_right and found.compared > 20, found
