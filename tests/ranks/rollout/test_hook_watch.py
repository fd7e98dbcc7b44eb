"""A filter that takes long is reported; one that stops all threads of the run ends it with its stack."""

import asyncio
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlscale.plugins import hook_watch
from rlscale.plugins.user_hook import UserHook

STOPPED = """
import asyncio
import re

from rlscale.plugins import hook_watch
from rlscale.plugins.user_hook import UserHook

hook_watch.MIN_STALL_S = 1.0


def keep(group):
    return re.match("(a+)+$", "a" * 60 + "b")


async def main():
    await UserHook(key="sampling.dynamic_filter_path", function=keep, timeout_s=0.5)("group")


asyncio.run(main())
"""


async def test_a_filter_that_takes_long_is_reported_with_its_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hook_watch, "REPORT_EVERY_S", 0.1)
    is_over = threading.Event()

    class Reported(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_over.set()

    hook_watch.log.addHandler(handler := Reported())
    try:
        hook = UserHook(key="sampling.dynamic_filter_path", function=lambda group: is_over.wait(60), timeout_s=60.0)
        assert await hook("group") is True
    finally:
        hook_watch.log.removeHandler(handler)
    assert "waiting for sampling.dynamic_filter_path for 0 s (" in caplog.text
    assert not hook_watch._limits


async def test_hooks_at_once_have_one_timer() -> None:
    hook = UserHook(key="sampling.dynamic_filter_path", function=lambda group: group, timeout_s=60.0)
    assert await asyncio.gather(*[hook(number) for number in range(5)]) == list(range(5))
    assert not hook_watch._limits


def test_a_filter_that_stops_all_threads_ends_the_process_with_its_stack(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED)
    done = subprocess.run(
        [sys.executable, "stopped.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr and 'stopped.py", line 12 in keep' in done.stderr
