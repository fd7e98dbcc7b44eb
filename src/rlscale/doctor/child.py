"""The process of one check: calls its function and writes the result to a file.

    python -P -m rlscale.doctor.child <module:function> --device cuda --folder <empty folder> --models <folder>
        --result <file> --deadline <s>

A check that is about to miss its deadline gets a traceback of all threads on standard error, and so does one that
crashes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from rlscale.control.left_calls import exit_process
from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, CheckVerdict, SkipCheck
from rlscale.engines.process_lifetime import die_with_parent

MAX_SUMMARY = 400


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one check. Returns 0 also where it fails: the verdict is in the result."""
    parser = argparse.ArgumentParser(prog="rlscale.doctor.child")
    parser.add_argument("target")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    args = parser.parse_args(argv)
    die_with_parent()
    faulthandler.enable()
    # Shortly before the parent kills this process: the traceback shows where it hangs.
    faulthandler.dump_traceback_later(max(0.5 * args.deadline, args.deadline - 1.0), exit=False)
    result = run_check(args.target, CheckContext(device=args.device, folder=args.folder, models=args.models))
    _write(result, args.result)
    faulthandler.cancel_dump_traceback_later()
    return 0


def run_check(target: str, context: CheckContext) -> CheckResult:
    """Imports and calls a check. Every exception becomes a result."""
    try:
        check = _import_check(target)
        return check(context)
    except SkipCheck as reason:
        return CheckResult(verdict=CheckVerdict.skipped, summary=str(reason))
    except Exception as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return CheckResult(verdict=CheckVerdict.failed, summary=text[:MAX_SUMMARY], next_step=find_advice(error))


def find_advice(error: BaseException) -> str:
    """The next step after an error that says enough about its cause; empty: that of the check."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install the package of the module {error.name.split('.')[0]}: pip install -e . in the repository"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "free memory: `nvidia-smi` lists the processes of a GPU; then run the check again with --only"
    return ""


def _import_check(target: str) -> Callable[[CheckContext], CheckResult]:
    module, _, function = target.partition(":")
    found: Callable[[CheckContext], CheckResult] = getattr(import_module(module), function)
    return found


def _write(result: CheckResult, path: Path) -> None:
    # Renamed when complete: the parent never reads half a result.
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(result.to_json(), allow_nan=False), encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    exit_process(main())
