"""Steps by a CUDA graph: what a step launches until its gradients are there is recorded once, and then replayed."""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpi_impl.comm.ledger import Ledger
from mpi_impl.kernels.cuda.recording import Recording
from mpi_impl.parallel.passes import TrainingPass
from reference.layer_context import LayerContext


class Replays:
    """The gradients of one rank's steps. Where nothing but the tokens has changed, they are a replay."""

    def __init__(self, compute: Callable[..., TrainingPass], ledger: Ledger):
        """`compute(microbatches, totals, contexts, scale)` launches the work, and returns the pass. Its messages
        count in the ledger each time.
        """
        self.compute, self.ledger = compute, ledger
        self.recording: Recording | None = None
        self.kind: Any = None               # what a replay cannot change
        self.microbatches: list = []        # what the recording reads
        self.traffic = Ledger()             # of a step

    def play(self, microbatches: Sequence, totals: list[float], contexts: Sequence[LayerContext],
             scale: float) -> TrainingPass:
        """Add the gradients of these microbatches, as `compute` does. The contexts drop nothing."""
        kind = [[None if x is None else x.shape for x in batch] for batch in microbatches], totals, scale
        if kind == self.kind:
            for old, new in zip(self.microbatches, microbatches, strict=True):
                for x, values in zip(old, new, strict=True):
                    if x is not None:
                        x[...] = values
        else:
            self.record(microbatches, totals, contexts, scale)
            self.kind = kind
        self.ledger.add(self.traffic)
        assert self.recording is not None
        return self.recording.replay()

    def record(self, microbatches: Sequence, *others) -> None:
        """Record a step of these microbatches, in place of the one before."""
        self.recording, self.kind = None, None      # whose memory is needed
        self.microbatches = [type(batch)(*(x if x is None else x.copy() for x in batch)) for batch in microbatches]
        self.recording = Recording(partial(self.recorded, *others))

    def recorded(self, *others) -> TrainingPass:
        """Compute with the recording's microbatches, and keep what is sent."""
        with self.ledger.diverted() as self.traffic:
            return self.compute(self.microbatches, *others)
