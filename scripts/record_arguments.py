"""Records the arguments of the installed SGLang or Megatron-core, for machines without them.

    python scripts/record_arguments.py megatron                       # in the interpreter that runs this
    python scripts/record_arguments.py sglang --python <interpreter>

Writes `src/rlscale/config/passthrough/<name>_arguments.json`: the names and types that `megatron.<field>` and
`sglang.<argument>` are checked against.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from rlscale.config.passthrough import megatron_args, sglang_args
from rlscale.config.passthrough.recorded import DESCRIBE

LIBRARIES = {"megatron": megatron_args, "sglang": sglang_args}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter that has the library")
    arguments = parser.parse_args()
    library = LIBRARIES[arguments.library]
    command = [str(arguments.python), str(DESCRIBE), library.DISTRIBUTION, *library.CLASSES]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    library.RECORDED.write_text(done.stdout.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
