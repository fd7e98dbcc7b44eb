"""Process of the scripted engine: the HTTP API of the fake engine, with answers of a script and a model's tokenizer."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlscale.architectures.hf_config import read_config_json, read_hf_fields
from rlscale.cli.long_paths import reports_long_paths
from rlscale.engines.embedded.load_decoder import eos_ids, load_codec
from rlscale.engines.fake import FakeService, Faults
from rlscale.engines.launch import API_KEY_VARIABLE
from rlscale.engines.process_lifetime import die_with_parent
from rlscale.engines.scripted.answers import ScriptedAnswers
from rlscale.engines.scripted.script import load_script
from rlscale.engines.server.engine_service import build_app
from rlscale.engines.server.generate_request import Limits
from rlscale.engines.server.http_server import Server
from rlscale.errors import ConfigError
from rlscale.hosts import is_loopback
from rlscale.weights.receiver import EngineReceiver

log = logging.getLogger("rlscale.scripted")

EXIT_USAGE = 2


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlscale.cli.serve_script", description=__doc__)
    parser.add_argument("--script", required=True, help="module:name or a .jsonl file")
    parser.add_argument("--folder", default=".", help="folder of the script")
    parser.add_argument("--model-path", required=True, help="folder with the tokenizer")
    parser.add_argument("--max-context-len", type=int, default=None)
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds of a token, to imitate a model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    return parser


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until a signal. Returns 0, or 2 when the arguments are invalid."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    die_with_parent()
    api_key = os.environ.get(API_KEY_VARIABLE) or None  # an empty one is no key
    if api_key is None and not is_loopback(args.host):
        log.error("--host must be a loopback address without %s, got %s", API_KEY_VARIABLE, args.host)
        return EXIT_USAGE
    # A module of this folder is imported, and a relative file is read there.
    os.chdir(args.folder)
    try:
        service = build_service(
            args.script, args.model_path, max_context_len=args.max_context_len, token_s=args.token_s
        )
    except (ConfigError, ValueError) as error:
        log.error("%s", error)
        return EXIT_USAGE
    return asyncio.run(_serve(Server(build_app(service, api_key=api_key), host=args.host, port=args.port)))


def build_service(script: str, model_path: str, *, max_context_len: int | None, token_s: float = 0.0) -> FakeService:
    """The service of a script with the tokenizer and the sizes of a model.

    Raises:
        ConfigError: there is no such script.
        ValueError: the model has no tokenizer, or no token that ends an answer.
    """
    codec, fields = load_codec(Path(model_path)), read_hf_fields(model_path)
    if codec is None:
        raise ValueError(f"--model-path must have a tokenizer.json, got {model_path}")
    ends = eos_ids(model_path, read_config_json(model_path))
    if not ends:
        raise ValueError(f"--model-path must have a token that ends an answer (eos_token), got {model_path}")
    # The model's own limits, so that requests behave as with the model.
    positions = int(fields["max_position_embeddings"])
    limits = Limits(
        vocab_size=int(fields["vocab_size"]),
        max_context_len=positions if max_context_len is None else max_context_len,
        has_penalties=False,  # a script draws from no distribution
    )
    answers = ScriptedAnswers(load_script(script), codec, eos_ids=ends)
    return FakeService(limits, Faults(), token_s=token_s, receiver=EngineReceiver(), answers=answers)


async def _serve(server: Server) -> int:
    await server.start()
    log.info("ready at %s", server.url)
    await server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
