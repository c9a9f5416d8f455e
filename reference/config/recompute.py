"""The choice of activations that the forward does not keep."""
from collections.abc import Iterable
from dataclasses import dataclass

from reference.config.checks import require_one_of, require_positive

RECOMPUTE = ("none", "selective", "full")   # recompute nothing, attention's core, or whole layers


@dataclass(frozen=True)
class Recompute:
    """The activations that the forward does not keep, so that the backward recomputes them (Korthikanti et al. 2022).

    Names and meanings are Megatron's. `selective` recomputes attention's core, in all layers; `full` recomputes a whole
    layer from its input. The method `uniform` divides each stage's layers into groups of num_layers and keeps only each
    group's input; `block` recomputes num_layers layers of each stage, one by one, and keeps the others. Larger groups
    keep fewer inputs, but the backward holds all activations of a group at the same time.
    """

    granularity: str = "none"
    method: str = "uniform"
    num_layers: int = 1

    def __post_init__(self):
        require_one_of("recompute_granularity", self.granularity, RECOMPUTE)
        require_one_of("recompute_method", self.method, ("uniform", "block"))
        require_positive("recompute_num_layers", self.num_layers)

    @property
    def selective(self) -> bool:
        return self.granularity == "selective"

    def groups(self, layers: Iterable[int]) -> list[tuple[list[int], bool]]:
        """Divide a stage's layers into groups, in order, and tell for each group whether only its input is kept."""
        layers, n = list(layers), self.num_layers
        if self.granularity == "full" and self.method == "uniform":
            return [(layers[i:i + n], True) for i in range(0, len(layers), n)]
        recomputed = n if self.granularity == "full" else 0
        return [([layer], i < recomputed) for i, layer in enumerate(layers)]
