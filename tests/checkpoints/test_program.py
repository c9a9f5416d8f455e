"""The programs with --load-hf and --save-hf: the tokenizer is the model's, a run begins where another has saved."""
import json

import pytest

from tests.checkpoints.runs import P
from tests.program import pretrain, pretrain_bert, refusal


def validation_loss(metrics) -> float:
    return json.loads(metrics.read_text().splitlines()[-1])["validation_loss"]


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_a_run_begins_where_another_has_saved(ranks, saved_run, tmp_path, capfd, model_type):
    """The validation loss is the same with the folder's tokenizer, on another topology, and with --verify."""
    program, common, saved = saved_run(model_type)
    capfd.readouterr()
    ranks.run(2, program, [*common, "--load-hf", str(saved), P, "2", "--lr", "1e-15", "--train-iters", "1", "--verify",
                           "--metrics-file", str(tmp_path / "metrics")])
    assert validation_loss(tmp_path / "metrics") == pytest.approx(validation_loss(saved.parent / "metrics"), rel=1e-11)
    printed = capfd.readouterr().out
    assert "verified against one process" in printed and f"it begins with the weights in {saved}; dropout" in printed


@pytest.mark.parametrize("model_type, program, more, words", [
    ("gpt2", pretrain, "--vocab-size 280 --tokenizer-type ByteLevelBPETokenizer", "says that vocab_size is 300"),
    ("bert", pretrain_bert, "--num-layers 3", "--num-layers is 3, but "),
    ("bert", pretrain, "", "says that model_type is 'bert'"),
])
def test_a_run_that_does_not_fit_its_weights_is_refused(ranks, saved_run, model_type, program, more, words):
    """Every rank refuses it before the first step."""
    _, common, saved = saved_run(model_type)
    (said,) = set(ranks.run(2, refusal, program, [*common, "--load-hf", str(saved), *more.split()]))
    assert words in said
