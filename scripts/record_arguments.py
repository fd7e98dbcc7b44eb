"""Records the arguments of the installed SGLang or Megatron-core, for machines without them.

    python scripts/record_arguments.py megatron                       # in the interpreter that runs this
    python scripts/record_arguments.py sglang --python <interpreter>
    python scripts/record_arguments.py sampling --python <interpreter>

Writes files of `src/rlscale/config/passthrough/`: the names and types that `megatron.<field>`, `sglang.<argument>` and
the entries of `rollout.sampling_params` are checked against.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from rlscale.config.passthrough import megatron_args, sglang_args, sglang_sampling_params
from rlscale.config.passthrough.recorded import DESCRIBE

LIBRARIES = {"megatron": megatron_args, "sglang": sglang_args, "sampling": sglang_sampling_params}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter that has the library")
    arguments = parser.parse_args()
    library = LIBRARIES[arguments.library]
    distribution = (megatron_args if library is megatron_args else sglang_args).DISTRIBUTION
    command = [str(arguments.python), str(DESCRIBE), distribution, *library.CLASSES]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    library.RECORDED.write_text(done.stdout.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
