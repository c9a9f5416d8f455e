"""A limited rank without the audit hook: what an answer meets that has got rid of it."""
import sys

from grading import limits
from grading.limited_rank import LimitedRank
from mpi_impl.launching.pool_rank import main

if __name__ == "__main__":
    limits.audit_hook = lambda folders: lambda event, args: None
    limits.close_inherited_files()
    main(sys.argv[1], LimitedRank)
