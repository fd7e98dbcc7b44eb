"""Runs sglang-router with the arguments of a JSON file: `python route.py arguments.json`."""

import json
import os
import sys


def main() -> None:
    # Only installed in the interpreter that has SGLang. Not `sglang_router.launch_router`, which does the same: it also
    # imports a load balancer in Python, with it SGLang, torch and transformers, which takes ten seconds.
    from setproctitle import setproctitle
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    with open(sys.argv[1], encoding="utf-8") as file:
        arguments = json.load(file)
    # The file is a readable record of the run; secrets are passed in the environment.
    api_key = os.environ.pop("RLSCALE_ENGINE_API_KEY", None)
    if api_key is not None:
        arguments["api_key"] = api_key
    # JSON has no tuples, and the router accepts nothing else for a URL and its port.
    arguments["prefill_urls"] = [tuple(pair) for pair in arguments.get("prefill_urls", ())]
    setproctitle("sglang::router")
    router_args = RouterArgs(**arguments)
    router_args._validate_router_args()
    Router.from_args(router_args).start()


if __name__ == "__main__":
    main()
