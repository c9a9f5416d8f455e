"""The program with --load-hf and --save-hf: the tokenizer is the model's, and a run begins where another has saved."""
import json
from pathlib import Path

import pytest

from mpi_impl.checkpoints.huggingface_config import CONFIG, check_vocabulary, read_config
from mpi_impl.data.tokenizer import ByteLevelBPETokenizer, GPT2BPETokenizer, NullTokenizer
from tests.checkpoints.gpt2_runs import P, refuses
from tests.program import pretrain, refusal


@pytest.mark.parametrize("kind", ["tied"])
def test_the_tokenizer_must_be_the_models(folder, tmp_path):
    check_vocabulary(str(folder), NullTokenizer(10))
    refuses(lambda: check_vocabulary(str(folder), NullTokenizer(11)),
            f"{folder / CONFIG} says that vocab_size is 11, but the NullTokenizer has 12 tokens. Give the tokenizer")
    tokenizer = ByteLevelBPETokenizer.train(["some words, some words"], 260)
    (folder / CONFIG).write_text(json.dumps(read_config(str(folder), "gpt") | {"vocab_size": 260}))
    check_vocabulary(str(folder), tokenizer)
    tokenizer.library.model.save(str(folder))
    check_vocabulary(str(folder), tokenizer)
    other = ByteLevelBPETokenizer.train(["quite another text, quite another"], 260)
    refuses(lambda: check_vocabulary(str(folder), other), f"{folder}/vocab.json has another number for the token ")


def validation_loss(metrics: Path) -> float:
    return json.loads(metrics.read_text().splitlines()[-1])["validation_loss"]


def test_a_run_begins_where_another_has_saved(ranks, run_and_saved, tmp_path, capfd):
    """The validation loss is the same with the folder's tokenizer, on another topology, and with --verify."""
    common, saved = run_and_saved
    ranks.run(2, pretrain, [*common, "--load-hf", str(saved), P, "2", "--lr", "1e-15", "--train-iters", "1", "--verify",
                            "--metrics-file", str(tmp_path / "metrics")])
    assert validation_loss(tmp_path / "metrics") == pytest.approx(validation_loss(saved.parent / "metrics"), rel=1e-11)
    printed = capfd.readouterr().out
    assert "verified against one process" in printed
    assert f"it begins with the weights in {saved}; dropout 0.1, and 0.1" in printed


def test_the_saved_tokenizer_is_the_one_of_the_run(run_and_saved):
    common, saved = run_and_saved
    (trained,) = saved.parent.glob("cache/*/tokenizer.json")
    ours = ByteLevelBPETokenizer.load(trained)
    again = GPT2BPETokenizer(str(saved / "vocab.json"), str(saved / "merges.txt"))
    assert again.encode("12 times 5 is 60, <|endoftext|> é") == ours.encode("12 times 5 is 60, <|endoftext|> é")
    assert (again.vocab_size, again.eod) == (ours.vocab_size, ours.eod)
    assert json.loads((saved / CONFIG).read_text())["eos_token_id"] == ours.eod


@pytest.mark.parametrize("more, sentence", [
    ("--vocab-size 280 --tokenizer-type ByteLevelBPETokenizer", "says that vocab_size is 300, but the "
     "ByteLevelBPETokenizer has 280 tokens."),
    ("--vocab-size 280", "--vocab-size 280 contradicts --vocab-file"),
    ("--num-layers 3", "--num-layers is 3, but "),
])
def test_a_run_that_does_not_fit_its_weights_is_refused(ranks, run_and_saved, more, sentence):
    """Every rank refuses it before the first step."""
    common, saved = run_and_saved
    (said,) = set(ranks.run(2, refusal, pretrain, [*common, "--load-hf", str(saved), *more.split()]))
    assert sentence in said
