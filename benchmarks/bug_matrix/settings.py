"""The run in which a bug of the zoo is live: its ranks, model, plan and format, as the entry's theorem has them."""
from dataclasses import replace
from typing import NamedTuple

from benchmarks.bug_matrix.texts import VOCAB_SIZE
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.volumes import PassCounts
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.stages import layouts_of_ranks, schedule_of
from reference.precision import FORMATS, LossScaling, Precision
from reference.schedules.actions import Schedule
from tests.cases import Case, Plan
from tests.precision_theorems import CASE as IN_16_BITS
from tests.zoo.entry import Entry, Theorem

HIDDEN, HEADS, SEQUENCE, BATCH, SEED = 32, 4, 16, 8, 1
STEPS = 200         # of a training run


class BugSetting(NamedTuple):
    """A training run on ranks of a pool."""

    ranks: int
    case: Case
    plan: Plan
    m: int                                      # microbatches of a replica, a step
    form: str = "float32"
    order: Schedule | None = None               # of the pipeline's actions, if it is not the plan's
    loads: tuple[Case, Plan] | None = None      # the topology that goes on from a checkpoint, if there is one

    @property
    def batch(self) -> int:
        """Return the number of sequences, or of questions, in a global batch."""
        return self.case.b * self.m * (self.ranks // (self.case.t * self.plan.p))

    @property
    def on_one_rank(self) -> "BugSetting":
        """Return the same run on one rank, which must learn the same."""
        return BugSetting(1, replace(self.case, t=1, b=self.batch, sequence_parallel=False),
                          Plan(muon=self.plan.muon), 1, self.form)

    @property
    def optimizer(self) -> OptimizerConfig:
        return self.plan.optimizer(5e-3, STEPS, lr_warmup_iters=10)

    def precision(self, form: str = "") -> Precision:
        """Return the run's precision. In float16 the search for the loss scale begins with some overflows."""
        form = form or self.form
        return Precision(form, LossScaling(initial_loss_scale=2.0**24) if form == "float16" else
                         LossScaling(loss_scale=1.0))


def setting_of(entry: Entry) -> BugSetting | None:
    """Return the run in which the bug is live, or None for a bug of the textbook, which trains in one process."""
    theorem = entry.theorem
    if not theorem.ranks:
        return None
    if theorem.name.startswith("checkpoint_theorems."):
        return setting_with_checkpoint(theorem)
    found = {type(one): one for one in theorem.args}
    order, parallel = found.get(Schedule), found.get(ParallelConfig)
    half = next((one for one in theorem.args if one in FORMATS), "")
    if theorem.name.startswith("precision_theorems."):
        half = half or "float16"
    case, plan = found.get(Case), found.get(Plan, Plan(recompute=found.get(Recompute, Recompute())))
    if theorem.name.endswith("batch_is_dealt_out"):
        case, plan = a_case(theorem.args[0]), Plan(theorem.args[1])
    elif parallel:
        case, plan = a_case(parallel.tensor_model_parallel_size), Plan(parallel.pipeline_model_parallel_size)
    return fitted(theorem.ranks, case or IN_16_BITS, plan, microbatches_of(theorem, order), half or "float32", order)


def a_case(t: int) -> Case:
    return Case(t, ModelConfig(3, 8, 2, 10, 6, make_vocab_size_divisible_by=3), 2, 4, seed=7)


def setting_with_checkpoint(theorem: Theorem) -> BugSetting:
    """Return a run that ends, and is gone on with in the topology that the theorem loads."""
    if theorem.name.endswith("another_topology_goes_on"):
        saves, plan, loads, other, _ = theorem.args
        form = "float32"
    else:
        saves, plan, precision, _ = theorem.args
        loads, other, form = saves, plan, precision.compute
    setting = fitted(theorem.ranks, saves, plan, 2, "float32" if form == "float64" else form, None)
    goes_on = fitted(theorem.ranks, loads, other, 2, form, None)
    return setting._replace(loads=(replace(goes_on.case, model=setting.case.model), goes_on.plan))


def microbatches_of(theorem: Theorem, order: Schedule | None) -> int:
    if order:
        return order.microbatches
    work = next((one for one in theorem.args if isinstance(one, PassCounts)), None)
    if work:
        return work.microbatches // work.steps
    return theorem.args[2] if theorem.name.endswith("training_equals_one_process") else 2


def fitted(ranks: int, case: Case, plan: Plan, m: int, form: str, order: Schedule | None) -> BugSetting:
    """Return the run with our sizes: as few layers as show the bug, and batches of one size."""
    t, d = case.t, ranks // (case.t * plan.p)
    if BATCH % (m * d):
        m = 2
    b = case.b if case.b > BATCH else BATCH // (m * d)
    stages = schedule_of(replace(plan, chunks=plan.chunks).parallel(ranks, case), plan.p).stages
    layers = case.model.num_layers
    if plan.p > 1:
        layers = stages + (layers % stages > 0)
    model = replace(case.model, num_layers=layers, hidden_size=HIDDEN, num_attention_heads=HEADS,
                    vocab_size=VOCAB_SIZE, max_position_embeddings=SEQUENCE, make_vocab_size_divisible_by=3)
    (small, *_), (large, *_) = (layouts_of_ranks(one, plan.parallel(ranks, case)) for one in (case.model, model))
    plan = replace(plan, bucket_size=round(plan.bucket_size * large.size / small.size))     # about as many buckets
    return BugSetting(ranks, Case(t, model, b, SEQUENCE, SEED, sequence_parallel=case.sequence_parallel), plan, m,
                      form, order)
