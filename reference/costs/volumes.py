"""Elements that a rank sends for each kind of parallelism, as the papers' formulas. Every message: shardlab/predict.

The papers' letters: reference/config. Narayanan et al. 2021 is 2104.04473 ("PTD-P"), Rajbhandari et al. 2020 is
1910.02054 (ZeRO), Korthikanti et al. 2022 is 2205.05198, Liu et al. 2023 is 2310.01889 (ring attention), Jacobs et al.
2023 is 2309.14509 (Ulysses), Lepikhin et al. 2020 is 2006.16668 (GShard).
"""
from typing import NamedTuple

from reference.comm.ring import RING, ring_all_gather, ring_all_reduce
from reference.config import CP_COMM_TYPES, check_zero_stage, require_one_of


class PassCounts(NamedTuple):
    """The number of passes of a run through the model, as one replica sees it."""

    steps: int
    microbatches: int               # over all steps, forward and backward
    evaluations: int
    evaluation_microbatches: int    # over all evaluations, forward only
    skipped: int = 0                # steps that changed no parameter


def tensor_parallel_traffic(b: int, s: int, h: int, t: int, gathers_again: bool = False) -> float:
    """Return 8 b s h (t - 1)/t a layer and microbatch: four all-reduces of b s h (Narayanan et al. 2021, section 3.2).

    g after attention and after the MLP, f in the backward of both (Shoeybi et al. 2019, figure 4). Sequence parallelism
    splits each all-reduce into its two halves and sends the same amount (Korthikanti et al. 2022, section 4.2.2), as
    long as the gathered inputs of attention and MLP are kept. If the backward `gathers_again`, that makes 10 b s h (t -
    1)/t.
    """
    x = b * s * h
    return 4 * ring_all_reduce(x, t) + (2 * ring_all_gather(x, t) if gathers_again else 0)


def pipeline_traffic(b: int, s: int, h: int, t: int = 1) -> float:
    """Return b s h between neighbours, for each microbatch and direction (Narayanan et al. 2021, section 3.2).

    All t tensor-parallel ranks would send the same: with the scatter/gather optimisation (section 4.1) each sends 1/t,
    and the receivers gather.
    """
    return b * s * h / t


def context_parallel_traffic(way: str, b: int, s: int, queries: int, keys: int, c: int, forwards: int = 1) -> float:
    """Return a layer's elements for a microbatch, if each of c ranks has s positions, of which every one has this many
    columns of queries, and of keys: h/t each in a GPT. Raises UserError for an unknown way.

    In a ring (`p2p`, Liu et al. 2023) keys and values, 2 b s keys, travel c - 1 times forward. Backward they
    travel again, and their gradients, too. `all_gather` (Llama 3: 2407.21783, section 3.3.2) sends as much. `a2a`
    (Jacobs et al. 2023, section 3.2) exchanges queries, keys, values and results, forward and backward. Full recompute
    makes 2 `forwards`.
    """
    require_one_of("cp_comm_type", way, CP_COMM_TYPES)
    if way == "a2a":
        return (forwards + 1) * RING["all_to_all"](2 * b * s * (queries + keys), c)
    return (forwards + 2) * (c - 1) * 2 * b * s * keys


def expert_parallel_traffic(b: int, s: int, h: int, k: int, e: int, forwards: int = 1) -> float:
    """Return the elements of a layer of experts for a microbatch: 4 k b s h (e - 1)/e (Lepikhin et al. 2020).

    Each token's k copies go to their experts and their results come back, forward and backward, and stay on the rank
    with a chance of 1/e if the routers choose evenly. Full recompute makes 2 `forwards`.
    """
    return 2 * (forwards + 1) * RING["all_to_all"](k * b * s * h, e)


def data_parallel_traffic(psi: int, d: int, zero_stage: int = 0, m: int = 1, instances: int = 1) -> float:
    """Return a step's elements for m microbatches on d replicas of psi parameters: 2 psi (d - 1)/d, or 3 with ZeRO-3.

    With hybrid sharding n = d / instances takes d's place, and an all-reduce of psi/n between the instances follows.
    Raises UserError for a stage that is not 0 to 3.
    """
    n = d // instances
    return data_parallel_rings(zero_stage, m) * ring_all_gather(psi, n) + ring_all_reduce(psi, instances) / n


def data_parallel_rings(zero_stage: int, m: int) -> int:
    """Count how often psi elements go around in a step: once for an all-gather or a reduce-scatter, twice for an
    all-reduce.

    Plain: an all-reduce of the gradients. ZeRO-1 and 2 split it: a reduce-scatter of gradients, and after the
    optimizer's step an all-gather of parameters. ZeRO-3 gathers parameters twice, for forward and backward, as it does
    not keep them (Rajbhandari et al. 2020, section 7). ZeRO-2 scatters gradients after every microbatch, and ZeRO-3
    gathers for each, too: m + 1 and 3 m. Raises UserError for a stage that is not 0 to 3.
    """
    check_zero_stage(zero_stage)
    return (2, 2, m + 1, 3 * m)[zero_stage]

