"""The training program on ranks of the pool."""
from mpi_impl.pretrain_bert import PretrainingBERT
from mpi_impl.pretrain_gpt import PretrainingGPT
from mpi_impl.programs.arguments import parse
from reference.errors import UserError


def pretrain(group, options):
    """A GPT."""
    PretrainingGPT(parse(options, group.size), group).run()


def pretrain_bert(group, options):
    PretrainingBERT(parse(options, group.size, "bert"), group).run()


def refusal(group, act, *args) -> str:
    """The sentence said in place of `act(group, *args)`, alike on all ranks; "" if it is done."""
    try:
        act(group, *args)
        said = ""
    except UserError as error:
        said = str(error)
    assert len(set(group.comm.allgather(said))) == 1, "ranks do not agree"
    return said
