"""The line to copy, read by the program that it starts, is the plan."""
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_impl import plan as program
from mpi_impl.launch import parser as launcher_parser
from mpi_impl.planning.launch_line import launch_line
from mpi_impl.training.arguments import parse
from mpi_impl.training.presets import PRESETS
from reference.plans import Plan
from tests.plan_cases import model_of, plans
