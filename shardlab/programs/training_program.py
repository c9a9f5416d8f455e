"""The common part of the programs that train, pretraining and fine-tuning: set-up, introduction and checkpoints."""
from collections.abc import Callable
from typing import Any

from mpi_impl import kernels
from mpi_impl.checkpoints import checkpoint
from mpi_impl.checkpoints.folder_lock import HeldFolder
from mpi_impl.comm.topology import Topology
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.batches import Batches
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.errors import UserError
from reference.models.model import sequences_of
from shardlab.predict.rank import ImaginedWorld
from shardlab.programs.divergence import DivergenceCheck
from shardlab.programs.introduction import introduction
from shardlab.programs.program import Program
from shardlab.programs.settings import PretrainingSettings
from shardlab.report import forecast
from shardlab.report.metrics import Metrics


class TrainingProgram(Program):
    """One rank's part of a program that trains. Subclasses connect the ranks, open the data, and choose the model;
    then they call the steps of the set-up in the order in which they stand here, on all ranks together.
    """

    topology: Topology
    folder: HeldFolder          # of --save, on rank 0

    # ---- the set-up ----

    def check_memory(self, settings: PretrainingSettings, model: ModelConfig) -> None:
        """Predict what the ranks send and hold. Raise UserError if their machines or GPUs have less memory."""
        a = self.args = settings.args
        self.settings, self.model = settings, model
        self.imagined = ImaginedWorld(model, settings.parallel, settings.precision, a.micro_batch_size, a.seq_length,
                                      settings.microbatches, cudnn=self.has_cudnn, optimizer=settings.optimizer)
        self.hosts, self.predicted, self.forecast = forecast.checked_memory(
            self.topology, self.imagined, self.device, a.offload_folder)

    def make_trainer(self, replayed: bool = False) -> None:
        """Make the trainer, with initial values, and the check of its results."""
        a, settings = self.args, self.settings
        state = ModelState(self.model, self.topology, a.seed, settings.precision, self.device.like, a.offload_folder)
        self.trainer = Trainer(state, settings.optimizer, replayed)
        self.divergence = DivergenceCheck(self.trainer, a.lr)

    def make_batches(self, dataset: Any, microbatches: int) -> Batches:
        """Distribute the samples of a data set, which is None on ranks that read none."""
        return Batches(dataset, self.model, self.topology, self.args.seq_length, self.args.micro_batch_size,
                       microbatches, self.device.like)

    def make_metrics(self, iterations: int, throughput: Any = None) -> None:
        """Begin the curves of the run, after its checkpoint has been loaded."""
        a, model = self.args, self.model
        self.metrics = Metrics(iterations, a.global_batch_size * sequences_of(model) * a.seq_length, a.log_interval,
                               a.metrics_file, speaks=self.first, heads=model.heads,
                               scaled=self.settings.precision.scaled, begins=self.trainer.iteration,
                               throughput=throughput,
                               layers_with_experts=sum(map(model.has_experts, range(model.num_layers))))

    # ---- the run ----

    def introduce(self) -> None:
        """Print how the ranks share the work, where they compute, and the memory that they need."""
        self.say(introduction(self.settings, self.model, self.world.hosts()))
        self.say(self.device.description or kernels.describe(self.settings.precision.compute))
        self.say(forecast.describe(self.forecast, self.hosts))

    def save_checkpoint(self, options: dict[str, Any], save_tokenizer: Callable[[str], object]) -> None:
        """Save the model's state with these options, and on rank 0 its tokenizer next to it. Raise UserError, when all
        is saved, if the folder has moved.
        """
        root, moved = self.world.broadcast_object(lambda: self.folder.place(), "the folder of --save")
        self.say(checkpoint.save(self.trainer, root, options))
        self.world.broadcast_object(lambda: save_tokenizer(root), "the tokenizer next to it")
        if moved:
            raise UserError(moved)
