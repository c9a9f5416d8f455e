"""The checks of the labs: they run answers on limited ranks, and explain what is wrong.

In a notebook `%load_ext course.grading` loads the magic `%%answer`, which marks the cells that students submit.
"""
from course.grading.answers import load_ipython_extension
from course.grading.checks import (CheckFailed, count_kept, each, expect, expect_dicts, expect_equal, expect_near,
                                   expect_sent, expect_values, passed, run, run_given)
from course.grading.draws import check_data
from course.grading.stored import stored

__all__ = ["CheckFailed", "check_data", "count_kept", "each", "expect", "expect_dicts", "expect_equal",
           "expect_near", "expect_sent", "expect_values", "load_ipython_extension", "passed", "run", "run_given",
           "stored"]
