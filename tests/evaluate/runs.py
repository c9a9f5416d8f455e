"""Models, on disk too, and the program on ranks of the pool, which tests of evaluation share."""
import json

import numpy as np
from hypothesis import strategies as st

from mpi_impl.checkpoints import checkpoint
from mpi_impl.checkpoints.checkpoint import TOKENIZER
from mpi_impl.checkpoints.huggingface import save_model
from mpi_impl.data import saved_tokenizer
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.config import ParallelConfig
from reference.models.model import model_tensors
from reference.optimizers.adam import OptimizerConfig
from reference.params import initialize
from reference.precision import Precision
from shardlab.evaluate.arguments import parse
from shardlab.evaluate.protocol import evaluation
from tests.mpi_impl.test_training import places
from tests.program import refusal
from tests.strategies import cases
from tests.training_theorems import connected

SEED = 5


@st.composite
def evaluations(draw, **options):
    """Draw the number of ranks, p, a case on t, p and d, and the number of samples."""
    t, p, d = draw(st.sampled_from(places()), "t, p, d")
    case = draw(cases(sizes=st.just(t), num_layers=draw(st.integers(p, p + 2), "L"), **options))
    return t * p * d, p, case, draw(st.integers(1, 20), "samples")


def params_of(model):
    """Return the parameters of the models below."""
    return initialize(model_tensors(model), SEED, np.float64)


def save(group, model, tokenizer, root, folder=None) -> None:
    """Save the state of a run before its first step, with its tokenizer, and in Hugging Face's layout."""
    with connected(group, ParallelConfig.for_world(group.size, group.size)) as topology:
        trainer = Trainer(ModelState(model, topology, SEED, Precision("float64")), OptimizerConfig(1e-2, 5))
        checkpoint.save(trainer, str(root), {"tokenizer_type": tokenizer.name, TOKENIZER: tokenizer.fingerprint})
        if folder is not None:
            save_model(trainer, str(folder), tokenizer if group.rank == 0 else None)
    if group.rank == 0:
        saved_tokenizer.save(tokenizer, str(root))


def evaluate(group, options) -> None:
    evaluation(parse(options), group).run()


def metrics(ranks, n: int, path, task: str, *options) -> list[dict]:
    """Return the metrics that the program writes on n ranks, in float64."""
    ranks.run(n, evaluate, ["--task", task, "--dtype", "float64", "--metrics-file", str(path), *map(str, options)])
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(ranks, task: str, *options) -> str:
    """Return the sentence with which the program refuses these options, identical on both ranks."""
    said, *_ = ranks.run(2, refusal, evaluate, ["--task", task, *map(str, options)])
    return said


def split(t: int = 1, p: int = 1) -> list[str]:
    """Return the options of t and p."""
    return ["--tensor-model-parallel-size", str(t), "--pipeline-model-parallel-size", str(p)]
