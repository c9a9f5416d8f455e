"""The program itself, stopped and resumed, killed and resumed: it is the run that nothing has happened to."""
import json
import os
import re
import shutil
from unittest import mock

import numpy as np
import pytest

from mpi_impl.checkpoints import checkpoint
from mpi_impl.checkpoints.folder_lock import LOCK
from mpi_impl.checkpoints.on_disk import TRACKER
from mpi_impl.data.indexed import write_indexed
from mpi_impl.data.saved_tokenizer import SAVED
from tests.deep import one_fast_of
from tests.program import pretrain, refusal

OPTIONS = """--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1
    --global-batch-size 8 --lr 0.01 --lr-warmup-iters 2 --lr-decay-iters 6 --log-interval 1000 --eval-interval 1
    --eval-iters 1 --split 8,2 --tokenizer-type NullTokenizer --vocab-size 20""".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a corpus; return the options that name it."""
    folder = tmp_path_factory.mktemp("data")
    write_indexed(folder / "tokens", [np.random.default_rng(1).integers(0, 20, 3000)], 21)
    return ["--data-path", str(folder / "tokens")]


def curve(ranks, n, options, metrics) -> list[dict]:
    """Return a run's rows about its iterations and evaluations, without their speed."""
    ranks.run(n, pretrain, [*OPTIONS, *options, "--metrics-file", str(metrics)], timeout=60)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def pretrain_and_lose_the_folder(group, options, folder):
    """Remove the folder of the checkpoints before each save."""
    save = checkpoint.save

    def save_anew(*args):
        shutil.rmtree(folder)
        return save(*args)

    with mock.patch.object(checkpoint, "save", save_anew):
        pretrain(group, options)


def test_a_folder_that_was_removed_comes_back_whole(ranks, data, tmp_path):
    """With the tokenizer, which is written before the first step."""
    options = [*OPTIONS, *data, "--train-iters", "1", "--save", str(tmp_path / "D")]
    ranks.run(1, pretrain_and_lose_the_folder, options, tmp_path / "D", timeout=60)
    assert sorted(os.listdir(tmp_path / "D")) == ["iter_0000001", TRACKER, SAVED]


T2P2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


@pytest.mark.parametrize("n, options", one_fast_of(2, [
    (2, "--fp16 --initial-loss-scale 1e8 --loss-scale-window 2 --tensor-model-parallel-size 2 --num-layers 1"),
    (4, "--zero-stage 3 --cpu-offload --pipeline-model-parallel-size 2"),
]))
def test_three_iterations_and_three_are_six(ranks, data, tmp_path, capfd, n, options):
    """Bit by bit in all that is reported: losses, norms, rates, loss scales, evaluations.

    The second run is told to stop early. Both have saved at their ends.
    """
    options = [*options.split(), *data]
    whole = curve(ranks, n, [*options, "--train-iters", "6"], tmp_path / "metrics")
    capfd.readouterr()
    first = curve(ranks, n, [*options, "--train-iters", "3", "--save", f"{tmp_path}/D"], tmp_path / "metrics")
    both = curve(ranks, n, [*options, "--train-iters", "9", "--exit-interval", "6", "--load", f"{tmp_path}/D", "--save",
                            f"{tmp_path}/D", "--save-interval", "4"], tmp_path / "metrics")
    assert (tmp_path / "D" / TRACKER).read_text() == "6" and sorted(os.listdir(tmp_path / "D")) == [
        "iter_0000003", "iter_0000004", "iter_0000006", TRACKER, LOCK, SAVED]
    assert both == whole and both[:len(first)] == first      # in one file, with which the second run has gone on
    said = capfd.readouterr().out
    assert "loaded iteration 3: " in said and re.findall(r"saved iteration (\d+)", said) == ["3", "4", "6"]
    assert ("every iteration was skipped" in said) == ("--fp16" in options)     # in the first run


REFUSED = [
    ("--save {}", "--save {} holds a checkpoint of iteration 7"), ("--load {} --train-iters 7", "--train-iters is 7"),
    ("--load {0}/iter_0000007", "--load {0}/iter_0000007 holds no checkpoint"),
    ("--load {} --hidden-size 32", "--hidden-size is 32, but 16"),
    ("--load {} --vocab-size 19", "The tokenizer is not that of {}/iter_0000007"),
    ("--load {0} --save {0}/{1}", "{0}/{1} is a file"), ("--save /proc/none", "/proc/none cannot be written"),
    ("--save-interval 2", "--save-interval is 2"),
]


def test_what_cannot_be_is_said_before_the_run(ranks, data, tmp_path):
    """The existing checkpoint stays."""
    common = [*OPTIONS, *data, "--train-iters", "8"]
    ranks.run(2, pretrain, [*common, "--exit-interval", "7", "--save", str(tmp_path)], timeout=60)
    for options, words in REFUSED:
        said = ranks.run(2, refusal, pretrain, [*common, *options.format(tmp_path, TRACKER).split()])[0]
        assert said.startswith(words.format(tmp_path, TRACKER))
    goes_on = [*common, "--load", str(tmp_path), "--save", str(tmp_path), *T2P2.split()]
    assert ranks.run(4, refusal, pretrain, goes_on)[0] == ""
