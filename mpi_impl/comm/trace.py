"""What a rank did and when, written down while it does it."""
from typing import NamedTuple


class Slice(NamedTuple):
    """One thing that a rank did, without a break. Slices of one stream do not overlap."""

    stream: str     # 'compute', or 'communication': waiting for what was sent, and collectives
    name: str       # '2F0'; 'wait for 1F0', 'gradients', 'optimizer', ...
    kind: str       # F, B, I or W for a schedule's action; 'communication' or 'other'
    start: float    # seconds on the rank's clock, which starts at 0 with a run
    end: float
