"""The report of `compare`: the first tensor in which two recordings differ, and those after it."""
from mpi_impl.runtime.tables import aligned
from shardlab.compare.completeness import format_iterations, lacking
from shardlab.compare.differences import Findings, TensorDifference
from shardlab.compare.names import Key
from shardlab.compare.recording import Recording


def report(found: Findings, a: Recording, b: Recording) -> str:
    formats = " and ".join(sorted({a.about.format, b.about.format}))
    if found.differences:
        wrong = found.differences[0].key
        assert isinstance(wrong, Key)
        before = [f"  missing    {name} never computes {key}, which comes before it: what makes it does not run there"
                  for name, one, other in (("A", a, b), ("B", b, a))
                  for key in lacking(one, other)[:1] if key.order < wrong.order]
        return "\n".join([*first(found), *before, "", *table(found.differences)])
    alone = f"; {found.alone:,} more are in one alone, since topologies and kernels differ" if found.alone else ""
    return agreement(found, format_iterations(sorted({key.iteration for key in a.parts})), f"{formats}{alone}")


def agreement(found: Findings, when: str, formats: str, runs: str = "A and B") -> str:
    """Describe two runs that do not differ beyond rounding."""
    worst = found.worst
    assert worst is not None, "recordings that are whole have tensors in common"
    return (f"{runs} agree: {found.compared:,} tensors of {when} were compared, in {formats}. They differ most in "
            f"{worst.key}: by {worst.size:.1e}, which is {worst.relative:.1e} of {worst.unit_is}; {worst.allowed:.0e} "
            "is allowed.")


def first(found: Findings, runs: str = "A and B", order: str = "the order of computation") -> list[str]:
    """Describe the first difference."""
    one = found.differences[0]
    layer = "" if one.key.layer is None else f", layer {one.key.layer}"
    before = (f"the {found.before:,} tensors before it agree, the last of them is {found.last}" if found.before > 1 else
              f"the tensor before it agrees, {found.last}" if found.last else "none")
    expected, value = one.values
    return [f"{runs} differ. The first tensor, in {order}:", "",
            f"  {one.key}",
            f"  where      {ranks(one)}{layer}",
            f"  size       {one.size:.1e}, which is {one.relative:.1e} of {one.unit_is}; rounding explains "
            f"{one.allowed:.0e}",
            f"  largest    at {list(one.at)} of {list(one.shape)}: {expected:.6g} ({one.expected}), but {value:.6g} "
            f"({one.holders[0]})",
            f"  before     {before}"]


def ranks(one: TensorDifference) -> str:
    """Name the ranks that differ from what is expected."""
    texts = []
    for run in sorted({holder.run for holder in one.holders}):
        held = sorted({rank for holder in one.holders if holder.run == run for rank in holder.ranks})
        if held:
            alone = all(len(holder.ranks) == 1 for holder in one.holders if holder.run == run)
            word = ("rank" if len(held) == 1 else "ranks") if alone else "the sum over ranks"
            texts.append(f"{word} {', '.join(map(str, held))} of {run}")
    return " and ".join(texts)


def table(differences: list[TensorDifference]) -> list[str]:
    """Tabulate the differences that follow the first."""
    if len(differences) == 1:
        return ["No other tensor differs."]
    rows = [("then", "off by", "relative", "where")]
    rows += [(str(one.key), f"{one.size:.1e}", f"{one.relative:.1e}", ranks(one)) for one in differences[1:]]
    return aligned(rows, left=(0, 3)).splitlines()
