"""Theorems about training on t x p x d real ranks: every rank of a group runs them, and rank 0 compares."""
import gc
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.topology import Place, connect, disconnect
from mpi_impl.models import model
from mpi_impl.parallel import passes
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.pipeline import Pipeline
from mpi_impl.parallel.replicas import join_replicas
from mpi_impl.training.batches import Batches
from mpi_impl.training.trainer import StepResult, Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.costs.volumes import PassCounts, pipeline_traffic
from reference.models.model import model_tensors, sequences_of
from reference.models.stage import StageCache, has_embedding, has_head
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.data_parallel import samples_of
from reference.parallel.stages import schedule_of
from reference.params import Shared, deal, split
from reference.positions import SequencePart, zigzag
from reference.precision import Precision
from reference.schedules.actions import Schedule, Send, lower, needs, result as result_of, user_stage
from reference.schedules.simulate import activations_in_flight
from reference.training import trainer as training
from reference.training.random_start import start_textbook
from shardlab.predict.predict import added, predict
from shardlab.predict.rank import ImaginedWorld
from shardlab.prove.runs import start_ranks
from tests.cases import Case, Plan, close, take, trees_close
from tests.rank_theorems import as_is, first_checks, host

ALONE = Plan()      # neither a pipeline nor ZeRO
FLOAT64 = Precision("float64")
ONE_LAYER = ModelConfig(1, 2, 1, 3, 8)


@contextmanager
def connected(group, parallel: ParallelConfig):
    """Yield the topology, for as long as the `with` block lasts."""
    topology = connect(group, parallel)
    try:
        yield topology
    finally:
        disconnect(topology)


@contextmanager
def trainer_on(group, case: Case, plan: Plan = ALONE, precision: Precision = FLOAT64,
               optimizer: OptimizerConfig | None = None, **choices):
    """Yield a trainer of the case on the group's ranks, for as long as the `with` block lasts."""
    with connected(group, plan.parallel(group.size, case)) as topology:
        yield Trainer(ModelState(case.model, topology, case.seed, precision, **choices),
                      optimizer or plan.optimizer(1e-2, 10))


def batch_of(trainer: Trainer, case: Case, microbatches: int, step: int = 0) -> tuple[list, int]:
    """Return this replica's microbatches of a step, and the size of the global batch."""
    batch = microbatches * trainer.topology.data.size * case.b
    return dealt(trainer, case.b, case.batch(str(step), batch)), batch


class Found(NamedTuple):
    """The results of one rank after a step."""

    place: Place
    result: StepResult
    peak_caches: int
    grads: Any
    params: Any
    tensors: Any


def training_equals_one_process(group, case: Case, steps: int, microbatches: int, clip_grad: float = 0.5,
                                plan: Plan = ALONE, wrap=as_is, order: Schedule | None = None):
    """Prove the main theorem: losses, norms, clipped gradients and weights are one process's, in evaluation too.

    Also, every rank's peak number of caches is the simulator's. With `order` the stages do their work in that order,
    whatever the schedule's name.
    """
    # eps is above the rounding in a gradient that is zero otherwise, the key bias's: Adam must not blow that up.
    optimizer = plan.optimizer(1e-2, 10, lr_warmup_iters=1, clip_grad=clip_grad, adam_eps=1e-4)
    with trainer_on(group, case, plan, FLOAT64, optimizer, like=wrap(np.empty(0))) as ours:
        topology = ours.topology
        textbook = training.Trainer(case.model, optimizer, case.seed, ours.state.precision) if group.rank == 0 else None
        if case.exact:
            start_from_random_numbers(case, ours)
            if textbook is not None:
                start_textbook_from_random_numbers(case, textbook)
        if order is not None:
            ours.pipelines["training", microbatches] = Pipeline(order, topology)
        in_flight = activations_in_flight(order or schedule_of(topology.config, microbatches))
        batch = microbatches * topology.data.size * case.b
        for step in range(steps):
            samples = case.batch(str(step), batch)
            result = ours.step(dealt(ours, case.b, samples, wrap), batch)
            grads, params = (ours.state.layout.views(host(ours.state.whole(states.own)))
                             for states in (ours.state.gradients, ours.state.parameters))
            found = Found(topology.place, result, ours.peaks.caches, grads, params, ours.state.layout.tensors)
            first_checks(group, found, lambda everyone, samples=samples: step_equals(
                textbook.step(samples), textbook.params, textbook.auxiliary if case.model.experts else None, in_flight,
                topology.config, everyone))
        fewer = (microbatches + 1) // 2 * topology.data.size * case.b     # an evaluation takes any number
        samples = take(samples, slice(fewer))
        loss = sum(ours.evaluate(dealt(ours, case.b, samples, wrap), fewer))
        first_checks(group, loss, lambda everyone: close(np.stack(everyone), np.stack(len(everyone) * [
            training.loss_and_gradients(samples, textbook.params, case.model)[0]])))


def start_from_random_numbers(case: Case, trainer: Trainer) -> None:
    """Add exact numbers to the ranks' initial parameters."""
    start_ranks(trainer.state, case.params(model_tensors(case.model)))


def start_textbook_from_random_numbers(case: Case, textbook: training.Trainer) -> None:
    """Add the same to those of one process."""
    start_textbook(textbook, case.params(textbook.tensors))


def dealt(trainer: Trainer, b: int, samples, wrap=as_is) -> list:
    """Return this replica's microbatches, with nonsense in the fields that the rank must not need."""
    d, r = trainer.topology.data.size, trainer.topology.place.data
    rows = len(samples.tokens) // sequences_of(trainer.state.model)
    if not has_embedding(trainer.state.layout.tensors):
        samples = nonsense(samples, "tokens", "token_types")
    if not has_head(trainer.state.layout.tensors, trainer.state.model):
        samples = nonsense(samples, "targets", "swapped", "answers")
    mine = [take(samples, samples_of(r, k, d, b)) for k in range(rows // (d * b))]
    if (context := trainer.topology.context) is not None:
        s = samples.tokens.shape[1]
        mine = [batch.at(SequencePart(context.rank, zigzag(context.size, s))) for batch in mine]
    return [type(batch)(*(x if x is None else wrap(x) for x in batch)) for batch in mine]


def nonsense(samples, *names):
    return samples._replace(**{name: np.full_like(x, -1) for name, x in samples._asdict().items() if name in names})


def step_equals(expected, params, auxiliary, in_flight: list[int], parallel: ParallelConfig,
                everyone: list[Found]) -> None:
    """Assert that every rank has one process's losses and norm, and every replica its gradients and weights."""
    loss, norm, grads = expected
    for found in everyone:
        close(np.stack([found.result.loss, found.result.grad_norm]), np.stack([loss, norm]))
        assert found.peak_caches == in_flight[found.place.pipeline], "another number of caches than was simulated"
    if auxiliary is not None:
        for found in everyone:
            close(np.stack(found.result.auxiliary), auxiliary)
    tensors = [next(found.tensors for found in everyone if found.place.pipeline == stage)
               for stage in range(len(in_flight))]
    for field, whole in (("grads", grads), ("params", params)):
        trees = {found.place: getattr(found, field) for found in everyone}
        for replica in join_replicas(trees, tensors, parallel):
            trees_close(replica, whole, 1e-10)
        for at, tree in trees.items():
            copies_equal_whole(at, tree, tensors[at.pipeline], whole, parallel)


def copies_equal_whole(at: Place, tree, tensors, whole, parallel: ParallelConfig) -> None:
    """Assert that a rank's copy of a tied word table, or of a block that all layers share, is its shard of the whole.
    """
    t, e = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    expert_rank = (at.data * parallel.context_parallel_size + at.context) % e
    units = [(p.embedding.word, p.blocks.shared if isinstance(p.blocks, Shared) else None)
             for p in (tree, tensors, whole)]
    for copy, tensor, expected in zip(*units):
        if copy is not None:
            trees_close(copy, deal(split(expected, tensor, t)[at.tensor], tensor, e)[expert_rank], 1e-10)


def ledger_is_predicted(group, case: Case, work: PassCounts, plan: Plan):
    """Assert that a pipeline's ranks send what their runs without data predict, to the element, and nothing else. Of
    what travels to experts, which the data decide, calls alone are compared.
    """
    with trainer_on(group, case, plan) as trainer:
        topology, together = trainer.topology, Ledger()
        batches = Batches(Words(case) if topology.place.tensor == 0 else None, case.model, topology, case.s, case.b,
                          work.microbatches // work.steps)
        for step in range(work.steps):
            trainer.step(batches.microbatches_of("train", step), batches.global_batch_size)
        for step in range(work.evaluations):
            trainer.evaluate(batches.microbatches_of("validation", step), batches.global_batch_size)
        imagined = ImaginedWorld(case.model, topology.config, Precision("float64"), case.b, case.s,
                                 batches.microbatches, optimizer=trainer.optimizer.config)
        mine = predict(imagined, group.rank).sent(work)
        for ledger in topology.pipeline.allgather_objects(group.ledger):
            together.add(ledger)
        predicted = added(*((one, 1) for one in topology.pipeline.allgather_objects(mine)))
        found, expected = ({(e.operation, e.group, e.phase, e.reason): total.calls if e.operation == "all_to_all_rows"
                            else tuple(total) for e, total in totals.items()}
                           for totals in (together.totals, predicted))
        assert found == expected, f"{found.items() ^ expected.items()}"


def messages_have_their_size(group, case: Case, m: int, plan: Plan):
    """Assert that each Send of the schedule is one message of b s h elements, or of 1/t of them in t parts."""
    with trainer_on(group, case, plan) as trainer:
        trainer.step(*batch_of(trainer, case, m))
        config, stage = trainer.topology.config, trainer.topology.pipeline.rank
        sends = sum(isinstance(step, Send) for step in lower(schedule_of(config, m))[stage])
        each = pipeline_traffic(case.b, case.s, case.model.hidden_size, config.sent_parts)
        assert group.ledger.calls(operation="send") == sends > 0
        assert group.ledger.elements(operation="send") == sends * each


class Words:
    """A data set of random samples."""

    def __init__(self, case: Case):
        self.case = case

    def batch(self, part, first, count):
        if self.case.model.causal:
            return self.case.ids(f"{part} {first}", count, self.case.s + 1)
        return self.case.batch(f"{part} {first}", count).pack()


class Numbers:
    """A data set whose sample i is i, i + 1, ..., i + s."""

    def __init__(self, s):
        self.s = s

    def batch(self, part, first, count):
        assert part == "train"
        return np.arange(first, first + count)[:, None] + np.arange(self.s + 1)


def batch_is_dealt_out(group, t: int, p: int, b: int, m: int, s: int, step: int):
    """Assert that microbatch k of replica r has the samples from (k d + r) b on of the step's global batch.

    Only tensor rank 0 of a pipeline's ends has data, and sends it to the ranks that need it. The first stage has the
    tokens, the last one the targets; those between only know the shape.
    """
    with connected(group, ParallelConfig.for_world(group.size, t, p)) as topology:
        (tensor, _, replica, stage), d = topology.place, topology.data.size
        at_an_end = stage in (0, p - 1)
        batches = Batches(Numbers(s) if tensor == 0 and at_an_end else None, ONE_LAYER, topology, s, b, m)
        dealt = batches.microbatches_of("train", step)
        assert group.ledger.calls(reason="batch", phase="data") == (m if at_an_end else 0) and len(dealt) == m
        for k, (tokens, targets, _) in enumerate(dealt):
            first = step * m * d * b + (k * d + replica) * b
            expected = Numbers(s).batch("train", first, b)
            assert tokens.shape == targets.shape == (b, s)
            assert stage != 0 or (tokens == expected[:, :-1]).all()
            assert stage != p - 1 or (targets == expected[:, 1:]).all()


def padding_is_known(group, case: Case, m: int):
    """Assert that every stage of a BERT gets the lengths of its samples: all layers have to know the padding."""
    with connected(group, ParallelConfig.for_world(group.size, 1, group.size)) as topology:
        batches = Batches(Words(case), case.model, topology, case.s, case.b, m)
        for k, batch in enumerate(batches.microbatches_of("train", 0)):
            assert (batch.lengths == case.batch(f"train {k * case.b}", case.b).lengths).all()


def message_of(action, shape, dtype, *run):
    """Return the array that an action gives another stage; no two actions give the same."""
    return np.random.default_rng([action.stage, ord(action.kind), action.microbatch, *run]).normal(
        size=shape).astype(dtype)


def every_message_arrives(group, schedule, config, shape, dtype, wrap=as_is, host=as_is):
    """Check that every action gets its x. Each then overwrites x, on which no other action may depend."""
    with connected(group, config) as topology:
        pipeline, rank, stages = Pipeline(schedule, topology), topology.place.pipeline, schedule.stages
        for run in range(2):
            done, about = [], (topology.place.data, run)

            def act(action, x, done=done, about=about):
                done.append(action)
                need = needs(action, stages)
                if need is None:
                    assert x is None, f"{action} needs nothing, but was given something"
                else:
                    assert x.shape == shape and (host(x) == message_of(need, shape, dtype, *about)).all(), (
                        f"{action} was not given {need}")
                    x[...] = np.nan
                given = message_of(result_of(action), shape, dtype, *about)
                return None if user_stage(action, stages) is None else wrap(given)

            pipeline.play(dict.fromkeys("FBIW", act), wrap(np.empty(0, dtype)), shape)
            assert tuple(done) == schedule.ranks[rank]
            assert not pipeline.results, f"{list(pipeline.results)} were never used"
            assert not pipeline.posted and not pipeline.sent
        group.comm.Barrier()
        assert not topology.pipeline.comm.Iprobe(), "a message was never received"


def no_cache_outlives_its_use(group, case: Case, microbatches: int, plan: Plan):
    """Assert that an evaluation holds no cache of an earlier forward, and that a step leaves none."""
    with trainer_on(group, case, plan) as trainer:
        mine, batch = batch_of(trainer, case, microbatches)
        gc.collect()
        gc.freeze()         # what is there by now, as another run has left that failed, is not looked at again
        try:
            assert live_caches() == 0
            trainer.step(mine, batch)
            assert live_caches() == 0, "the step is over, but caches are not gone"
            with mock.patch.object(passes, "model_forward", forward_of_an_evaluation):
                trainer.evaluate(mine, batch)
        finally:
            gc.unfreeze()


def forward_of_an_evaluation(*args):
    assert live_caches() == 0, "an evaluation keeps caches"
    y, cache = model.model_forward(*args)
    assert all(kept.caches is None for kept in cache.layers), "an evaluation keeps what a backward needs"
    return y, cache


def live_caches() -> int:
    """Count the caches of stages on this rank."""
    return sum(type(x) is StageCache for x in gc.get_objects())
