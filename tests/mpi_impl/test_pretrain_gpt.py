"""The program itself, on real ranks and real text."""
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from mpi_impl.data.cached import prepare
from mpi_impl.data.indexed import write_indexed
from mpi_impl.data.tokenizer_choice import TokenizerChoice
from mpi_impl.launching.pool import RankFailure
from mpi_impl.parallel import buffers
from mpi_impl.programs.arguments import parse
from mpi_impl.programs.gpt import PretrainingGPT
from mpi_impl.runtime.files import check_folder
from reference.errors import UserError
from tests.planted import Bug, planted_run
from tests.program import pretrain, refusal

SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
    --global-batch-size 8 --train-iters 6 --lr 0.01 --lr-warmup-iters 2 --vocab-size 300 --log-interval 2
    --eval-interval 4 --eval-iters 2 --split 8,2 --dtype float64""".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write a text file; return the options that name it and its cache of tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}." for i in range(400)))
    return ["--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]


def split(t=1, p=1, more=""):
    """Return the options for t and p, followed by others."""
    return ["--tensor-model-parallel-size", str(t), "--pipeline-model-parallel-size", str(p), *more.split()]


def train(ranks, n, options):
    ranks.run(n, pretrain, options, timeout=120)


INTERLEAVED = "--num-layers-per-virtual-pipeline-stage"


@pytest.mark.parametrize("n, extra", [
    (1, split()),
    pytest.param(8, split(4, 1, "--micro-batch-size 1"), marks=pytest.mark.deep),
    (8, split(2, 2, f"--num-layers 5 {INTERLEAVED} 2 --global-batch-size 16 --ddp-bucket-size 5000")),
    pytest.param(8, split(2, 2, "--pipeline-schedule zb-h1 --no-scatter-gather-tensors-in-pipeline --num-layers 3"),
                 marks=pytest.mark.deep),
    (4, split(1, 4, "--pipeline-schedule zb-h2 --num-layers 5 --micro-batch-size 1 --position-embedding-type rope "
                    "--rotary-percent 0.5 --untie-embeddings-and-output-weights")),
    pytest.param(4, split(2, 2, "--pipeline-schedule zb-v --num-layers 4"), marks=pytest.mark.deep),
    pytest.param(4, split(1, 2, "--pipeline-schedule gpipe --dtype float32"), marks=pytest.mark.deep),
])
def test_a_verified_run_with_everything_it_writes(ranks, corpus, tmp_path, capfd, n, extra):
    """It agrees with one process, learns, and every number that it sent is the predicted one."""
    files = {name: tmp_path / f"{name}.png" for name in ("metrics-file", "ledger", "plot")}
    options = [*SMALL, *corpus, *extra, "--verify", "--verbose", "--sample-tokens", "20"]
    train(ranks, n, options + [word for name, path in files.items() for word in (f"--{name}", str(path))])

    printed = capfd.readouterr().out
    assert "verified against one process, every iteration" in printed and "off by at most loss" in printed
    (prompt,) = re.findall(r"after <\|> 20 tokens sampled from the model:\n(.+?)<\|>", printed, re.DOTALL)
    assert Path(corpus[1]).read_text().index(prompt) > 5000, "the prompt is the beginning of the validation data"
    assert "All-reduces a layer and microbatch: 2 forward, 2 backward. Predicted: 2 and 2." in printed
    assert "NOT" not in printed

    rows = [json.loads(line) for line in files["metrics-file"].read_text().splitlines()]
    steps = [row for row in rows if "lm_loss" in row]
    assert [row["iteration"] for row in steps] == [1, 2, 3, 4, 5, 6] and steps[-1]["lm_loss"] < steps[0]["lm_loss"]
    assert {"iteration", "lm_loss", "grad_norm", "learning_rate", "tokens_per_second"} <= steps[0].keys()
    validation = [row for row in rows if "validation_loss" in row]
    assert [row["iteration"] for row in validation] == [4, 6]
    assert all(math.isclose(row["validation_perplexity"], math.exp(row["validation_loss"])) for row in validation)

    lines = json.loads(files["ledger"].read_text())
    predicted = [line for line in lines if line["predicted_elements"] is not None]
    assert {line["phase"] for line in predicted} == {"data", "forward", "backward", "reduction", "optimizer",
                                                     "evaluation"}
    assert all((line["calls"], line["elements"]) == (line["predicted_calls"], line["predicted_elements"])
               for line in predicted)
    assert {line["phase"] for line in lines if line not in predicted} == {"verification", "sampling"}
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


def test_a_run_with_its_parameters_cut_and_in_files(ranks, corpus, tmp_path, capfd):
    """The files are in the folder. All replicas take part in the sampling, and one speaks. Activations are measured."""
    options = [*SMALL, *corpus, "--train-iters", "3", "--sample-tokens", "2", "--zero-stage", "3", "--cpu-offload",
               "--offload-folder", str(tmp_path), "--verbose"]
    made = ranks.run(2, folders_of_files, options, timeout=20)      # a replica that gathers alone would wait for ever
    assert made == [[str(tmp_path)] * 3] * 2, "parameters and two moments on each rank"
    printed = capfd.readouterr().out
    assert printed.count("2 tokens sampled from the model") == 1
    (columns,) = (line for line in printed.splitlines() if line.startswith("ranks") and "offloaded" in line)
    assert "activations" in columns and "NOT" not in printed


def folders_of_files(group, options):
    """Return the folders in which a run makes the files of its shards."""
    with mock.patch.object(buffers, "TemporaryFile", wraps=buffers.TemporaryFile) as files:
        pretrain(group, options)
    return [call.kwargs["dir"] for call in files.call_args_list]


def test_the_loss_curve_does_not_depend_on_the_ranks(ranks, corpus, tmp_path):
    """Runs of their own on 1, 2, 4 and 8 ranks: the same losses, norms and validation, to rounding."""
    curves = []
    for n, options in ((1, split()), (2, split(p=2)), (8, split(2, 2, f"{INTERLEAVED} 1")), (8, split(4)), (4, split()),
                       (4, split(1, 4, "--pipeline-schedule zb-h1"))):
        path = tmp_path / f"{len(curves)}"
        train(ranks, n, [*SMALL, *corpus, "--num-layers", "4", "--train-iters", "4", *options, "--metrics-file",
                         str(path)])
        curves.append([(row["iteration"], row.get("lm_loss", row.get("validation_loss")), row.get("grad_norm", 0.0))
                       for row in map(json.loads, path.read_text().splitlines())])
    for curve in curves[1:]:
        for ours, first in zip(curve, curves[0], strict=True):
            assert ours == pytest.approx(first, rel=1e-11)


STEP = "return StepResult(losses, norm, rate, scale, auxiliary)"


@pytest.mark.parametrize("part, module, right, wrong", [
    ("loss", "mpi_impl.training.trainer", STEP, STEP.replace("losses", "(losses[0] * (1 + 1e-9),)")),
    ("gradient", "mpi_impl.training.optimizer",
     'np.sqrt(everyone.all_reduce(to_host(squares), "gradient norm")[0])', "np.sqrt(to_host(squares)[0])"),
    *(pytest.param(*one, marks=pytest.mark.deep) for one in [
        ("gradient", "mpi_impl.parallel.model_state", "if self.embedding_group:", "if False:"),
        ("gradient", "mpi_impl.training.trainer", STEP, STEP.replace("norm", "norm * (1 + 1e-6)")),
        ("weights", "mpi_impl.parallel.tiles", "in_shard.stop, of.tensor.decay", "in_shard.stop, False"),
    ]),
    ("weights", "mpi_impl.training.trainer", STEP,
     f"self.state.parameters.own.flat[0] += 1e-6 * self.topology.place.data\n        {STEP}"),
    ("gradient", "mpi_impl.training.trainer", STEP,
     f"self.state.gradients.own.flat[0] += 1e-6 * self.topology.place.data\n        {STEP}"),
])
def test_verify_fails_a_run_that_is_wrong(ranks, corpus, part, module, right, wrong):
    """A wrong loss, norm, gradient or weight, if only on one replica: --verify says which, and the run fails."""
    options = [*split(2, 2), *SMALL, *corpus, "--clip-grad", "0.1", "--verify"]
    with pytest.raises(RankFailure, match=f"--verify: the {part} of iteration 1 and that of one process differ"):
        ranks.run(8, planted_run, Bug(module, right, wrong), pretrain, options)


def test_verify_stands_a_loss_of_zero(ranks, tmp_path):
    """A corpus of one word is learnt until nothing is left to learn."""
    write_indexed(tmp_path / "zeros", [np.zeros(5000, np.int64)], 4)
    options = ["--data-path", str(tmp_path / "zeros"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "3",
               "--lr", "0.1", "--train-iters", "30", "--verify"]
    ranks.run(1, pretrain, [option for option in SMALL if option not in ("--vocab-size", "300")] + options, timeout=60)


def test_an_evaluation_is_the_mean_over_its_batches(ranks, corpus, tmp_path):
    """Without training, the loss over 4 batches is the mean of their losses; training data differ."""
    def validation(*options):
        path = tmp_path / "metrics"
        train(ranks, 4, [*split(p=2), *SMALL, *corpus, "--lr", "0", "--train-iters", "3", "--metrics-file", str(path),
                         *options])
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return rows[0]["lm_loss"], rows[-1]["validation_loss"]

    _, one = validation("--eval-iters", "1")
    training, two = validation("--eval-iters", "2")
    _, larger = validation("--eval-iters", "1", "--global-batch-size", "16")
    assert two != one and two == pytest.approx(larger, rel=1e-12) and training not in (one, two)


def test_gpt2s_tokenizer_from_its_two_files(ranks, corpus, tmp_path, capfd):
    """All bytes and one merge: the vocabulary is that of the files."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate([*letters, "ti", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt i\n")
    options = [option for option in SMALL if option not in ("--vocab-size", "300")]
    train(ranks, 2, [*split(2), *options, *corpus, "--tokenizer-type", "GPT2BPETokenizer", "--train-iters", "3",
                     "--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt")])
    assert "vocabulary 258, padded to 512" in capfd.readouterr().out


def test_a_gradient_without_end_stops_the_run(ranks, corpus):
    """The loss may still be finite when the gradient's norm is not."""
    bug = Bug("mpi_impl.training.trainer", STEP, STEP.replace("norm", "float('inf')"))
    with pytest.raises(RankFailure, match="The gradient's norm of iteration 1 is inf: the run has diverged"):
        ranks.run(2, planted_run, bug, pretrain, [*SMALL, *corpus])


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_skipped_steps_are_predicted_too(ranks, corpus, capfd, stage):
    """A step without an update sends no new parameters: the ledger's prediction knows, and so does the textbook. And
    probabilities take 2 bytes each where the loss is computed in float16.
    """
    train(ranks, 4, [*split(2), *SMALL, *corpus, "--dtype", "float32", "--fp16", "--initial-loss-scale", "2e9",
                     "--hysteresis", "1", "--train-iters", "20", "--zero-stage", str(stage), "--verify",
                     *["--fp16-lm-cross-entropy"] * (stage % 2)])
    printed = capfd.readouterr().out
    assert " skipped |" in printed and "iteration     20/20" in printed
    assert "NOT" not in printed


@pytest.mark.parametrize("option, advice", [
    ("--loss-scale", "Choose a smaller --loss-scale."),
    ("--initial-loss-scale", "Train longer, or choose a smaller --initial-loss-scale.")])
def test_a_run_that_has_learnt_nothing_says_so(ranks, corpus, capfd, option, advice):
    train(ranks, 1, [*SMALL, *corpus, "--dtype", "float32", "--fp16", option, "1e25", "--train-iters", "3"])
    printed = capfd.readouterr().out
    assert "note: every iteration was skipped" in printed and f"nothing was learnt. {advice}\n" in printed


def test_a_run_gives_its_groups_back(ranks, corpus):
    """MPICH has 2,048 communicators, and a pool of ranks may run programs by the hundred."""
    options = [*SMALL, *corpus, *split(2, 2), "--train-iters", "3"]
    assert not any(ranks.run(4, groups_after, options))


def groups_after(group, options) -> bool:
    """Report whether a group of the topology is still there when the program has run."""
    program = PretrainingGPT(parse(options, group.size), group)
    program.run()
    at = program.topology
    return any(one.comm for one in (at.tensor, at.data, at.pipeline, at.model))


def test_it_stops_when_told(ranks, corpus, capfd):
    train(ranks, 2, [*split(p=2), *SMALL, *corpus, "--exit-interval", "3", "--train-iters", "100"])
    printed = capfd.readouterr().out
    assert "validation at      3" in printed and "validation at      4" not in printed


# ---- bad input ------------------------------------------------------------------------------------------------------


def refusal_on(ranks, n, *options) -> str:
    """Return the sentence that ends the program on all of n ranks."""
    sentence, *_ = ranks.run(n, refusal, pretrain, list(options), timeout=60)
    return sentence


BAD = [
    (split(1, 4), "--tensor-model-parallel-size is 1 and --pipeline-model-parallel-size is 4, so the number of ranks"),
    (["--data-path", "no/such/file"], "no/such/file"),
    (["--lr", "1e300"], "the run has diverged"),
    (["--trace", __file__, "--data-path", "no/such"], f"{__file__} is a file, where a folder is needed"),
    (["--num-layers", "10000", "--hidden-size", "1000000"], "Choose a smaller --num-layers"),
    (["--num-layers", "1000000000"], "--num-layers is 1,000,000,000, but must be at most 10,000"),
    (["--seed", "1234567890123456"], "argument --seed: 1234567890123456 has more than 15 digits"),
    (["--layernorm-epsilon", "inf"], "argument --layernorm-epsilon/--norm-epsilon: inf is not a finite number"),
    (split(1, 2, "--pipeline-schedule interleaved"), "which needs --num-layers-per-virtual-pipeline-stage"),
    (["--zero-stage", "1", "--cpu-offload", "--offload-folder", __file__, "--data-path", "no/such"],
     f"{__file__} is a file, where a folder is needed"),
    (["--trace", "/dev/null/trace", "--data-path", "no/such"], "/dev/null/trace cannot be written: Not a directory."),
    (["--metrics-file", "no/such/folder/file"], "no/such/folder/file cannot be written"),
    (["--seq-length", "100000"], "too few for one sample of --seq-length 100000"),
    (["--split", "1,0,0"], "--split"),
    (["--vocab-file", ""], "--vocab-file is empty. Give a path, or leave the option out."),
]


@pytest.mark.parametrize("options, sentence", BAD)
def test_bad_input_is_one_sentence_on_all_ranks(ranks, corpus, options, sentence):
    assert refusal_on(ranks, 2, *SMALL, *corpus, *options).count(sentence) == 1


def launch(n, *options, program=("-m", "mpi_impl.pretrain_gpt")):
    """Start the program as a person does."""
    command = [sys.executable, "-m", "mpi_impl.launch", "-n", str(n), "--timeout", "60", *program, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=70)


@pytest.mark.parametrize("options, sentence", [
    *BAD[1:3], *(pytest.param(*more, marks=pytest.mark.deep) for more in [BAD[0], *BAD[3:]])])
def test_bad_input_ends_all_ranks_with_one_sentence(corpus, options, sentence):
    """Exit status 2, the sentence once, and no traceback."""
    ends_with_one_sentence(corpus, options, sentence)


FULL = """from mpi_impl.launching.entry import run
from mpi_impl.pretrain_gpt import main
from mpi_impl.reports import metrics

metrics.open_for_writing = lambda path, begins: open("/dev/full", "w")
run(main)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_ends_all_ranks_with_one_sentence(corpus, tmp_path):
    """It fills up when a line of metrics is written; what is written whole is in test_files.py."""
    (tmp_path / "full.py").write_text(FULL)
    ends_with_one_sentence(corpus, ["--metrics-file", str(tmp_path / "metrics")],
                           "/dev/full cannot be written: No space left on device.", [str(tmp_path / "full.py")])


def ends_with_one_sentence(corpus, options, sentence, program=("-m", "mpi_impl.pretrain_gpt")):
    ended = launch(2, *SMALL, *corpus, *options, program=program)
    assert ended.returncode == 2
    assert ended.stderr.count(sentence) == 1 and ended.stderr.count("error") == 1, ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout


def test_what_is_there_is_not_lost(ranks, corpus, tmp_path):
    """Bad input leaves the last run's metrics alone, and the data is never overwritten."""
    metrics = tmp_path / "metrics"
    metrics.write_text("the last run's")
    assert refusal_on(ranks, 1, *SMALL, *corpus, "--metrics-file", str(metrics), "--data-path", "no/such")
    assert metrics.read_text() == "the last run's"
    sentence = refusal_on(ranks, 1, *SMALL, *corpus, "--metrics-file", corpus[1])
    assert "is a file that --data-path reads" in sentence and Path(corpus[1]).stat().st_size


def test_a_vocabulary_too_small_for_the_data(ranks, corpus):
    """Tokens made with a larger vocabulary are refused with the first one that does not fit."""
    train(ranks, 1, [*SMALL, *corpus, "--exit-interval", "1"])
    (trained,) = Path(corpus[-1]).rglob("tokenizer.json")       # the cache of the tokenizer that was trained here
    tokens = trained.with_name("tokens.bin")
    sentence = refusal_on(ranks, 2, *SMALL, "--data-path", str(tokens), "--tokenizer-type", "NullTokenizer",
                          "--vocab-size", "50")
    assert "outside the vocabulary of 51 tokens" in sentence


@pytest.mark.parametrize("size, sentence", [(2_000_000, "too large"), (256, "too small")])
def test_a_vocabulary_that_cannot_be_trained_is_refused_before_the_corpus_is_read(size, sentence):
    with pytest.raises(UserError, match=f"--vocab-size {size} is {sentence}"):
        prepare("no/such/corpus", TokenizerChoice(vocab_size=size))


def test_the_folder_of_a_trace_is_made(tmp_path):
    check_folder(str(tmp_path / "a" / "b"))
    check_folder(str(tmp_path / "a" / "b"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "b"]


@pytest.mark.deep
@pytest.mark.parametrize("t, p", [(8, 1), (2, 4)])
def test_the_standard_library_on_eight_ranks(ranks, tmp_path, capfd, t, p):
    """The default corpus and a model of the demo's size, verified for a while in float32."""
    options = ["--global-batch-size", "16", "--micro-batch-size", "2", "--train-iters", "3", "--eval-iters", "1",
               "--data-cache-path", str(tmp_path), "--verify"]
    ranks.run(8, pretrain, [*split(t, p), *options], timeout=300)
    assert "verified against one process, every iteration" in capfd.readouterr().out
