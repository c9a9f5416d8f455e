"""Options that mean nothing without another one."""
from collections.abc import Iterable
from typing import Any

from mpi_impl.launch.option_fields import declared
from reference.config import option
from reference.errors import UserError
from shardlab.programs.options import ExpertsOptions, MuonOptions

TABLE = "positions have a table, and nothing is rotated"

# An option, the one that it needs (with its value, if only one will do), and what a model is without that.
PARTNERS = {
    "num_query_groups": ("group_query_attention", "every head of queries has its own keys and values"),
    "add_qkv_bias": ("disable_bias_linear", "all linear layers of a block have biases, those of Q, K and V, too"),
    "use_rope_scaling": ("position_embedding_type rope", TABLE),
    "rope_scaling_factor": ("use_rope_scaling", "rope's frequencies stay as they are"),
    "rotary_base": ("position_embedding_type rope", TABLE),
    "rotary_percent": ("position_embedding_type rope", TABLE),
    **{name: ("num_experts", "the model has no experts") for name in declared(ExpertsOptions) if name != "num_experts"},
    **{name: ("optimizer muon", "all parameters are Adam's") for name in declared(MuonOptions) if name != "optimizer"},
}


def check_partners(given: Iterable[str], args: Any) -> None:
    """Raise UserError for a given option that would have no effect. `args` are all options, with a preset's values."""
    for name in given:
        partner, without = PARTNERS.get(name, (None, ""))
        if partner and not has(args, partner):
            needed, _, value = partner.partition(" ")
            needed = f"{option(needed)} {value}".strip()
            raise UserError(f"{option(name)} is given, but without {needed} {without}. Add {needed}, or leave it out.")


def has(args: Any, partner: str) -> bool:
    """Report whether the options have this one: `num_experts`, or with a value, `position_embedding_type rope`."""
    name, _, value = partner.partition(" ")
    found = getattr(args, name)
    return found == value if value else found not in (None, False)
