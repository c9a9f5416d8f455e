"""Programs of PyTorch, recorded as their users would: right ones agree however they are divided, and bugs are named."""
import json
import re

import pytest

from shardlab.compare.their_runs import compared
from shardlab.compare.their_runs.differences import Comparison
from shardlab.compare.their_runs.frameworks import in_common_names
from shardlab.compare.their_runs.records import read
from shardlab.compare.their_runs.replay import replay
from tests.torch_programs import TorchPrograms


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a function that runs tests/torch_training.py on ranks, or another program, and returns its recording."""
    programs = TorchPrograms(tmp_path_factory.mktemp("torch"))

    def record(way, ranks, *bug, program="torch_training"):
        return programs.run(program, ranks, *filter(None, (way, *bug)))

    return record


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


@pytest.mark.deep
@pytest.mark.parametrize("bug, said", [("", ""), ("averaged_twice", "B is 0.5 times A, everywhere"),
                                       ("reduced_too_early", "step 1, gradients: "),
                                       ("targets_of_rank_0", "step 1, batch: targets")])
def test_a_program_that_accumulates_gradients_is_right_or_its_bug_is_named(recorded, bug, said):
    text, differ = compared(recorded("accumulated", 1), recorded("accumulated", 2, bug))
    assert differ == bool(bug) and (said in text if bug else text.startswith("A and B agree")), text


@pytest.mark.deep
def test_megatron_core(recorded, tmp_path):
    """Its loss is in float32, and the textbook agrees with it. The bug: a layer does not sum its input's gradient."""
    pytest.importorskip("megatron.core", reason="Megatron-core is not installed: pip install megatron-core==0.16.1")
    one, two, wrong = (recorded("", ranks, bug, program="torch_megatron")
                       for ranks, bug in ((1, ""), (2, ""), (2, "input_gradient_not_summed")))
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
