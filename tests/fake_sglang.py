"""An interpreter whose SGLang is the fake engine, with as many processes and ranks as its arguments say.

rlscale starts it like the real one: its own program `serve.py` in another interpreter, with a file of arguments. Every
process records how it was started (`launches`), the calls that change its state (`calls`), and the checksums of the
weights that it received (`weights`), each in a file next to that of its arguments.
"""

import json
import sys
from pathlib import Path
from typing import Any

import rlscale
from tests.unit.config.interpreters import fake_interpreter

ROOT = Path(__file__).parents[1]
SOURCES = {
    "__init__.py": "",
    "launch_server.py": "from tests.fake_sglang_server import run_server\n",
    "srt/__init__.py": "",
    "srt/plugins.py": "def load_plugins(): pass\n",
    "srt/server_args.py": "class ServerArgs(dict): pass\n",
    "srt/utils.py": "def kill_process_tree(pid, include_parent): pass\n",
}


def install_fake_sglang(folder: Path) -> Path:
    """The path of the interpreter, for `sglang.python`."""
    python = fake_interpreter(folder)
    for name, source in SOURCES.items():
        file = folder / "site" / "sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    path = ":".join([str(folder / "site"), str(Path(rlscale.__file__).parents[1]), str(ROOT)])
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" "$@"\n')
    return python


def records(folder: Path, process: str, kind: str) -> list[dict[str, Any]]:
    """The records of a process, in order, over all its starts.

    Args:
        folder: the logs of the run.
        process: name, e.g. `engine 0 node 1`.
        kind: `launches`, `calls` or `weights`.
    """
    file = folder / f"{process.replace(' ', '_')}_arguments.{kind}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
