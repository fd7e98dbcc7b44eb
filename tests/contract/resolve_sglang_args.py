"""Resolves and checks arguments of SGLang's server as it does at its start, in the interpreter that has SGLang.

`python resolve_sglang_args.py <arguments> <list of further arguments>`, both as JSON, prints a JSON list with an error,
or null, for each element of the list.
"""

import contextlib
import json
import logging
import sys
from typing import Any


def main() -> None:
    # Only installed in the interpreter that has SGLang.
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    logging.disable(logging.CRITICAL)
    base, further = json.loads(sys.argv[1]), json.loads(sys.argv[2])

    def resolve(arguments: dict[str, Any]) -> str | None:
        try:
            server_args = ServerArgs(**arguments)
            server_args.resolve_once()
            server_args.check_server_args()
        except (AssertionError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    with contextlib.redirect_stdout(sys.stderr):
        load_plugins()
        found = [resolve(base | arguments) for arguments in further]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
