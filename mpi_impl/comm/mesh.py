"""One rank of a mesh: what plays a program of named arrays (reference/named/) on real ranks."""
from collections.abc import Mapping

from mpi_impl.comm.group import Group
from reference.named.mesh import Mesh


class RankMesh(Mesh):
    """The textbook's Mesh with one rank in its lists. Each axis of the mesh is a group, in the order of its ranks."""

    def __init__(self, groups: Mapping[str, Group]):
        super().__init__({m: group.size for m, group in groups.items()})
        self.groups, self.ranks = groups, [{m: group.rank for m, group in groups.items()}]

    def collective(self, operation, xs, m, *arguments):
        """Do a collective of a Group."""
        (x,), group, reason = xs, self.groups[m], "named arrays"
        if operation == "all_to_all":
            return [group.all_to_all([part.copy() for part in x], reason)]
        x = x.copy()        # in C's order, and an all-reduce writes into it
        if operation == "all_reduce":
            return [group.all_reduce(x, reason, "max" if arguments else "sum")]
        return [getattr(group, operation)(x, *arguments, reason)]
