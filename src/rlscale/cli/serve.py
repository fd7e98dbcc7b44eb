"""The command `rlscale-serve`: runs the embedded engine as an HTTP server.

The API key comes from the environment variable RLSCALE_ENGINE_API_KEY and never from the command line, which every user
of the machine can read.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlscale.algo.checksum import checksum
from rlscale.architectures.low_precision import PRECISIONS
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import DefaultsFormatter, OptionParser
from rlscale.engines.embedded.decoder import Decoder
from rlscale.engines.embedded.embedded_service import EmbeddedService
from rlscale.engines.embedded.load_decoder import eos_ids, load_codec, load_decoder, num_useful_threads
from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.embedded.scheduler_options import SchedulerOptions
from rlscale.engines.embedded.weight_store import WeightStore
from rlscale.engines.launch import API_KEY_VARIABLE
from rlscale.engines.process_lifetime import die_with_parent
from rlscale.engines.server.engine_service import build_app
from rlscale.engines.server.generate_request import Limits
from rlscale.engines.server.http_server import Server, exclude_startup_objects
from rlscale.errors import ConfigError
from rlscale.gateway.codec import Codec
from rlscale.gateway.engine_chat import add_chat_routes
from rlscale.hosts import is_loopback
from rlscale.models.batch_shapes import MAX_CACHED_TOKENS
from rlscale.models.model_path import check_model_path, error_of_argument
from rlscale.weights.receiver import EngineReceiver

log = logging.getLogger("rlscale.serve")

EXIT_USAGE = 2

COUNTS = ("num_slots", "max_cached_tokens", "max_context_len", "num_threads", "max_adapters")
"""Arguments that are positive numbers."""


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="rlscale-serve",
        description="Serves a Hugging Face causal language model on torch alone, with SGLang's HTTP API and the chat "
        "APIs of OpenAI and Anthropic.",
        epilog=f"If {API_KEY_VARIABLE} is set, clients must send it as a bearer token; required beyond loopback.",
        formatter_class=DefaultsFormatter,
    )
    add = parser.add_argument
    add("--model-path", required=True, help="folder in Hugging Face format, or a hub id")
    add("--served-model-name", default=None, help="name at /v1/models; default: the model path")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=30000, help="port; 0 chooses a free one and logs it")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="data type of weights and KV cache")
    add(
        "--weight-precision",
        choices=PRECISIONS,
        default=None,
        help="precision of linear layers, which are quantised at the start; default: --dtype",
    )
    add("--device", default="cpu", help="torch device: auto, cpu, cuda, cuda:1, ...")
    add("--num-slots", type=int, default=64, help="number of sequences decoded at once per length class")
    add(
        "--max-cached-tokens",
        type=int,
        default=MAX_CACHED_TOKENS,
        help="KV cache of one length class, in tokens; long sequences get fewer slots",
    )
    add(
        "--max-context-len",
        type=int,
        default=None,
        help="maximum prompt and response length; default: the model's limit",
    )
    add(
        "--num-threads",
        type=int,
        default=None,
        help="maximum threads of the decode loop, which uses one per 4 MiB of weights",
    )
    add("--seed", type=int, default=0, help="seed for requests without one")
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="responses depend on weights, prompt, parameters and seed only; without it, fewer rows are computed",
    )
    add(
        "--max-adapters",
        type=int,
        default=None,
        help="maximum versions of LoRA adapters over all names, on a base that several jobs share: requests name an "
        "adapter, and the base cannot be changed; default: no limit, one job",
    )
    add("--weight-version", default="0", help="initial version of the weights")
    add("--parent-death", action="store_true", help="exit when the parent process dies")
    add("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"), help="level of the log on stderr")
    return parser


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until a signal. Returns 0, or 2 when the arguments are invalid."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if args.parent_death:
        die_with_parent()
    api_key = os.environ.get(API_KEY_VARIABLE) or None  # an empty one is no key
    if api_key is None and not is_loopback(args.host):
        log.error(
            "--host must be a loopback address, got %s; set %s to a secret to accept other machines",
            args.host,
            API_KEY_VARIABLE,
        )
        return EXIT_USAGE
    try:
        check_arguments(args)
        service, scheduler, error_handler = build(args)
    except ConfigError as e:
        log.error("%s", error_of_argument(e, name="--model-path"))
        return EXIT_USAGE
    except ValueError as e:
        log.error("%s", e)
        return EXIT_USAGE
    # The decode thread and the HTTP server run side by side from here on.
    return asyncio.run(_serve(args, service, scheduler, error_handler, api_key))


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError for a wrong model path, ValueError for a wrong number of slots or device."""
    if problems := check_model_path(args.model_path, name="--model-path"):
        raise ConfigError(problems)
    for name, number in vars(args).items():
        # None: derived from the model or the machine.
        if name in COUNTS and number is not None and number < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} must be at least 1, got {number}; remove it to use the default")
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port must be a number from 0 to 65535, got {args.port}; 0 chooses a free one")
    try:
        kind = "cpu" if args.device == "auto" else torch.device(args.device).type
    except RuntimeError:
        kind = None
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:<index>, got {args.device}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device must be cpu on a machine without CUDA, got {args.device}")


class _DecodeErrorHandler:
    """Passes a fatal error of the decode thread to the server, which is created later."""

    def __init__(self) -> None:
        self.server: Server | None = None

    def __call__(self, error: BaseException) -> None:
        if self.server is not None:
            self.server.fail(error)


def build(args: argparse.Namespace) -> tuple[EmbeddedService, Scheduler, _DecodeErrorHandler]:
    """Loads the model and creates engine and weight receiver.

    Raises:
        ConfigError, ValueError: the model cannot be served.
    """
    max_threads = args.num_threads or torch.get_num_threads()
    # GNU OpenMP creates one thread pool per thread that computes in parallel. With more pool threads than cores they
    # sleep between operations, and a decode step takes 1.5 times as long. So this thread computes single-threaded.
    torch.set_num_threads(1)
    kind = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    _omit_records(kind)
    device = torch.device(kind)
    dtype = getattr(torch, args.dtype)
    try:
        decoder, limit = load_decoder(
            args.model_path,
            lambda path: _load_with_transformers(path, dtype),
            dtype=dtype,
            device=device,
            max_context_len=args.max_context_len,
            precision=args.weight_precision,
        )
    except (KeyError, SafetensorError) as error:
        fix = f"{type(error).__name__}: {error}"
        raise ValueError(f"--model-path must be a complete checkpoint, got {args.model_path}; {fix}") from error
    receiver = EngineReceiver(device=kind)
    weights = _make_weight_store(decoder, receiver=receiver, version=args.weight_version)
    config = decoder.config
    options = SchedulerOptions(
        num_slots=args.num_slots,
        max_cached_tokens=args.max_cached_tokens,
        deterministic=args.deterministic,
        num_threads=num_useful_threads(decoder.weights.values(), max_threads=max_threads),
        seed=args.seed,
        eos_ids=eos_ids(args.model_path, config.raw),
        max_adapters=args.max_adapters,
    )
    error_handler = _DecodeErrorHandler()
    codec = load_codec(Path(args.model_path))
    decode = None if codec is None else codec.decode
    scheduler = Scheduler(decoder, weights, options, decode=decode, on_death=error_handler)
    facts = {
        **_command_facts(args),
        "model_type": config.raw["model_type"],
        "device": kind,
        "compares_checksums": True,
        "weight_formats": receiver.formats,
        "max_total_num_tokens": options.total_cache_tokens(limit),  # SGLang's name; agents are admitted by it
    }
    limits = Limits(
        vocab_size=config.architecture.vocab_size,
        max_context_len=limit,
        has_experts=config.routing is not None,
        scores_prompts=True,
        has_images=decoder.tower is not None,
    )
    open_images = None if decoder.tower is None else decoder.tower.open
    service = EmbeddedService(scheduler, limits, codec=codec, facts=facts, open_images=open_images)
    return service, scheduler, error_handler


def _make_weight_store(decoder: Decoder, *, receiver: EngineReceiver, version: str) -> WeightStore:
    return WeightStore(
        decoder.weights,
        decoder.aliases,
        receiver=receiver,
        checksum=checksum,
        version=version,
        is_unused=decoder.is_unused,
    )


def _command_facts(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the command line that the engine reports."""
    return {
        "model_path": args.model_path,
        "served_model_name": args.served_model_name or args.model_path,
        "dtype": args.dtype,
        "weight_precision": args.weight_precision,
        "num_slots": args.num_slots,
        "deterministic": args.deterministic,
    }


def _omit_records(device_kind: str) -> None:
    """Omits torch's records of the last 2,000 collectives, unless TORCH_FR_BUFFER_SIZE asks for them.

    NCCL's watchdog writes them when one does not end; gloo has none. They take 2 MB.
    """
    if device_kind == "cpu":
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")


async def _serve(
    args: argparse.Namespace,
    service: EmbeddedService,
    scheduler: Scheduler,
    error_handler: _DecodeErrorHandler,
    api_key: str | None,
) -> int:
    scheduler.start()
    app = build_app(service, api_key=api_key)
    add_chat_routes(
        app,
        service,
        load_codec=partial(load_chat_codec, args.model_path),
        model=args.served_model_name or args.model_path,
    )
    server = Server(app, host=args.host, port=args.port)
    error_handler.server = server
    try:
        try:
            await server.start()
        except OSError as error:
            await server.stop()
            got = f"{args.host}:{args.port}"
            log.error("--host and --port must be an address to listen at, got %s; %s", got, error.strerror)
            return EXIT_USAGE
        exclude_startup_objects()
        log.info("ready at %s", server.url)
        await server.run()
    finally:
        scheduler.close()
    return 0


def load_chat_codec(model_path: str) -> Codec:
    """Loads the renderer of the chat APIs."""
    # Importing transformers and the renderers takes seconds, which an engine without chats does not need.
    from rlscale.gateway.load_codec import load_codec as load
    from rlscale.models.image_processor import has_images

    return load(model_path, reads_images=has_images(model_path))


def _load_with_transformers(path: str, dtype: torch.dtype) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    # Importing transformers takes 1.7 s; plain folders of safetensors do not need it.
    from rlscale.models.hf_models import load_causal_lm

    model = load_causal_lm(path, dtype=dtype)
    return model.config.to_dict(), model.state_dict()


if __name__ == "__main__":
    sys.exit(main())
