"""The formulas for parameters, against the tensors themselves and the published figures."""
from math import prod

import pytest
from hypothesis import given

from reference.config import ModelConfig
from reference.cost import parameters, parameters_per_rank
from reference.models.gpt import gpt_tensors
from reference.params import Layout, leaves
from tests.strategies import cases


@given(cases())
def test_parameters_are_those_of_the_tensors(case):
    tensors = gpt_tensors(case.model)
    assert parameters(case.model) == sum(prod(tensor.shape) for _, tensor in leaves(tensors))
    assert parameters_per_rank(case.model, case.t) == Layout(tensors, case.t).size


@pytest.mark.parametrize("h, a, layers, billions", [
    (1536, 16, 40, 1.2), (1920, 20, 54, 2.5), (2304, 24, 64, 4.2), (3072, 32, 72, 8.3)])
def test_table_1_of_the_paper(h, a, layers, billions):
    """Shoeybi et al. 2019, table 1."""
    assert round(parameters(ModelConfig(layers, h, a, 51_200, 1024)) / 1e9, 1) == billions


def test_the_smallest_model_of_the_paper_to_the_last_parameter():
    assert parameters(ModelConfig(40, 1536, 16, 51_200, 1024)) == 1_213_479_936
