"""Settings of Llama 3.1's change of rope's frequencies, which `scaled` in rope.py makes."""
from typing import NamedTuple


class RopeScaling(NamedTuple):
    """Llama 3.1's change of the frequencies, for sequences longer than those that it was trained on at first.

    A pair that has turned `high_freq_factor` times after `original` positions keeps its frequency, one that has turned
    less than `low_freq_factor` times gets 1 / factor of it, and between the two the frequency goes over smoothly.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original: int = 8192
