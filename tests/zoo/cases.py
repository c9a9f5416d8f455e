"""The theorems of the zoo's entries: models, batches, plans, and the number of ranks on which a bug shows."""
from dataclasses import replace

from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.volumes import PassCounts
from reference.precision import LossScaling, Precision
from reference.schedules.actions import Schedule, from_csv
from reference.schedules.generators import gpipe, one_f_one_b
from tests.cases import Case, Plan
from tests.zoo.entry import Theorem

__all__ = ["PassCounts", "Plan", "Recompute", "gpipe", "one_f_one_b"]      # for the files of entries

# ---- models and batches ---------------------------------------------------------------------------------------------

# Four heads on two ranks; 10 tokens, so that the second rank's table ends in padding.
MODEL = ModelConfig(2, 16, 4, 10, 6, make_vocab_size_divisible_by=3)
CASE = Case(2, MODEL, 2, 5, seed=7)
SHARDED = Case(2, MODEL, 2, 6, seed=7, sequence_parallel=True)      # each of two ranks has three positions
ROPE = replace(CASE, model=replace(MODEL, position_embedding_type="rope"))
UNEVEN = replace(CASE, model=replace(MODEL, num_layers=3))
BERT = replace(MODEL, architecture="bert", heads=("lm", "sop"))
POST_NORM = replace(BERT, apply_residual_connection_post_layernorm=True)
CHOICE, DEEP_BERT = replace(BERT, heads=("choice",)), replace(BERT, num_layers=3)
HALF_PREDICTED = replace(BERT, predicted_share=0.5)
ORIGINAL, BERT_SHARDED = replace(CASE, model=POST_NORM), replace(SHARDED, model=BERT)
MIDDLE = replace(CASE, t=1, model=DEEP_BERT)
HALVES = Case(2, ModelConfig(3, 16, 4, 21, 6, make_vocab_size_divisible_by=3), 2, 6, seed=11)

GROUPED = replace(CASE, t=4, model=replace(MODEL, num_query_groups=2, position_embedding_type="rope"))

FULL, IN_PAIRS = Recompute("full"), Recompute("full", "uniform", 2)
FLOAT16, ZERO_1 = (HALVES, 2, Plan(2), "float16"), (HALVES, Plan(2, zero_stage=1))
TURNED = from_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0")      # ranks take the microbatches in different orders
LARGE = (1, 1, 1 << 17)      # a megabyte: MPI does not buffer it

# ---- theorems about layers and models -------------------------------------------------------------------------------


def on_ranks(name: str, case: Case, *args) -> Theorem:
    """Return a theorem about a layer or a model on t tensor-parallel ranks."""
    return Theorem(name, case.t, (case, *args))


def in_textbook(name: str, case: Case, *args) -> Theorem:
    """Return a theorem about the textbook, for which no ranks are needed."""
    return Theorem(f"textbook_theorems.{name}", 0, (case, *args))


def of_bert(name: str, *args, model: ModelConfig = BERT, sequence_parallel: bool = False) -> Theorem:
    """Return a theorem about a BERT on two ranks."""
    return Theorem(name, 2, (replace(SHARDED if sequence_parallel else CASE, model=model), *args))


# ---- theorems about training ----------------------------------------------------------------------------------------

MAIN = "training_theorems.training_equals_one_process"
TRAINED_ON_FOUR = Theorem(MAIN, 4, (CASE, 2, 2))      # two replicas of two ranks; steps, microbatches


def trained(schedule="1f1b", chunks=None, t=1, p=2, d=1, m=4, sequence_parallel=False, layers=9, **plan) -> Theorem:
    """Return the main theorem about two steps of a model of nine layers, whose gradients are clipped."""
    model, c = ModelConfig(layers, 8, 2, 10, 6, make_vocab_size_divisible_by=3), plan.get("c", 1)
    s = 6 if sequence_parallel else 5
    if c > 1:
        model, s = replace(model, max_position_embeddings=4 * c + 1), 4 * c
    case = Case(t, model, 2, s, seed=7, sequence_parallel=sequence_parallel)
    return Theorem(MAIN, t * p * c * d, (case, 2, m, 0.05, Plan(p, schedule, chunks, bucket_size=300, **plan)))


def trained_case(case: Case, **plan) -> Theorem:
    """Return the main theorem about two steps of this case, on its t ranks."""
    return Theorem(MAIN, case.t, (case, 2, 2, 0.05, Plan(bucket_size=300, **plan)))


def small(d=1, p=1, m=2, **choices) -> Theorem:
    """Return the same for a model of three layers, without a pipeline."""
    return trained(d=d, p=p, m=m, layers=3, **choices)


def zero(stage: int, **choices) -> Theorem:
    """Return the same for two replicas that shard the states."""
    return small(d=2, zero_stage=stage, **choices)


def hybrid(stage: int) -> Theorem:
    """Return the same for four replicas, of which each two shard the states."""
    return small(d=4, zero_stage=stage, instances=2)


def trained_bert(p=1, d=1, m=2, model=BERT, b=2, layers=3, **choices) -> Theorem:
    """Return the same for a BERT, on the ranks of a pipeline and of replicas."""
    name, ranks, (case, *args) = trained(p=p, d=d, m=m, layers=layers, **choices)
    model = replace(model, num_layers=layers, max_position_embeddings=case.model.max_position_embeddings)
    return Theorem(name, ranks, (replace(case, model=model, b=b), *args))


def observed(name: str, stage: int, **choices) -> Theorem:
    """Return another theorem, about the states that two replicas hold."""
    case, *_, plan = zero(stage, **choices).args
    return Theorem(name, 2, (case, 2, plan))


def run(name: str, *work, t=1, p=2, schedule="1f1b", chunks=None) -> Theorem:
    """Return another theorem on the model of `trained`, without replicas."""
    case, _, m, _, plan = trained(schedule, chunks, t, p).args
    return Theorem(name, t * p, (case, *(work or [m]), plan))


def played(schedule: Schedule, t=1, shape=(2, 3, 4)) -> Theorem:
    """Return a theorem on a schedule without a model."""
    return Theorem("training_theorems.every_message_arrives", t * schedule.p,
                   (schedule, ParallelConfig(t, schedule.p), shape, "d"))


def batches() -> Theorem:
    """Return a theorem about the samples that two replicas of a pipeline see in a step."""
    return Theorem("training_theorems.batch_is_dealt_out", 4, (1, 2, 2, 3, 5, 3))


def sixteen_bits(name: str, *args) -> Theorem:
    """Return a theorem about training in 16 bits."""
    return Theorem(f"precision_theorems.{name}", 4, args)


# ---- theorems about checkpoints -------------------------------------------------------------------------------------

GPT = ModelConfig(4, 8, 2, 11, 4, make_vocab_size_divisible_by=3)
REPLICAS = Plan(), Precision("float64")
SHARDS = Plan(zero_stage=1), Precision("float64")
HALF = Plan(), Precision("bfloat16")
SCALED = Plan(), Precision("float16", LossScaling(initial_loss_scale=2.0**40, loss_scale_window=2, hysteresis=1))


def resumed(plan: Plan, precision: Precision) -> Theorem:
    """Return the theorem that a resumed run is the run, on two replicas."""
    return Theorem("checkpoint_theorems.resumed_run_is_the_run", 2, (Case(1, GPT, 1, 4, seed=1), plan, precision, 2))


def loaded_by(t=1, p=1) -> Theorem:
    """Return the theorem that other shards, or other stages, go on with what two replicas have saved."""
    saves, loads = (Case(size, GPT, 1, 4, seed=1) for size in (1, t))
    return Theorem("checkpoint_theorems.another_topology_goes_on", 2, (saves, Plan(), loads, Plan(p), 2))
