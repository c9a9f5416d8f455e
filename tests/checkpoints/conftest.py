"""The golden models, a folder for each; transformers itself; and a run of the program that has saved what it learnt."""
import pytest

from tests.checkpoints.gpt2_runs import GOLDEN_MODELS, T, weights_of, write_model
from tests.program import pretrain


@pytest.fixture(params=sorted(GOLDEN_MODELS))
def kind(request):
    return request.param


@pytest.fixture
def golden(kind):
    return GOLDEN_MODELS[kind]


@pytest.fixture
def folder(golden, tmp_path):
    """Write the golden model as transformers saves it; return its folder."""
    return write_model(tmp_path / "model", golden["config"], weights_of(golden))


@pytest.fixture(scope="session")
def transformers():
    return pytest.importorskip("transformers", reason="it comes with `pip install -e '.[huggingface]'`")


PROGRAM = """--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --eval-iters 1 --split 8,2 --dtype float64
    --log-interval 1""".split()


@pytest.fixture(scope="module")
def run_and_saved(ranks, tmp_path_factory):
    """Return the printed line about the corpus, and a folder in which a run has saved its model."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}." for i in range(400)))
    common = [*PROGRAM, "--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]
    ranks.run(4, pretrain, [*common, *f"{T} 2 --zero-stage 1 --num-layers 2 --hidden-size 32 --vocab-size 300".split(),
                            *f"--num-attention-heads 4 --train-iters 2 --save-hf {folder / 'saved'}".split(),
                            "--metrics-file", str(folder / "metrics")])
    return common, folder / "saved"
