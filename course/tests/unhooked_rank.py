"""A fork server of limited ranks with ctypes and without the audit hook: what an answer meets that gets around both."""
import socket
import sys

from course.grading import limits
from course.grading.fork_server import serve
from course.grading.limited_rank import prepare, run_call

if __name__ == "__main__":
    limits.audit_hook = lambda: lambda event, args: None
    limits.RAW_MEMORY = ()
    prepare()
    serve(socket.socket(fileno=int(sys.argv[1])), run_call)
