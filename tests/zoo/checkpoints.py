"""Mistakes of checkpoints: what is not saved, not loaded, or loaded into another place."""
from tests.zoo.cases import HALF, REPLICAS, SCALED, SHARDS, loaded_by, resumed
from tests.zoo.entry import Bug, Entry

ENTRIES = [
    Entry("the moments not loaded", "state and checkpoint", "checkpoint", "classic",
          "A model is its weights, so those are loaded, and Adam begins anew.",
          Bug("mpi_impl.checkpoints.checkpoint",
              "load_states(trainer, root, manifest, list(trainer.state.optimizer_states))",
              'load_states(trainer, root, manifest, ["parameters"])'),
          resumed(*REPLICAS)),
    Entry("the second moment loaded from the first", "state and checkpoint", "checkpoint", "classic",
          "The states are read in a loop, and one name in it is fixed.",
          Bug("mpi_impl.checkpoints.checkpoint", "on_disk.StateReader(root, state, manifest, files)",
              'on_disk.StateReader(root, "m" if state == "v" else state, manifest)'),
          resumed(*REPLICAS)),
    Entry("the count of updates not loaded",
          "state and checkpoint", "checkpoint", "after deepspeedai/Megatron-DeepSpeed #248",
          "The moments are there, and their bias correction begins anew, with a step many times too large.",
          Bug("mpi_impl.checkpoints.checkpoint",
              "trainer.iteration, trainer.optimizer.iteration = manifest.iteration, manifest.updates",
              "trainer.iteration = manifest.iteration"),
          resumed(*REPLICAS)),
    Entry("the random state not loaded", "random numbers", "checkpoint", "after NVIDIA/Megatron-LM #6858",
          "Dropout begins with the masks of the first steps again.",
          Bug("mpi_impl.checkpoints.checkpoint",
              "trainer.iteration, trainer.optimizer.iteration = manifest.iteration, manifest.updates",
              "trainer.optimizer.iteration = manifest.updates"),
          resumed(*REPLICAS)),
    Entry("another rank's random state loaded", "random numbers", "checkpoint", "after NVIDIA-NeMo/Automodel #3437",
          "Each rank finds its random state by a number that counts other ranks than when it was saved.",
          Bug("mpi_impl.checkpoints.checkpoint",
              "    trainer.state.adopt_master_weights()\n"
              "\n"
              "\n"
              "def load_weights(",
              "    trainer.state.adopt_master_weights()\n"
              "    trainer.state.seed += trainer.topology.world.rank\n"
              "\n"
              "\n"
              "def load_weights("),
          resumed(*REPLICAS)),
    Entry("the learning rate goes by steps, not by updates", "state and checkpoint", "checkpoint", "classic",
          "The checkpoint's number of steps is loaded as the number of updates, which differ once a step was "
          "skipped.",
          Bug("mpi_impl.checkpoints.checkpoint", "= manifest.iteration, manifest.updates",
              "= manifest.iteration, manifest.iteration"),
          resumed(*SCALED)),
    Entry("the loss scale not loaded", "state and checkpoint", "checkpoint", "classic",
          "The search for the loss scale begins anew, and the first steps are skipped again.",
          Bug("mpi_impl.checkpoints.checkpoint", "if manifest.loss_scale is not None and trainer",
              "if False and trainer"),
          resumed(*SCALED)),
    Entry("the model keeps its initial weights", "state and checkpoint", "checkpoint", "after NVIDIA/apex #42",
          "Master weights are loaded after the model has been made from their initial values, and the model is not "
          "told.",
          Bug("mpi_impl.parallel.model_state",
              "        if master is not self.parameters.own:\n"
              "            for tile in tiles(",
              "        if False:\n"
              "            for tile in tiles("),
          resumed(*HALF)),
    Entry("master weights rounded by a load", "precision", "checkpoint", "NVIDIA/Megatron-LM #1359",
          "The master weights are loaded in the format of the model, which the file's reader was told.",
          Bug("mpi_impl.checkpoints.checkpoint",
              "buffer.store(piece, moved_to(load_piece(trainer, reader, piece), trainer.state.main))",
              "values = load_piece(trainer, reader, piece)\n"
              "                rounded_values = rounded(values, trainer.state.precision.form)\n"
              "                buffer.store(piece, moved_to(rounded_values, trainer.state.main))"),
          resumed(*HALF)),
    Entry("a checkpoint of rounded master weights",
          "precision", "checkpoint", "after stanford-futuredata/Megatron-LM #5",
          "The model's 16-bit weights are saved, as the master weights can be made from them.",
          Bug("mpi_impl.checkpoints.checkpoint",
              "    return values\n"
              "\n"
              "\n"
              "def write_manifest(",
              "    return rounded(values, form) if weights else values\n"
              "\n"
              "\n"
              "def write_manifest("),
          resumed(*HALF)),
    Entry("layers under the numbers of their stage", "state and checkpoint", "checkpoint", "NVIDIA/Megatron-LM #7452",
          "Each stage asks for its layers by its own numbers, which exist, so the load succeeds, and the second "
          "stage gets the first layers.",
          Bug("mpi_impl.checkpoints.checkpoint", "    parts = [reader.read(piece.of.name, box)",
              "    number = piece.of.name.split('.')[1]\n"
              "    first = min(layer for stage in trainer.state.stages.values() for layer in stage)\n"
              "    name = piece.of.name.replace(f'.{number}.', f'.{int(number) - first}.') if "
              "number.isdigit() else \\\n"
              "        piece.of.name\n"
              "    parts = [reader.read(name, box)"),
          loaded_by(p=2)),
    Entry("pieces of a shard without their offset",
          "state and checkpoint", "checkpoint", "after deepspeedai/DeepSpeed #7584",
          "The offset of a piece in its tensor is lost where a rank has several, and every replica claims the "
          "beginning.",
          Bug("reference.parallel.boxes",
              "boxes_of_run(segment.shape, piece.in_buffer.start - segment.offset, piece.in_buffer.stop - "
              "segment.offset)",
              "boxes_of_run(segment.shape, 0, piece.size)"),
          resumed(*SHARDS)),
    Entry("only the first replica's shard saved", "state and checkpoint", "checkpoint", "classic",
          "The first replica saves for all, as it may where replicas hold the same.",
          Bug("mpi_impl.parallel.zero",
              "    def saves(self, piece: Piece) -> bool:\n"
              "        return True",
              "    def saves(self, piece: Piece) -> bool:\n"
              "        return self.topology.replicas.rank == 0"),
          resumed(*SHARDS)),
    Entry("every rank loads the first shard", "state and checkpoint", "checkpoint", "after NVIDIA/Megatron-LM #520",
          "The offset of a rank's shard is lost, and the first columns fit everywhere, so the load succeeds.",
          Bug("reference.parallel.boxes",
              "first[tensor.split] = tensor_rank // segment.copies * segment.shape[tensor.split]",
              "first[tensor.split] = 0"),
          loaded_by(t=2)),
]
