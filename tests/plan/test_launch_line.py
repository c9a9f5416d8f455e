"""The line to copy, read by the program that it starts, is the plan."""
import shlex
from dataclasses import replace
from functools import cache

from hypothesis import given, strategies as st

from mpi_impl.runtime.advice import typed
from reference.costs.plans import Plan
from shardlab.plan.candidates import PlanSearch
from shardlab.plan.launch_line import launch_line
from shardlab.plan.options import model_of as model_of_options, parse as parse_plan
from shardlab.plan.profiles import load
from shardlab.programs.presets import PRESETS
from shardlab.programs.settings import PretrainingSettings, parse
from tests.plan_cases import model_of, plans

A100 = load("dgx-a100")


def understood(plan, preset: str | None) -> PretrainingSettings:
    """Return the program's settings for the line. The launcher gets the number of ranks."""
    words = shlex.split(launch_line(plan, preset, replace(A100, server=1 << 20)).replace("\\\n", " "))
    start, (module, *options) = words[:5], words[6:]
    assert start == [typed("python"), "-m", "mpi_impl.launch", "-n", str(plan.parallel.world_size)] and words[5] == "-m"
    assert module == f"mpi_impl.pretrain_{plan.model.architecture}"
    return parse(options, plan.parallel.world_size, plan.model.architecture)


def is_the_plan(found: PretrainingSettings, plan) -> None:
    assert (found.parallel, found.microbatches, found.args.micro_batch_size) == (plan.parallel, plan.m, plan.b)
    assert found.args.global_batch_size == plan.m * plan.b * plan.parallel.data_parallel_size
    padding = plan.model.make_vocab_size_divisible_by
    assert replace(found.model(plan.model.vocab_size), make_vocab_size_divisible_by=padding) == plan.model
    assert found.args.seq_length == plan.model.max_position_embeddings and found.args.device == "cuda"
    assert found.precision.half


@given(plans(even=True))
def test_a_model_of_given_sizes(plan):
    """With two defaults of the planner's."""
    plan = replace(plan, parallel=replace(plan.parallel, keep_gathered_inputs=False,
                                          scatter_gather_tensors_in_pipeline=True))
    is_the_plan(understood(plan, None), plan)


@cache
def plans_of(words: str, n: int) -> list[Plan]:
    return PlanSearch(model_of_options(parse_plan(words.split())), n, 8, A100).plans


@given(preset=st.sampled_from([name for models in PRESETS.values() for name in models]), data=st.data(),
       n=st.sampled_from((1, 2, 4, 8)), changed=st.sampled_from(["", "--num-layers 8", "--seq-length 4096"]))
def test_a_preset_whose_sizes_may_be_given_anew(preset, data, n, changed):
    """Any plan of the planner's own."""
    plan = data.draw(st.sampled_from(
        plans_of(f"--num-gpus {n} --global-batch-size 8 --preset {preset} {changed}", n)))
    sizes = {"--num-layers 8": plan.model.num_layers, "--seq-length 4096": plan.model.max_position_embeddings}
    assert not changed or sizes[changed] == int(changed.split()[1])
    is_the_plan(understood(plan, preset), plan)


def test_the_cluster_decides_about_servers_and_the_device():
    """Several servers are named in a file. Where all is float32, as in a profile that benchmarks/calibrate.py writes,
    the program stays on the processor.
    """
    plan = PlanSearch(model_of(2), 2, 2, A100).plans[0]
    for hardware, hosts, precision in (
        (replace(A100, server=1), True, "--fp16"), (replace(A100, server=2), False, "--fp16"),
        (load("dgx-h100"), False, "--bf16"), (replace(A100, element_bytes=4), False, None),
    ):
        words = launch_line(plan, None, hardware).split()
        assert ("--hostfile" in words) == hosts and ("--device" in words) == bool(precision)
        assert {"--fp16", "--bf16"} & {*words} == ({precision} if precision else set())
