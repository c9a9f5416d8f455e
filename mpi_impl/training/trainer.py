"""One rank's model, and its steps: a schedule's forwards and backwards, reduction over replicas, Adam."""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.comm.topology import Topology
from mpi_impl.parallel.data_parallel import GradientReduction
from mpi_impl.parallel.passes import ForwardPass, TrainingPass
from mpi_impl.parallel.pipeline import Pipeline
from mpi_impl.parallel.sinks import ImmediateSink
from mpi_impl.training.optimizer import Adam, counted_segments
from reference.config import ModelConfig
from reference.models.gpt import gpt_stage, gpt_tensors, has_embedding, has_head
from reference.optimizer import OptimizerConfig
from reference.params import HOST, Layout, assign, initialize_shard, tree_map
from reference.schedules import evaluation_schedule
from reference.stages import layers_of_rank, schedule_of, stages_of_ranks


class StepResult(NamedTuple):
    """What one step reports, alike on all ranks."""

    loss: float            # mean over the global batch
    grad_norm: float       # before clipping
    learning_rate: float


class Trainer:
    """The parameters, gradients and moments of one rank, each a flat buffer with a tree of views."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, topology: Topology, seed: int, dtype, like=HOST):
        """`like` is an array of the library that the buffers shall belong to. Raises UserError for too few layers."""
        self.model, self.topology, self.ledger = model, topology, topology.world.ledger
        self.region = TensorParallelRegion(topology.tensor)
        self.stages_of_ranks, t = stages_of_ranks(model, topology.config), topology.tensor.size
        stages, last = self.stages_of_ranks[topology.place.pipeline], model.num_layers - 1
        self.last_rank = next(r for r, held in enumerate(self.stages_of_ranks) if last in layers_of_rank(held))
        tensors = gpt_tensors(model, layers_of_rank(stages))
        self.layout = Layout(tensors, t)
        self.flat_params = np.zeros_like(like, shape=self.layout.size, dtype=dtype)
        self.flat_grads = np.zeros_like(self.flat_params)
        self.params, self.grads = self.layout.views(self.flat_params), self.layout.views(self.flat_grads)
        tree_map(assign, self.params, initialize_shard(tensors, seed, dtype, t, topology.tensor.rank, like))
        self.stage_params, self.stage_grads = ({stage: gpt_stage(tree, layers) for stage, layers in stages.items()}
                                               for tree in (self.params, self.grads))
        self.tie_word_table()
        self.reduction = GradientReduction(self.flat_grads, self.grads, self.layout, topology.data,
                                           topology.config.ddp_bucket_size, self.contributions)
        self.optimizer = Adam(self.flat_params, self.layout, optimizer,
                              counted_segments(self.layout, topology.tensor.rank, self.counted_elsewhere))
        self.pipelines: dict[tuple[str, int], Pipeline] = {}
        self.peak_caches = 0        # the most that this rank held at once in the last step

    def tie_word_table(self) -> None:
        """Tied logits read the embedding's table, so the first stage uses it, and the last.

        If both are on one rank, the table gets two contributions a microbatch. If they are on two, each has a copy: the
        copies' gradients are summed over `embedding_group`, and only the first counts in the norm.
        """
        first, last = has_embedding(self.params), has_head(self.params, self.model)
        tied = not self.model.untie_embeddings_and_output_weights
        self.contributions = {"embedding.word": 2} if tied and first and last else {}
        self.embedding_group = self.topology.embedding if tied and first != last else None
        self.counted_elsewhere = "embedding.word" if self.embedding_group and last else ""

    def step(self, microbatches: Sequence, global_batch_size: int) -> StepResult:
        """One step on this replica's microbatches, pairs of tokens and targets [b, s], of a batch of B sequences."""
        self.flat_grads[...] = 0
        self.reduction.expect(len(microbatches))
        work = TrainingPass(self.model, self.region, self.stage_params, microbatches,
                            weight_of(microbatches, global_batch_size),
                            self.stage_grads, ImmediateSink(self.reduction.contributed))
        self.pipeline("training", len(microbatches)).play(work.compute, self.flat_params, self.shape(microbatches))
        self.peak_caches = work.peak
        with self.ledger.phase("reduction"):
            self.reduction.finish()
            if self.embedding_group:
                self.embedding_group.all_reduce(self.grads.embedding.word, "tied embedding")
            loss = self.whole_loss(work.loss)
        with self.ledger.phase("optimizer"), self.topology.world.trace.slice("compute", "optimizer", "other"):
            norm, rate = self.optimizer.step(self.flat_grads, self.topology.model)
        return StepResult(loss, norm, rate)

    def evaluate(self, microbatches: Sequence, global_batch_size: int) -> float:
        """The mean loss over a global batch of which this replica has these microbatches; nothing is learned."""
        with self.ledger.phase("evaluation"):
            work = ForwardPass(self.model, self.region, self.stage_params, microbatches,
                               weight_of(microbatches, global_batch_size))
            self.pipeline("evaluation", len(microbatches)).play(
                work.compute, self.flat_params, self.shape(microbatches), phases={"F": "evaluation"})
            return self.whole_loss(work.loss)

    def whole_loss(self, loss: float) -> float:
        """The sum over replicas of what their last stages have found, on every rank."""
        found = self.topology.data.all_reduce(np.array([loss]), "loss")
        return float(self.topology.pipeline.broadcast(found, "loss", self.last_rank)[0])

    def pipeline(self, purpose: str, m: int) -> Pipeline:
        """For training, or for evaluation: forwards alone, on the same stages."""
        if (purpose, m) not in self.pipelines:
            schedule = (schedule_of(self.topology.config, m) if purpose == "training" else
                        evaluation_schedule([list(stages) for stages in self.stages_of_ranks], m))
            self.pipelines[purpose, m] = Pipeline(schedule, self.topology)
        return self.pipelines[purpose, m]

    def shape(self, microbatches: Sequence) -> tuple[int, int, int]:
        """[b, s, h] of what goes from stage to stage."""
        return (*microbatches[0][0].shape, self.model.hidden_size)


def weight_of(microbatches: Sequence, global_batch_size: int) -> float:
    """Every position of the global batch weighs the same."""
    return 1 / (global_batch_size * microbatches[0][0].shape[1])
