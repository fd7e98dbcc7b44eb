"""Shares of wrong inputs that are answered well: words of other projects, command lines and YAML files.

The inputs are the tables of `tests/data`. A word is answered well if the advice names its key. A line or file is
refused well if the command exits with 2, prints no traceback, starts nothing, and its message begins with the right
path. Writes `results/wrong_inputs.md` and `.json`.

    python benchmarks/wrong_inputs.py
"""

import contextlib
import io
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from machine import machine

sys.path.insert(0, str(Path(__file__).parents[1]))
from rlscale.cli.app import main_train
from tests.unit.config.test_wrong_inputs import DEFAULTS, MINE, WRONG_INPUT, rows, start_nothing
from tests.unit.config.test_wrong_words import advice, suggested, typed, words

RESULTS = Path(__file__).parent / "results"
ABOUT = (
    "Made by `python benchmarks/wrong_inputs.py`, of the tables in `tests/data`; nothing was started. Advice was "
    "mended until these inputs were answered, and tests keep it so: the shares are no estimate for other inputs."
)


def is_refused(argv: Sequence[str], path: str) -> bool:
    """Whether a command line is refused at a path, and nothing starts."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main_train(list(argv), make_job=start_nothing)  # type: ignore[arg-type]  # never returns a job
    lines = [line.strip() for line in err.getvalue().splitlines()]
    named = any(line.startswith(f"{path} must ") for line in lines)
    return code == WRONG_INPUT and named and "Traceback" not in err.getvalue()


def is_refused_file(text: str, path: str) -> bool:
    """Whether an experiment file is refused at a path."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment" / "mine.yaml"
        file.parent.mkdir()
        body = text.replace("\\n", "\n").replace("\\t", "\t")
        own = MINE.format(defaults="" if body.startswith("defaults") else DEFAULTS)
        file.write_text(f"{own}{body}\n", encoding="utf-8")
        argv = ["--config-dir", folder, "experiment=mine", "batch.rollout_batch_size=4"]
        return is_refused(argv, path.format(file=file))


def main() -> int:
    """Answers every row, and writes the shares."""
    wrong = {
        "words of verl, TRL, HF and slime whose advice names the key": [
            row["word"] for row in words() if suggested(advice(*typed(row["word"]))).partition("=")[0] != row["key"]
        ],
        "wrong command lines that are refused with their path": [
            row["command"]
            for row in rows("wrong_lines.csv")
            if not is_refused(shlex.split(row["command"]), row["path"])
        ],
        "wrong YAML files that are refused with their path": [
            row["text"] for row in rows("wrong_files.csv") if not is_refused_file(row["text"], row["path"])
        ],
    }
    totals = [len(words()), len(rows("wrong_lines.csv")), len(rows("wrong_files.csv"))]
    where = machine()
    lines = ["# Wrong inputs", "", f"{where['date']}, rlscale {where['versions']['rlscale']}.", ""]
    lines += [ABOUT, ""]
    lines += ["| inputs | right | of | % |", "|---|---|---|---|"]
    for (name, found), total in zip(wrong.items(), totals, strict=True):
        right = total - len(found)
        lines.append(f"| {name} | {right} | {total} | {100 * right / total:.1f} |")
    (RESULTS / "wrong_inputs.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = json.dumps({"machine": where, "answered_otherwise": wrong}, indent=1) + "\n"
    (RESULTS / "wrong_inputs.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
