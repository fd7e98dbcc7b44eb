"""The command `rlscale-chat`: talks to the weights of a run in the terminal, with the tools of its experiment."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import rlscale
from rlscale.cli.app import FAILED, INTERRUPTED, OK, WRONG_INPUT
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import OptionParser
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.observe.unfailing_stream import discard_output

if TYPE_CHECKING:
    from rlscale.config import RunConfig
    from rlscale.driver.chat_session import ChatEvent, ChatModel, ChatSession

COMMAND = "rlscale-chat"
_HELP = """\
/reset           forget all messages
/system TEXT     set the system message and forget all others; without TEXT: remove it
/quit            end, as Ctrl-D and Ctrl-C do
"""
_DIM, _BOLD, _PLAIN = "\033[2m", "\033[1m", "\033[0m"


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog=COMMAND,
        description="Talks to the weights of a run in the terminal: its chat template, the tools of agent.tools, "
        "answers as they are generated. Works in a pipe, too: each line is a message.",
        epilog=f"In the conversation:\n{_HELP}\nexit code: 0 done, 1 the model failed, 2 the input is wrong, "
        "130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a run folder, the folder of a checkpoint, a Hugging Face folder or a hub id")
    add("--system", default="", metavar="TEXT", help="system message")
    add("--max-tokens", type=int, default=None, metavar="N", help="of an answer; default: as in the run, else 512")
    add("--temperature", type=float, default=None, help="0 is greedy; default: as in the run, else 1")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--no-tools", action="store_true", help="without the tools of the run")
    add("--device", default="auto", help="torch device: auto, cpu, cuda, cuda:1, ...")
    add("--version", action="version", version=f"rlscale {rlscale.__version__}")
    return parser


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Talks until the input ends. Returns the exit code."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        _check(args)
        return _talk(args)
    except ConfigError as error:
        sys.stderr.writelines(f"{COMMAND}: {problem}\n" for problem in error.problems)
        return WRONG_INPUT
    except (DataError, ValueError) as error:
        sys.stderr.write(f"{COMMAND}: {' '.join(str(error).split())}\n")
        return WRONG_INPUT
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has ended; without this, Python reports it once more at its own end.
        discard_output(sys.stdout)
        return OK


def _check(args: argparse.Namespace) -> None:
    problems = []
    if args.max_tokens is not None and args.max_tokens < 1:
        fix = "remove it to use the limit of the run"
        problems.append(Problem(path="--max-tokens", rule="be at least 1", value=str(args.max_tokens), fix=fix))
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        fix = "write e.g. 0.7; 0 is greedy"
        problems.append(Problem(path="--temperature", rule="be at least 0", value=str(args.temperature), fix=fix))
    if problems:
        raise ConfigError(problems)


def _talk(args: argparse.Namespace) -> int:
    # Imported here, and below: wrong arguments are reported at once.
    from rlscale.cli import serve
    from rlscale.driver.eval_source import find_source

    source = find_source(args.source)
    config = _load_config(source) if source.run is not None else None
    path = _weights(source, config)
    engine = serve.make_parser().parse_args(
        ["--model-path", path, "--num-slots", "1", "--device", args.device, "--seed", str(args.seed)]
    )
    serve.check_arguments(engine)
    service, scheduler, _ = serve.build(engine)
    scheduler.start()
    try:
        return asyncio.run(_converse(args, config, path=path, service=service))
    finally:
        scheduler.close()


def _load_config(source: object) -> RunConfig:
    from rlscale.config import load_config_with_notes
    from rlscale.config.load import check_nothing
    from rlscale.driver.eval_source import EvalSource
    from rlscale.secrets import REDACTED

    assert isinstance(source, EvalSource)
    overrides = [text for text in source.overrides if REDACTED not in text]
    return load_config_with_notes(overrides, config_dir=source.config_dir, check=check_nothing).config


def _weights(source: object, config: RunConfig | None) -> str:
    """The folder of the weights; a checkpoint is exported into the cache first."""
    from rlscale.driver.eval_source import EvalSource, export_folder
    from rlscale.driver.export_checkpoint import export_checkpoint
    from rlscale.models.resolve_model import cache_root, resolve_model

    assert isinstance(source, EvalSource)
    if source.checkpoint is None:
        return source.weights
    assert config is not None, "a checkpoint is in a run folder"
    target = export_folder(source, cache_root(config.model.cache_dir))
    if not target.exists():
        sys.stderr.write(f"exporting {source.checkpoint.folder} to {target}\n")
        export_checkpoint(source.checkpoint.folder, target, model=resolve_model(config.model), config=config)
    return str(target)


async def _converse(args: argparse.Namespace, config: RunConfig | None, *, path: str, service: object) -> int:
    from rlscale.driver.chat_session import ChatSession

    model = await _open_model(args, config, path=path, service=service)
    session = ChatSession(model)
    session.set_system(args.system)
    terminal = Terminal()
    if terminal.is_shown:
        tools = ", ".join(spec["function"]["name"] for spec in model.box.specs) if model.box is not None else "none"
        terminal.note(f"{path}; tools: {tools}; /help lists the commands")
    if model.renderer is None:
        terminal.note("without a chat template (data.apply_chat_template=false) each line is a prompt by itself")
    try:
        return await _loop(session, terminal)
    finally:
        if model.box is not None:
            await model.box.close(wait=False)


async def _open_model(args: argparse.Namespace, config: RunConfig | None, *, path: str, service: object) -> ChatModel:
    from rlscale.driver.chat_session import ChatModel
    from rlscale.driver.open_agent import open_tools
    from rlscale.engines.embedded.embedded_service import EmbeddedService
    from rlscale.gateway.load_codec import load_codec
    from rlscale.models.hf_models import load_tokenizer
    from rlscale.types import SamplingParams

    assert isinstance(service, EmbeddedService)
    tokenizer = load_tokenizer(path)
    has_tools = config is not None and not args.no_tools and bool(config.agent.tools or config.agent.mcp_servers)
    has_template = has_tools or (
        tokenizer.chat_template is not None if config is None else config.data.apply_chat_template
    )
    rollout = None if config is None else config.rollout
    temperature = args.temperature if args.temperature is not None else 1.0 if rollout is None else rollout.temperature
    max_tokens = args.max_tokens or (512 if rollout is None else rollout.max_response_len)
    box = await open_tools(config.agent, config.sandbox) if has_tools and config is not None else None
    return ChatModel(
        service=service,
        encode=lambda text: list(tokenizer.encode(text)),
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)),
        renderer=load_codec(path).renderer if has_template else None,
        max_context_len=service.limits.max_context_len,
        max_turns=16 if config is None else config.agent.max_turns,
        box=box,
        params=SamplingParams(
            max_new_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0 if rollout is None else rollout.top_p,
            sampling_seed=args.seed,
        ),
    )


async def _loop(session: ChatSession, terminal: Terminal) -> int:
    lines = InputLines()
    while True:
        terminal.prompt()
        line = await lines.next()
        if line is None or line.strip() == "/quit":
            return OK
        word, _, argument = line.strip().partition(" ")
        if not word:
            continue
        if word == "/reset":
            session.reset()
            terminal.note("all messages are forgotten")
        elif word == "/system":
            session.set_system(argument.strip())
            terminal.note("the system message is set" if argument.strip() else "there is no system message")
        elif word == "/help":
            terminal.note(_HELP.rstrip("\n"))
        elif word.startswith("/") and word[1:].isalpha():
            terminal.note(f"{word} is no command; /help lists them")
        else:
            try:
                async for event in session.send(line):
                    terminal.show(event)
            except Exception as error:  # an engine that failed, or a message that it refuses
                terminal.note(f"failed: {' '.join(str(error).split())}")
                return FAILED


class Terminal:
    """Output. Colours, and the sign for input, only where both ends are a terminal."""

    def __init__(self) -> None:
        self.is_shown = sys.stdin.isatty() and sys.stdout.isatty()
        self._is_line_open = False

    def prompt(self) -> None:
        if self.is_shown:
            self._write(f"{_BOLD}> {_PLAIN}")

    def note(self, text: str) -> None:
        """A line that is no part of an answer; not in the output of a pipe."""
        self._end_line()
        sys.stderr.write(f"{_DIM}{text}{_PLAIN}\n" if sys.stderr.isatty() else f"{text}\n")
        sys.stderr.flush()

    def show(self, event: ChatEvent) -> None:
        match event.kind:
            case "text":
                # A model could send control sequences to the terminal.
                self._write("".join(c for c in event.text if c.isprintable() or c in "\n\t"))
                self._is_line_open = not event.text.endswith("\n")
            case "end":
                self._end_line()
            case "call":
                self._tool(f"→ {event.text}")
            case "result":
                self._tool(f"← {event.text}")
            case _:
                self.note(event.text)

    def _tool(self, text: str) -> None:
        self._end_line()
        shown = "".join(c for c in text if c.isprintable() or c in "\n\t")
        self._write(f"{_DIM}{shown}{_PLAIN}\n" if self.is_shown else f"{shown}\n")

    def _end_line(self) -> None:
        if self._is_line_open:
            self._write("\n")
            self._is_line_open = False

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class InputLines:
    """Lines of standard input. A thread reads them, so that Ctrl-C ends a wait for input at once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    async def next(self) -> str | None:
        """The next line; None: the input has ended."""
        return await self._lines.get()

    def _read(self) -> None:
        # Not sys.stdin, whose lock this thread would hold at the end of the process.
        pending = b""
        try:
            while content := os.read(0, 1 << 16):
                *lines, pending = (pending + content).split(b"\n")
                for line in lines:
                    self._add(line)
            if pending:
                self._add(pending)
        except (OSError, RuntimeError):  # the terminal or the loop has closed
            return
        self._loop.call_soon_threadsafe(self._lines.put_nowait, None)

    def _add(self, line: bytes) -> None:
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line.decode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
