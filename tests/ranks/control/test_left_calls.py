"""The end of a process that has left a call."""

import subprocess
import sys

PROGRAM = """
import atexit, os, sys, threading
from rlscale.control.left_calls import call_or_leave, exit_process

atexit.register(os._exit, 99)  # stands for the crash of a library whose thread still runs
print("the run has finished")
call_or_leave(threading.Event().wait, "Ray", "end", timeout_s=0.05)
exit_process(int(sys.argv[1]))
"""


def test_it_ends_with_its_own_code_and_all_of_its_output() -> None:
    for code in (0, 3):
        command = [sys.executable, "-c", PROGRAM, str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert done.stdout == "the run has finished\n"
        assert "within 0.05 s Ray did not end" in done.stderr
