"""pretrain_bert with --load-hf and --save-hf: the tokenizer is the model's, a run begins where another has saved."""
import json

import pytest

from mpi_impl.checkpoints.huggingface_config import CONFIG
from mpi_impl.data.tokenizer import BertWordPieceCase
from tests.program import pretrain, pretrain_bert, refusal

PROGRAM = """--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --eval-iters 1 --split 8,2 --dtype float64
    --log-interval 1""".split()
T, P = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


@pytest.fixture(scope="module")
def saved_runs(ranks, tmp_path_factory):
    """Return the printed line about the corpus, and by order a folder in which a run has saved its model."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("\n\n".join(" ".join(
        f"Here {i} times {i % 7} is {i * (i % 7)}." for i in range(n, n + 12)) for n in range(0, 240, 12)))
    common = [*PROGRAM, "--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]
    for model_type, order in (("bert", "--apply-residual-connection-post-layernorm"), ("megatron-bert", "")):
        ranks.run(4, pretrain_bert, [
            *common, *f"{T} 2 --zero-stage 1 --num-layers 2 --hidden-size 32 --vocab-size 120 {order}".split(),
            *f"--num-attention-heads 4 --train-iters 2 --save-hf {folder / model_type}".split(),
            *"--tokenizer-type BertWordPieceCase --activation gelu_exact".split(),
            "--metrics-file", str(folder / f"{model_type} metrics")])
    return common, folder


def validation_loss(metrics) -> float:
    return json.loads(metrics.read_text().splitlines()[-1])["validation_loss"]


@pytest.mark.parametrize("model_type", ["bert", "megatron-bert"])
def test_a_run_begins_where_another_has_saved(ranks, saved_runs, tmp_path, capfd, model_type):
    """The validation loss is the same with the folder's tokenizer, on another topology, and with --verify."""
    common, folder = saved_runs
    ranks.run(2, pretrain_bert, [*common, "--load-hf", str(folder / model_type), P, "2", "--lr", "1e-15", "--verify",
                                 "--train-iters", "1", "--metrics-file", str(tmp_path / "metrics")])
    assert validation_loss(tmp_path / "metrics") == pytest.approx(validation_loss(folder / f"{model_type} metrics"),
                                                                  rel=1e-11)
    assert "verified against one process" in capfd.readouterr().out


def test_the_saved_tokenizer_is_the_one_of_the_run(saved_runs):
    _, folder = saved_runs
    (trained,) = folder.glob("cache/*/tokenizer.json")
    ours, again = BertWordPieceCase.load(trained), BertWordPieceCase.from_vocab_file(str(folder / "bert" / "vocab.txt"))
    assert again.encode("Here 12 times 5 is 60.") == ours.encode("Here 12 times 5 is 60.")
    assert (again.vocab_size, again.pad, again.mask) == (ours.vocab_size, ours.pad, ours.mask)
    config = json.loads((folder / "bert" / CONFIG).read_text())
    assert (config["pad_token_id"], config["architectures"]) == (ours.pad, ["BertForPreTraining"])


@pytest.mark.parametrize("program, more, sentence", [
    (pretrain_bert, "--vocab-size 110 --tokenizer-type BertWordPieceLowerCase", "says that vocab_size is "),
    (pretrain_bert, "--num-layers 3", "--num-layers is 3, but "),
    (pretrain, "", "says that model_type is 'bert', but this program has a GPT, so it must be gpt2 or "),
])
def test_a_run_that_does_not_fit_its_weights_is_refused(ranks, saved_runs, program, more, sentence):
    """Every rank refuses it before the first step."""
    common, folder = saved_runs
    (said,) = set(ranks.run(2, refusal, program, [*common, "--load-hf", str(folder / "bert"), *more.split()]))
    assert sentence in said
