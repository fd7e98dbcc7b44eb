"""Child process of `rewards.boxed_math`: reads requests as JSON lines and writes one reply per request.

It runs as a script, not as part of the package, so that it imports nothing of rlscale.
"""

import json
import logging
import signal
import sys
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0)]


def main(max_cpu_s: float) -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeout is disabled
    for line in sys.stdin:
        # No Python signal handler, which would wait for a long computation in C: the kernel ends the process.
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        reply = _compare(**json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _compare(label: str, answer: str) -> dict[str, Any]:
    expected = _parse(label)
    if not expected:
        return {"error": f"the label must be a number or LaTeX expression, got {label!r}; correct the data"}
    return {"correct": bool(verify(expected, _parse(answer), timeout_seconds=None))}


def _parse(text: str) -> list[Any]:
    return list(parse(f"\\boxed{{{text}}}", extraction_config=_EXTRACTION, parsing_timeout=None))


if __name__ == "__main__":
    main(float(sys.argv[1]))
