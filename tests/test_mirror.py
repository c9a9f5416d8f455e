"""The machine is the textbook with ranks: the same files, names and arguments, and only the communication beside."""
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import mpi_impl

ROOT = Path(mpi_impl.__file__).parent
MIRRORED = [f"{folder}.{path.stem}" for folder in ("layers", "models")
            for path in sorted((ROOT / folder).glob("*.py")) if path.stem not in ("__init__", "units")]    # see below
# units.py: what a stage's loop asks for, since ranks gather tensors with ZeRO-3. The textbook's are always there.
ONLY_ON_RANKS = {"region", "group", "grads", "sink"}      # where to send, and where gradients go
ONE_RANKS = {"shards": "p", "words": "word", "xs": "x", "ys": "y", "dxs": "dx", "dys": "dy", "caches": "cache",
             "blocks": "p"}      # and of a stage's parameters, those of blocks, in turn
# The textbook makes a table's gradient in the table's image. The machine adds to one that is there, and asks for no
# table: what ZeRO-3 does not ask for it need not gather.
WITHOUT = {"embedding_backward": "p"}
# Parts of layers_backward: the textbook's is shorter, since its parameters are all there, and it has no ledger. And of
# block_forward: two steps of the textbook's, which are one kernel on a GPU.
INSIDE_ANOTHER = {"turns", "forward_again", "add_branch_and_norm", "local_site"}

# A region on a rank gathers logits, where the textbook has all of them in a list, and knows a length from one shard.
REGIONS_ONLY_ON_RANKS = {"gather", "gather_backward", "length"}
# It does not complete the gradients of replicated tensors: the trainer does, for all layers in one call.
REGIONS_ONLY_IN_THE_TEXTBOOK = {"complete"}


def functions(module):
    return {name: function for name, function in vars(module).items()
            if inspect.isfunction(function) and function.__module__ == module.__name__}


def arguments(function):
    """Their names; of a list over ranks, that of what one rank has."""
    return [ONE_RANKS.get(name, name) for name in inspect.signature(function).parameters]


def fits(function, twin, only_on_ranks=ONLY_ON_RANKS):
    """The machine's arguments are the twin's, in order, and beside them only what ranks need and the twin lacks."""
    theirs = [argument for argument in arguments(twin) if argument != WITHOUT.get(function.__name__)]
    beside = only_on_ranks - set(theirs)
    return [argument for argument in arguments(function) if argument not in beside] == theirs


@pytest.mark.parametrize("name", MIRRORED)
def test_a_twin_has_the_same_arguments_and_its_communication_beside(name):
    textbook, machine = (importlib.import_module(f"{package}.{name}") for package in ("reference", "mpi_impl"))
    theirs = functions(textbook)
    for name, function in functions(machine).items():
        twins = [theirs[twin] for twin in (name, f"sharded_{name}") if twin in theirs]
        assert twins or name in INSIDE_ANOTHER, f"{machine.__name__}.{name} has no twin in the textbook"
        assert not twins or any(fits(function, twin) for twin in twins), (name, *map(arguments, [function, *twins]))


def regions(package):
    """The classes of the package's mappings, by name."""
    module = importlib.import_module(f"{package}.comm.mappings")
    return {name: one for name, one in vars(module).items()
            if inspect.isclass(one) and one.__module__ == module.__name__}


def test_the_regions_are_the_same():
    assert regions("mpi_impl").keys() == regions("reference").keys()


@pytest.mark.parametrize("name", regions("reference"))
def test_a_region_has_its_twins_methods_and_their_reasons_beside(name):
    """And it is made of the same arguments, beside its group."""
    machine, textbook = regions("mpi_impl")[name], regions("reference")[name]
    ours, theirs = (dict(inspect.getmembers(one, inspect.isfunction)) for one in (machine, textbook))
    del ours["__init__"]
    theirs.pop("__init__", None)
    assert ours.keys() - theirs.keys() == REGIONS_ONLY_ON_RANKS
    assert theirs.keys() - ours.keys() == REGIONS_ONLY_IN_THE_TEXTBOOK
    for method in ours.keys() & theirs.keys():
        assert fits(ours[method], theirs[method], {"reason"}), (method, *map(arguments, [ours[method], theirs[method]]))
    assert fits(machine, textbook, {"group"})


def test_every_layer_of_the_textbook_is_in_the_machine():
    missing = [f"{folder}/{path.name}" for folder in ("layers", "models")
               for path in (ROOT.parent / "reference" / folder).glob("*.py")
               if not (ROOT / folder / path.name).exists()]
    assert not missing


def test_the_textbook_stands_alone():
    """NumPy and the standard library only; nothing of the machine."""
    allowed = {"numpy", "reference", *sys.stdlib_module_names}
    for path in (ROOT.parent / "reference").rglob("*.py"):
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        assert imported <= allowed, f"{path.name} imports {imported - allowed}"


def test_only_comm_calls_mpi():
    """launch.py asks which library mpi4py has, to find its mpiexec; it sends nothing."""
    users = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")
             if re.search(r"^\s*(from|import) mpi4py", path.read_text(), re.M)}
    assert {user for user in users if not user.startswith("comm/")} == {"launching/launch.py"}
