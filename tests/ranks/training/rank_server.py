"""Forks trainer ranks from a process that has imported what they need: an import takes each of them five seconds.

    launch.py ── stdin: a JSON line with module, arguments and output file ──> this process ── fork ──> rank
              <── stdout: "started <pid>", later "ended <pid> <exit status>" ──

A rank is as if started by `python -m <module> <arguments>`: the server imports, computes nothing and starts no thread.
"""

import json
import os
import runpy
import select
import signal
import sys
import traceback

# Imported for the ranks.
import rlscale.training.fsdp.rank
import rlscale.training.megatron.rank

assert rlscale.training.fsdp.rank and rlscale.training.megatron.rank


def run(module: str, arguments: list[str], output: str) -> None:
    """Becomes a rank. Never returns."""
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for stream, number in ((null, 0), (file, 1), (file, 2)):
            os.dup2(stream, number)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def reap() -> None:
    """Reports the ranks that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        print("ended", pid, os.waitstatus_to_exitcode(status), flush=True)


def main() -> None:
    wake, wake_end = os.pipe()
    for end in (wake, wake_end):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    buffer = b""
    while True:
        for ready in select.select([0, wake], [], [])[0]:
            if ready == wake:
                os.read(wake, 1 << 16)
                reap()
                continue
            received = os.read(0, 1 << 16)
            if not received:  # the tests have ended
                return
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if (pid := os.fork()) == 0:
                    run(request["module"], request["arguments"], request["output"])
                print("started", pid, flush=True)


if __name__ == "__main__":
    main()
