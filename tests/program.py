"""The training program on ranks of the pool."""
from reference.errors import UserError
from shardlab.programs.bert import PretrainingBERT
from shardlab.programs.gpt import PretrainingGPT
from shardlab.programs.settings import parse


def pretrain(group, options):
    """Pretrain a GPT with these options."""
    PretrainingGPT(parse(options, group.size), group).run()


def pretrain_bert(group, options):
    PretrainingBERT(parse(options, group.size, "bert"), group).run()


def refusal(group, act, *args) -> str:
    """Return the sentence that `act(group, *args)` raises, identical on all ranks; "" if it raises none."""
    try:
        act(group, *args)
        said = ""
    except UserError as error:
        said = str(error)
    assert len(set(group.comm.allgather(said))) == 1, "ranks do not agree"
    return said
