"""The models that benchmarks train: without dropout, in float32, on random tokens."""
import numpy as np
from works import CHOSEN, MASKED, Work

from mpi_impl.comm.topology import Topology
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ExpertsConfig, ModelConfig
from reference.optimizers.adam import OptimizerConfig
from reference.precision import Precision


def gpt(L: int, h: int, a: int, V: int, s: int, **others) -> ModelConfig:
    return ModelConfig(L, h, a, V, s, hidden_dropout=0.0, attention_dropout=0.0, **others)


def model_of(work: Work) -> ModelConfig:
    """Return the GPT, the Llama, the Mixtral or the BERT of these sizes."""
    llama = dict(position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False,
                 ffn_hidden_size=work.f, num_query_groups=work.g, untie_embeddings_and_output_weights=True,
                 experts=ExpertsConfig(work.E, CHOSEN) if work.E else None)
    bert = dict(architecture="bert", heads=("lm", "sop"), predicted_share=MASKED)
    return gpt(work.L, work.h, work.a, work.V, work.s, **llama if work.g else bert if work.bert else {})


def trainer_of(model: ModelConfig, topology: Topology) -> Trainer:
    return Trainer(ModelState(model, topology, 1, Precision("float32")), OptimizerConfig(1e-4, 1))


def random_batch(model: ModelConfig, b: int, s: int = 0, seed: int = 0) -> GPTBatch:
    """Return b samples of s tokens, or of as many as the model takes."""
    shape = 2, b, s or model.max_position_embeddings
    return GPTBatch(*np.random.default_rng(seed).integers(model.vocab_size, size=shape))
