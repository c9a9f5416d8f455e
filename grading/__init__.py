"""The checks of the labs: they run answers on limited ranks, and explain what is wrong.

In a notebook `%load_ext grading` loads the magic `%%answer`, which marks the cells that students submit.
"""
from grading.answers import load_ipython_extension
from grading.checks import (CheckFailed, count_kept, each, expect, expect_dicts, expect_equal, expect_sent,
                            expect_values, passed, run, run_given)
from grading.draws import check_data
from grading.stored import stored

__all__ = ["CheckFailed", "check_data", "count_kept", "each", "expect", "expect_dicts", "expect_equal",
           "expect_sent", "expect_values", "load_ipython_extension", "passed", "run", "run_given", "stored"]
