"""The training program on ranks of the pool."""
from mpi_impl.pretrain_gpt import Pretraining
from mpi_impl.training.arguments import parse
from reference.errors import UserError


def pretrain(group, options):
    Pretraining(parse(options, group.size), group).run()


def refusal(group, act, *args) -> str:
    """The sentence said in place of `act(group, *args)`, alike on all ranks; "" if it is done."""
    try:
        act(group, *args)
        said = ""
    except UserError as error:
        said = str(error)
    assert len(set(group.comm.allgather(said))) == 1, "ranks do not agree"
    return said
