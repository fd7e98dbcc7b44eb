"""Runs an SGLang server with the arguments of a JSON file: `python serve.py arguments.json`.

Unlike SGLang's command line it accepts every argument, including false and nested ones.
"""

import functools
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    # Only installed in the interpreter that has SGLang.
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    with open(sys.argv[1], encoding="utf-8") as file:
        arguments = json.load(file)
    # The file is a readable record of the run; secrets are passed in the environment.
    api_key = os.environ.pop("RLSCALE_ENGINE_API_KEY", None)
    if api_key is not None:
        arguments["api_key"] = api_key
        redact_in_logs(api_key)
    load_plugins()
    try:
        run_server(ServerArgs(**arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def redact_in_logs(secret: str) -> None:
    """Replaces `secret` in all log records: SGLang logs its arguments when it starts."""
    make_record = logging.getLogRecordFactory()

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # values that do not fit the text, which logging would only report
            message = str(record.msg)
        record.msg, record.args = message.replace(secret, "<redacted>"), ()
        return record

    logging.setLogRecordFactory(make_redacted)


def ignore_pinning() -> None:
    """Ignores requests for page-locked memory in this process.

    SGLang's LoRA layers and its PyTorch backend of them request it on every device, and torch refuses it on a machine
    without an accelerator. It changes no value.
    """
    # Only installed in the interpreter that has SGLang.
    import torch
    import torch.utils._device

    # Caches the constructors that `with torch.device(...)` applies to, by their identity.
    torch.utils._device._device_constructors()
    for name in ("tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = _stay_pageable  # type: ignore[method-assign,assignment]


def _stay_pageable(tensor: Any, device: Any = None) -> Any:
    return tensor


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return make_pageable


# SGLang's children import this file again under another name.
if os.environ.get("RLSCALE_IGNORE_PINNING"):  # on a CPU, with adapters
    ignore_pinning()
if __name__ == "__main__":
    main()
