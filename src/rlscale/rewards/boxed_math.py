"""Reward for answers in \\boxed{...} that equal the label as numbers or expressions, by the library math-verify.

The comparison runs in child processes: sympy may never return for an expression that a model generated, a thread cannot
be stopped, and the library's own timeout works in the main thread only.
"""

import importlib.util
import json
import logging
import queue
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlscale.errors import ConfigError, Problem
from rlscale.protocols import Reward
from rlscale.rewards.builtin import required_label
from rlscale.types import Sample

MAX_CPU_S = 5.0
"""CPU seconds for one comparison. Not wall time: the load of the machine must not change rewards."""

_CHILD = Path(__file__).with_name("math_verify_worker.py")
_logger = logging.getLogger(__name__)


class MathReward:
    """1 if the last \\boxed{...} of the response equals the label, else 0; also 0 without a box.

    An answer that takes longer than `max_cpu_s` to compare counts as wrong, with a warning. Thread-safe; keeps as many
    child processes as were ever busy at once, until `close`.

    Raises, when called:
        ValueError: there is no label, or math-verify cannot read it.
        RuntimeError: the child process failed for another reason than the time limit.
    """

    def __init__(self, *, max_cpu_s: float = MAX_CPU_S) -> None:
        if importlib.util.find_spec("math_verify") is None:
            fix = "pip install 'rlscale[math]'"
            raise ConfigError([Problem(path="reward.type", rule="have its library math-verify", value="math", fix=fix)])
        self._max_cpu_s = max_cpu_s
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()

    def __call__(self, sample: Sample) -> float:
        label = required_label(sample)
        answer = last_boxed(sample.response)
        if answer is None:
            return 0.0
        child = self._idle_child()
        reply = child.request({"label": last_boxed(label) or label, "answer": answer})
        if reply is None:
            _logger.warning(
                "comparing the answer %.60r of sample %d took over %g s; it counts as wrong",
                answer,
                sample.index,
                self._max_cpu_s,
            )
            return 0.0
        # Only a child that replied is reused; one that ran out of time has exited.
        self._idle.put(child)
        if "error" in reply:
            raise ValueError(reply["error"])
        return float(reply["correct"])

    def close(self) -> None:
        """Stops the child processes. The next call starts new ones."""
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def _idle_child(self) -> "_Child":
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return _Child(self._max_cpu_s)


class _Child:
    """A process that compares one answer at a time. It exits with its parent, or after `max_cpu_s`."""

    def __init__(self, max_cpu_s: float) -> None:
        self._process = subprocess.Popen(
            # -P: the folder of the script must not be first in sys.path.
            [sys.executable, "-P", str(_CHILD), str(max_cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def request(self, message: dict[str, str]) -> dict[str, Any] | None:
        """Returns the reply, or None if it took too long; the child has then exited."""
        assert self._process.stdin is not None and self._process.stdout is not None, "opened with pipes"
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        self.close()
        # SIGPROF: the CPU timer of the child ended it.
        if self._process.returncode == -signal.SIGPROF:
            return None
        raise RuntimeError(f"the process that compares answers exited with code {self._process.returncode}")

    def close(self) -> None:
        with self._process:  # closes the pipes, so that the child exits, and waits for it
            pass


def last_boxed(text: str) -> str | None:
    """Returns the content of the last \\boxed{...} with matching braces, or None."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        # Scans to the brace that closes this box; nested braces raise the depth.
        first = start + len(r"\boxed{")
        depth = 1
        for i in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[first:i]
        start = text.rfind(r"\boxed{", 0, start)
    return None


def boxed(reward: Reward) -> Reward:
    """Restricts a reward to the content of the last \\boxed{...} of the response; empty without a box."""

    def score(sample: Sample) -> Any:
        return reward(replace(sample, response=last_boxed(sample.response) or ""))

    return score
