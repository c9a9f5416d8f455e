"""A formula that is printed beside a number says what the number is: put into its letters, it gives that."""
import re
from dataclasses import replace

import pytest

from mpi_impl.reports import memory
from mpi_impl.reports.layer_memory import formula_of, layer_formula, variants, variants_table
from mpi_impl.reports.memory import RankMemory
from mpi_impl.training.trainer import Held
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.activation_inventory import ActivationInventory, total
from reference.parallel.model_states import model_states
from reference.precision import Precision

MODEL = ModelConfig(2, 420, 84, 11, 13)      # a and h that all the t below divide


def value(formula, **letters):
    """Evaluate a text like `s b h (10 + 24/t)`, in which neighbours are factors."""
    return eval(re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula), {"__builtins__": {}}, letters)


def test_a_formula_is_read_as_in_a_paper():
    assert value("s b (10 + 24/t + 5 a s/(h t)) / t", s=3, b=2, t=4, a=6, h=5) == 6 * (16 + 90 / 20) / 4


def cells(line):
    return re.split(" {2,}", line.strip())


def number(cell):
    """Parse a cell: `= 1,234` -> 1234."""
    return int(re.sub("[=, ]", "", cell))


# ---- a layer --------------------------------------------------------------------------------------------------------


def inventory_of(parallel):
    return ActivationInventory(MODEL, b=3, s=13, precision=Precision("float32"), parallel=parallel)


def value_for_a_layer(formula, inventory):
    return value(formula, s=inventory.s, b=inventory.b, h=MODEL.hidden_size, a=MODEL.num_attention_heads,
                 t=inventory.parallel.tensor_model_parallel_size)


@pytest.mark.parametrize("t", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("granularity", ["none", "selective", "full"])
def test_the_formula_of_a_layer(t, granularity):
    """It holds for any t, with and without sequence parallelism, and for any recompute."""
    for parallel in {ParallelConfig(t), ParallelConfig(t, sequence_parallel=t > 1)}:
        inventory = inventory_of(replace(parallel, recompute=Recompute(granularity)))
        assert value_for_a_layer(formula_of(inventory.parallel), inventory) == pytest.approx(layer_formula(inventory))


@pytest.mark.parametrize("t", [1, 2, 4])
def test_the_table_of_variants(t):
    """Each row has the formula's number, and then the formula."""
    inventories = {name: inventory_of(parallel) for name, parallel in variants(t).items()}
    table = variants_table(inventories, {name: total(inventory.layer()) for name, inventory in inventories.items()})
    head, *lines = table.splitlines()
    end = lines.index("In 16 bits, beside the formula:")
    assert [line.strip().split(": ")[0] for line in lines[end + 1:] if line[2] != " "] == list(inventories)
    for line, inventory in zip(lines[:end], inventories.values(), strict=True):
        printed, formula = cells(line)[4:6]
        assert number(printed) == pytest.approx(value_for_a_layer(formula, inventory), abs=0.5)


# ---- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", range(4))
def test_the_formulas_of_states(zero_stage):
    """Those of all stages, in each column's bytes; and that of this run beside what it holds, here in float32."""
    psi, padding, n = 5000, 40, 3
    parallel = ParallelConfig(data_parallel_size=n, zero_stage=zero_stage)
    states = map(round, model_states(psi + padding, n, zero_stage, 4, 4, 8))
    held = Held(*states, *[0] * (len(Held._fields) - 3))
    one = RankMemory(psi, padding, held, held)

    row = cells(memory.states_table([one], parallel).splitlines()[1])
    assert number(row[-2]) == value(row[-1], w=4, g=4, K=8, Psi=psi + padding, N=n)
    head, *rows = map(cells, memory.formulas_table(one, parallel, Precision("float32")).splitlines())
    sizes = [dict(zip("wgK", map(int, re.findall(r"\d+", cell)), strict=True)) for cell in head[2:5]]
    assert sizes == [dict(w=4, g=4, K=8), dict(w=2, g=2, K=12), dict(w=2, g=4, K=12)] and len(rows) == 4
    for _, formula, *printed in rows:
        for size, found in zip(sizes, printed):
            assert number(found) == value(formula, **size, Psi=psi + padding, N=n)
