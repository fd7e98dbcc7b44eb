"""Shares of the launch scripts of slime, verl and TRL that `rlscale-migrate` translates.

Takes checkouts, each with the name of its row. A script without a value for a variable gets a placeholder. Writes
`results/migrate.md`, and `.json` with a line for each script: what is lost, and why it does not load.

    python benchmarks/migrate.py "slime 624b824=checkouts/slime" "verl b178a3c=checkouts/verl"
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import machine

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.migrate_checkout import translate_all

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("arguments", "complete", "loads", "plans", "refused")
NUM_REASONS = 15
ABOUT = (
    "Every script and Python launcher of the checkouts that starts a training run; none of them was run. `complete`: "
    "nothing is lost. `loads`: the experiment passes all checks of the configuration for GPUs. `plans`: `rlscale-plan` "
    "knows the model, for H100. `waits`: it has a key that exists and is not supported yet. Made by "
    "`python benchmarks/migrate.py`; `migrate.json` has a line for each script."
)

Scripts = Mapping[str, Mapping[str, Any]]
"""Results by the path of a script."""


def make_page(checkouts: Mapping[str, Scripts], where: Mapping[str, Any]) -> str:
    """The table, and what keeps experiments from loading."""
    rows = {name: _row(list(scripts.values())) for name, scripts in checkouts.items()}
    rows["all"] = _row([result for scripts in checkouts.values() for result in scripts.values()])
    reasons = Counter(
        reason for scripts in checkouts.values() for result in scripts.values() for reason in result["problems"]
    )
    lines = ["# Translated launch scripts", "", f"{where['date']}, rlscale {where['versions']['rlscale']}. {ABOUT}", ""]
    lines += [f"| checkout | scripts | {' | '.join(COLUMNS)} |", f"|---|---|{'---|' * len(COLUMNS)}"]
    lines += [f"| {name} | {' | '.join(map(str, row))} |" for name, row in rows.items()]
    lines += ["", "The most frequent reasons why experiments do not load:", ""]
    lines += [f"- {number}: {reason}" for reason, number in reasons.most_common(NUM_REASONS)]
    return "\n".join(lines) + "\n"


def _row(results: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(results), *(sum(result[column] for result in results) for column in COLUMNS)]


def main(argv: Sequence[str]) -> int:
    """Translates the checkouts `<name>=<folder>`."""
    pairs = [argument.partition("=") for argument in argv]
    where, checkouts = machine(), {name: translate_all(Path(folder)).scripts for name, _, folder in pairs}
    (RESULTS / "migrate.md").write_text(make_page(checkouts, where), encoding="utf-8")
    text = json.dumps({"machine": where, "scripts": checkouts}, indent=1) + "\n"
    for _, _, folder in pairs:
        # A script may name files by its own place, which differs on every machine.
        text = text.replace(f"{folder.rstrip('/')}/", "").replace(folder.rstrip("/"), ".")
    (RESULTS / "migrate.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
