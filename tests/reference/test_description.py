"""A topology in words names all in which topologies differ."""
from dataclasses import replace

import pytest

from reference.config import ParallelConfig, Recompute
from reference.config.description import describe

PLAIN = ParallelConfig(2, 2, 4)


def test_every_part_has_its_word():
    parallel = ParallelConfig(2, 4, 4, "interleaved", 3, zero_stage=2, cpu_offload=True, sequence_parallel=True,
                              recompute=Recompute("full"), context_parallel_size=2, cp_comm_type="a2a",
                              num_distributed_optimizer_instances=2)
    assert describe(parallel) == ("t 2, p 4, d 4, c 2 (a2a), v 3, interleaved, ZeRO-2 in 2 instances, offloaded, "
                                  "sequence parallel, full recompute")
    assert describe(ParallelConfig()) == "t 1, p 1, d 1"


@pytest.mark.parametrize("change", [
    {"tensor_model_parallel_size": 1}, {"pipeline_model_parallel_size": 1}, {"data_parallel_size": 2},
    {"expert_model_parallel_size": 2}, {"context_parallel_size": 2}, {"pipeline_schedule": "zb-h1"},
    {"zero_stage": 1}, {"zero_stage": 3}, {"sequence_parallel": True}, {"recompute": Recompute("selective")}])
def test_another_topology_has_another_description(change):
    assert describe(replace(PLAIN, **change)) != describe(PLAIN)
