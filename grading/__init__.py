"""How the labs are checked: answers run on limited ranks of their own, and what is wrong is said in words that teach.

In a notebook `%load_ext grading` gives the magic `%%answer`, which marks the cells that are handed in.
"""
from grading.answers import load_ipython_extension
from grading.checks import CheckFailed, each, expect, expect_dicts, expect_equal, expect_values, passed, run, run_given
from grading.draws import check_data

__all__ = ["CheckFailed", "check_data", "each", "expect", "expect_dicts", "expect_equal", "expect_values",
           "load_ipython_extension", "passed", "run", "run_given"]
