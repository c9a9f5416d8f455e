"""The machine is the textbook with ranks: the same files, names and arguments, and only the communication beside."""
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import mpi_impl
from mpi_impl.comm.group import Group
from reference.comm import collectives

MACHINE = Path(mpi_impl.__file__).parent
BENCH = Path(__file__).parents[1] / "shardlab"
TEXTBOOK = MACHINE.parent / "reference"
FOLDERS = sorted(path.parent.name for path in TEXTBOOK.glob("*/__init__.py")
                 if (MACHINE / path.parent.name / "__init__.py").exists())
FILES = [f"{folder}.{path.stem}" for folder in FOLDERS for path in sorted((TEXTBOOK / folder).glob("[!_]*.py"))]
ON_RANKS = {file for file in FILES if (MACHINE / f"{file.replace('.', '/')}.py").exists()}
# In other folders files of one name are no twins: the textbook plays all ranks of a pipeline, of ZeRO or of a training
# step in one function, and the machine has an object for what one of them holds.
TWINS = sorted(file for file in ON_RANKS if file.startswith(("comm.", "layers.", "models.")))

# Where to send, and why; where gradients go; and a format, of which the textbook has one.
ONLY_ON_RANKS = {"region", "group", "topology", "experts", "grads", "sink", "reason", "widen", "context_ranks"}
ONE_RANKS = {"shards": "p", "words": "word", "xs": "x", "ys": "y", "dxs": "dx", "dys": "dy", "caches": "cache",
             "stages": "p", "blocks": "p"}      # and of a stage's parameters, those of blocks, in turn
# The textbook makes a table's gradient in the table's image. The machine adds to one that is there, and asks for no
# table: it need not gather what ZeRO-3 does not ask for.
WITHOUT = {"embedding_backward": "p"}

# Files without a twin, since pretrain_gpt has no use for what they show.
TEXTBOOK_ONLY = {
    "models.blocks",           # the trees of a stage's blocks, which the machine declares with the same functions
}

# The names that stand in one of two twin files alone, and the reason. Beside these, the machine's file may import a
# name from the textbook's; and it needs no declarations of tensors, which the layout of a rank's buffers reads.
ALONE = {
    "comm.expert_parallel": {
        "ends_of_ranks": "MPI takes lengths of messages",
        "counts_of_ranks rows_between_ranks": "the textbook has all ranks' counts in a list",
    },
    "comm.regions": {
        "WithinRegion": "an expert is an MLP inside a region; the textbook applies one MLP after the other to its rows",
        "TensorParallelRegion.parts_of_a_sum SequenceParallelRegion.parts_of_a_sum":
            "the machine's Trainer sums up each rank's losses once a step",
        "region_of": "the textbook's callers choose a region themselves",
        "TensorParallelRegion.gather TensorParallelRegion.gather_backward SequenceParallelRegion.gather "
        "SequenceParallelRegion.gather_backward": "the textbook has all ranks' logits in a list",
        "TensorParallelRegion.length SequenceParallelRegion.length": "a rank has one shard, and asks for the length",
        "TensorParallelRegion.complete SequenceParallelRegion.complete":
            "the machine's ModelState completes the gradients of all replicated tensors in one call",
        "each_complete sum_over_copies": "steps of `complete`",
    },
    "layers.attention": {"heads_forward": "the whole layer and each shard share it; a rank has only one shard"},
    "layers.block": {
        "norms_forward norms_backward residuals_backward": "loops over ranks",
        "add_branch_and_norm": "two steps of the textbook's block_forward: one kernel on a GPU",
        "local_site": "a step of the textbook's add_branch, which the machine has twice",
    },
    "layers.context_attention": {
        "ContextPart PartCache part_of": "one rank's positions, and its group",
        "arrived with_others": "what a rank has posted",
        "unzip": "of lists over ranks",
        "Lockstep PartsCache lockstep": "all ranks, in one array",
    },
    "layers.cross_entropy": {
        "gathered_cross_entropy unsafe_cross_entropy": "the two ways that are worse",
        "softmax_minus_target": "it is a kernel",
        "LossCache": "the textbook keeps probabilities",
    },
    "layers.experts": {
        "losses_of_whole losses_of_positions": "a rank may have some positions of every sequence",
        "dealt_experts_forward dealt_experts_backward": "one function on ranks, over t and e",
        "sum_of_copies": "the machine's ModelState completes the gradients of all tensors",
        "averaged_gradients": "the wrong way",
    },
    "layers.embedding": {"position_gradient token_type_gradient": "the whole layer and its shards share them"},
    "layers.gated_mlp": {"side_by_side_mlp_forward": "the wrong way"},
    "layers.grouped_attention": {
        "grouped_heads_forward": "the whole layer and each shard share it; a rank has only one shard",
        "add_bias": "the machine adds a bias in place",
        "add_bias_gradient": "a step of the machine's, which adds to gradients that are there",
    },
    "layers.layer": {"declare layers_in": "the machine imports them elsewhere"},
    "layers.mlp": {"rows_first_mlp_forward": "the wrong way"},
    "models.bert": {"of_all_positions of_own_positions": "in the textbook the scores of all ranks are in one list"},
    "models.gpt": {"gpt_logits": "no program needs the logits of all positions on one rank"},
    "models.model": {"batch_type sequences_of": "facts about a ModelConfig, which the machine imports elsewhere"},
    "models.stage": {
        "add_table": "the machine adds both gradients of a table to one buffer",
        "has_head stage_of join_stages": "facts about a stage's tree, which the machine imports elsewhere",
        "turns forward_again": "parts of layers_backward, which is longer on ranks: it gathers and has a ledger",
    },
}
# The names that both files have, with other arguments.
OTHER_ARGUMENTS = {
    "layers.grouped_attention": {"projection_backward": "the machine's adds to a weight's and a bias's gradient"},
    "layers.layer_norm": {"layer_norm_backward": "the machine's adds what came around the branch in the same kernel"},
    "layers.rms_norm": {"rms_norm_backward": "the same"},
    "layers.layer": {"Layer": "what the textbook's record says of a kind is true on ranks, too, but for the functions"},
}


def definitions(module):
    """Return a module's own functions and classes, and the classes' public methods, by name."""
    own = {name: one for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__
           and (inspect.isfunction(one) or inspect.isclass(one)) and not name.startswith("__")}
    return own | {f"{name}.{method}": function for name, one in own.items() if inspect.isclass(one)
                  for method, function in inspect.getmembers(one, inspect.isfunction) if not method.startswith("_")}


def twins_of(name, theirs):
    """Return the textbook's functions or classes of a name in the machine: the whole layer's, and the sharded one's."""
    return [theirs[twin] for twin in (name, f"sharded_{name}") if twin in theirs]


def names_alone(ours, theirs, imported):
    """Return the names that only one of two twin files has; of a class that only one has, no methods."""
    found = {name for name in ours if not twins_of(name, theirs)}
    found |= {name for name in theirs if name.removeprefix("sharded_") not in ours and name not in imported
              and not re.search(r"_tensors?$", name)}
    return {name for name in found if "." not in name or name.partition(".")[0] in ours.keys() & theirs.keys()}


def arguments(function):
    """Return the names of the arguments; for a list over ranks, the name of one rank's element."""
    return [ONE_RANKS.get(name, name) for name in inspect.signature(function).parameters]


def fits(function, twin):
    """Report whether the machine's arguments are the twin's, in order, and beside them only what ranks need."""
    theirs = [argument for argument in arguments(twin) if argument != WITHOUT.get(function.__name__)]
    beside = ONLY_ON_RANKS - set(theirs)
    return [argument for argument in arguments(function) if argument not in beside] == theirs


@pytest.mark.parametrize("file", TWINS)
def test_twin_files_have_the_same_names_but_for_those_with_a_reason(file):
    textbook, machine = (importlib.import_module(f"{package}.{file}") for package in ("reference", "mpi_impl"))
    ours, theirs = definitions(machine), definitions(textbook)
    imported = {name for name, one in theirs.items() if vars(machine).get(name) is one}
    assert names_alone(ours, theirs, imported) == {name for names in ALONE.get(file, ()) for name in names.split()}


@pytest.mark.parametrize("file", TWINS)
def test_twins_have_the_same_arguments_and_communication_beside(file):
    textbook, machine = (importlib.import_module(f"{package}.{file}") for package in ("reference", "mpi_impl"))
    theirs = definitions(textbook)
    differ = {name for name, one in definitions(machine).items() if (twins := twins_of(name, theirs))
              and not any(fits(one, twin) for twin in twins)}
    assert differ == OTHER_ARGUMENTS.get(file, {}).keys()


def test_every_file_of_the_textbook_has_a_twin_or_is_imported_by_the_machine():
    """The collectives' twins are the methods of a Group, but for those with a root, which the machine does not need."""
    source = "\n".join(path.read_text() for folder in (MACHINE, BENCH) for path in folder.rglob("*.py"))
    missing = {file for file in FILES if file not in ON_RANKS and f"from reference.{file} import" not in source
               and not re.search(r"from reference\.{} import .*\b{}\b".format(*file.split(".")), source)}
    assert missing - {"comm.collectives"} == TEXTBOOK_ONLY
    methods = {name for name, _ in inspect.getmembers(Group, inspect.isfunction)}
    assert definitions(collectives).keys() - methods == {"reduce", "gather", "scatter"}


def test_the_textbook_stands_alone():
    """It imports NumPy and the standard library alone, nothing of the machine."""
    allowed = {"numpy", "reference", *sys.stdlib_module_names}
    for path in TEXTBOOK.rglob("*.py"):
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        assert imported <= allowed, f"{path.name} imports {imported - allowed}"


def test_only_comm_calls_mpi():
    """launcher.py asks which library mpi4py has, to find its mpiexec, and sends nothing."""
    users = {str(path.relative_to(MACHINE)) for path in MACHINE.rglob("*.py")
             if re.search(r"^\s*(from|import) mpi4py", path.read_text(), re.M)}
    assert {user for user in users if not user.startswith("comm/")} == {"launch/launcher.py"}
