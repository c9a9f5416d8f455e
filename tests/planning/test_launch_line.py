"""The line to copy, read by the program that it starts, is the plan."""
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from mpi_impl.plan import model_of as model_of_options, parse as parse_plan
from mpi_impl.planning.candidates import PlanSearch
from mpi_impl.planning.launch_line import launch_line
from mpi_impl.planning.profiles import load
from mpi_impl.programs.arguments import PretrainingSettings, parse
from mpi_impl.programs.presets import PRESETS
from mpi_impl.runtime.advice import typed
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


def as_the_planner_makes_them(plan):
    """Return plans as the planner makes them: with two defaults, and with interleaved stages of equal size."""
    p = plan.parallel
    return replace(plan, parallel=replace(p, keep_gathered_inputs=False, scatter_gather_tensors_in_pipeline=True))


@given(plans(even=True))
def test_of_sizes_by_hand(plan):
    plan = as_the_planner_makes_them(plan)
    is_the_plan(understood(plan, None), plan)


@given(preset=st.sampled_from([name for models in PRESETS.values() for name in models]), data=st.data(),
       n=st.sampled_from((1, 2, 4, 8)), changed=st.sampled_from([{}, {"num-layers": 8}, {"seq-length": 4096}]))
def test_of_a_preset_whose_sizes_may_be_given_anew(preset, data, n, changed):
    """Any plan of the planner's own."""
    words = ["--num-gpus", str(n), "--global-batch-size", "8", "--preset", preset]
    words += [word for name, value in changed.items() for word in (f"--{name}", str(value))]
    plans = plans_of(" ".join(words), n)
    plan = data.draw(st.sampled_from(plans))
    assert {"num-layers": plan.model.num_layers, "seq-length": plan.model.max_position_embeddings}.items() >= (
        changed.items())
    is_the_plan(understood(plan, preset), plan)


KNOWN: dict = {}


def plans_of(words: str, n: int) -> list:
    if words not in KNOWN:
        KNOWN[words] = PlanSearch(model_of_options(parse_plan(words.split())), n, 8, A100).plans
    return KNOWN[words]


@pytest.mark.parametrize("server", [1, 2, 3])
def test_servers_are_named_in_a_file_if_there_are_several(server):
    plan = PlanSearch(model_of(2), 2, 2, A100).plans[0]
    assert ("--hostfile hosts" in launch_line(plan, None, replace(A100, server=server))) == (server < 2)


def test_where_all_is_float32_the_program_stays_on_the_processor():
    """As in a profile that benchmarks/calibrate.py writes."""
    plan = PlanSearch(model_of(2), 2, 2, A100).plans[0]
    assert {"--fp16", "--device"} <= set(launch_line(plan, None, A100).split())
    assert {"--bf16", "--device"} <= set(launch_line(plan, None, load("dgx-h100")).split())
    assert not {"--fp16", "--device"} & set(launch_line(plan, None, replace(A100, element_bytes=4)).split())
