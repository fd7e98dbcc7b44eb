"""Adds up the pytest runs of a log: `_summary.py LOG EXIT_STATUS`. The last lines of bin/test."""

import re
import sys
from collections import Counter
from pathlib import Path

ORDER = ("failed", "error", "passed", "skipped", "xfailed", "warning")
ARGUMENTS = re.compile(r"^arguments\.csv: .*$", re.MULTILINE)
RUN = re.compile(r"^=*\s?((?:\d+ [a-z]+(?:, )?)+) in ([\d.]+)s", re.MULTILINE)


def main() -> None:
    """Says nothing when no pytest ran."""
    log = Path(sys.argv[1]).read_text(errors="replace")
    runs = RUN.findall(log)
    total: Counter[str] = Counter()
    for counts, _ in runs:
        for number, outcome in re.findall(r"(\d+) ([a-z]+)", counts):
            total[outcome.rstrip("s") if outcome in ("errors", "warnings") else outcome] += int(number)
    words = ", ".join(f"{total[name]} {name}" for name in ORDER if total[name])
    verdict = "all sessions passed" if sys.argv[2] == "0" else "A SESSION FAILED"
    for line in dict.fromkeys(ARGUMENTS.findall(log)):
        sys.stdout.write(f"{line}\n")
    if words:
        seconds = sum(float(text) for _, text in runs)
        sys.stdout.write(f"==== {verdict}: {words} in {seconds:.2f}s ====\n")


if __name__ == "__main__":
    main()
