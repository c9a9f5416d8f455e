"""The golden models, a folder for each; transformers itself; and runs of the programs that have saved what they learnt.
"""
import shutil
from functools import cache

import pytest

from tests.checkpoints.runs import GOLDEN_MODELS, T, model_in, weights_of, write_model
from tests.checkpoints.saved_runs import SMALL, train_and_save
from tests.program import pretrain, pretrain_bert


@pytest.fixture
def golden(kind):
    return GOLDEN_MODELS[kind]


@pytest.fixture
def folder(golden, tmp_path):
    """Write the golden model as transformers saves it; return its folder."""
    return write_model(tmp_path / "model", golden["config"], weights_of(golden))


@pytest.fixture
def model(folder):
    return model_in(folder, make_vocab_size_divisible_by=1)


@pytest.fixture(scope="module")
def saved_root(ranks, tmp_path_factory):
    """Save SMALL after its first step; return the folder, of which tests change copies."""
    root = tmp_path_factory.mktemp("saved")
    ranks.run(2, train_and_save, SMALL, root)
    return root


@pytest.fixture
def copy(saved_root, tmp_path):
    return shutil.copytree(saved_root, tmp_path / "copy")


@pytest.fixture(scope="session")
def transformers():
    return pytest.importorskip("transformers", reason="it comes with `pip install -e '.[huggingface]'`")


COMMON = """--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --eval-iters 1 --split 8,2 --dtype float64
    --log-interval 1""".split()
PROGRAMS = {"gpt2": (pretrain, "--vocab-size 300"), "bert": (pretrain_bert, """--vocab-size 120 --activation gelu_exact
    --tokenizer-type BertWordPieceCase --apply-residual-connection-post-layernorm""")}


@pytest.fixture(scope="module")
def saved_run(ranks, tmp_path_factory):
    """Return a function from a model_type to the program, the options of its runs that name a corpus, and a folder in
    which such a run has saved its model.
    """
    text = "\n\n".join(" ".join(f"Here {i} times {i % 7} is {i * (i % 7)}." for i in range(n, n + 12))
                       for n in range(0, 240, 12))

    @cache
    def saved(model_type: str):
        (program, more), folder = PROGRAMS[model_type], tmp_path_factory.mktemp(model_type)
        (folder / "text.txt").write_text(text)
        common = [*COMMON, "--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]
        ranks.run(4, program, [*common, *more.split(), *f"{T} 2 --zero-stage 1 --num-layers 2 --hidden-size 32".split(),
                               *f"--num-attention-heads 4 --train-iters 2 --save-hf {folder / 'saved'}".split(),
                               "--metrics-file", str(folder / "metrics")])
        return program, common, folder / "saved"

    return saved
