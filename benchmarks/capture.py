"""Measures the time of capturing a trajectory of many turns, compared with rendering its history again at every turn.

Both get the same conversation and alternate turn by turn. Capturing finds the known history, extends its ids by a
bridge, parses the sampled ids and adds the turn. Rendering again applies the chat template to the whole history,
encodes it, and parses the sampled ids. The ids of answers are those of the tokenizer, so that both give equal requests.
The time is compared with that of the generation, at an assumed rate, and with the embedded engine on the tiny model,
which is measured. Passed: at most 3 % at the assumed rate. Writes `capture.md` and `.json`, and exits with 1 if it is
not passed.

    python benchmarks/capture.py [--turns 8 32 128] [--rate 100] [--rounds 3] [--out benchmarks/results]
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import busy_note, sentence
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlscale.config import ModelBuild, ModelConfig
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.ports import reserve_port
from rlscale.engines.process import EngineProcess
from rlscale.models.agent_tokenizer import agent_tokenizer
from rlscale.models.tiny import build_model
from rlscale.renderers.answer_parser import COMPACT, HERMES
from rlscale.renderers.conversation_tree import ConversationTree
from rlscale.renderers.library_renderer import LibraryRenderer
from rlscale.renderers.renderer import Renderer
from rlscale.renderers.template_renderer import TemplateRenderer
from rlscale.trajectory import Trajectory
from rlscale.types import EngineAddress, Generation, Prompt, SamplingParams

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIMIT = 0.03
GIVEN, SAMPLED = 250, 250
"""Tokens of a turn, about: the output of a tool, and the answer."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *MARKS.split()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Seconds of one trajectory: medians over the rounds."""

    renderer: str
    num_turns: int
    num_tokens: int
    num_sampled: int
    capture_s: float
    again_s: float
    generation_s: float

    @property
    def share(self) -> float:
        return self.capture_s / self.generation_s


def bpe_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with 8,000 tokens, trained on the documentation: those of models cannot be downloaded here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=SPECIAL, chat_template=CHATML
    )


def measure_turns(renderer: Renderer, tokenizer: Any, text: str, *, num_turns: int, rate: float, rounds: int) -> Cost:
    """The median cost of a trajectory; the first round warms up."""
    found = [run_turns(renderer, tokenizer, text, num_turns=num_turns) for _ in range(rounds + 1)][1:]
    num_tokens, num_sampled = found[0][2:]
    return Cost(
        renderer=renderer.name,
        num_turns=num_turns,
        num_tokens=num_tokens,
        num_sampled=num_sampled,
        capture_s=statistics.median(each[0] for each in found),
        again_s=statistics.median(each[1] for each in found),
        generation_s=num_sampled / rate,
    )


def run_turns(renderer: Renderer, tokenizer: Any, text: str, *, num_turns: int) -> tuple[float, float, int, int]:
    """Seconds of capturing and of rendering again, all tokens and the sampled ones."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    trajectory = Trajectory(id=0, group_index=0, prompt=Prompt(index=0, text="", token_ids=()), seed=0)
    tree = ConversationTree(trajectory, renderer)
    messages: list[dict[str, Any]] = [{"role": "system", "content": text[:2000]}]
    capture_s = again_s = 0.0
    for turn in range(num_turns):
        given, answer = (
            tokenizer.decode(ids[start : start + size])
            for start, size in ((7 * turn % (len(ids) - GIVEN), GIVEN), (11 * turn % (len(ids) - SAMPLED), SAMPLED))
        )
        messages.append({"role": "user", "content": given})
        sampled = [*tokenizer.encode(answer, add_special_tokens=False), renderer.stop_ids[0]]
        # As a client's request: parsed from JSON, so that no text is the same object as before.
        received = json.loads(json.dumps(messages))
        for capture in (turn % 2 == 0, turn % 2 == 1):
            began = time.thread_time()
            if capture:
                request = tree.prepare(received)
                message = tree.add(request, generation_of(sampled)).to_message()
                capture_s += time.thread_time() - began
            else:
                again = renderer.render(received)
                renderer.parse(sampled, prompt_ids=again)
                again_s += time.thread_time() - began
        if turn == 1 and again != request.token_ids:
            raise RuntimeError("both must give equal requests")
        messages.append(message)
    return capture_s, again_s, len(trajectory.token_ids()), trajectory.num_sampled


def generation_of(ids: list[int]) -> Generation:
    zeros = [0] * len(ids)
    return Generation(
        text="", output_ids=ids, logprobs=[-1.0] * len(ids), weight_versions=zeros, finish_reason="stop", engine="none"
    )


async def run_engine(url: str, num_turns: int) -> Cost:
    """A trajectory with the tiny model, whose generation is measured too."""
    tokenizer = agent_tokenizer(8192)
    renderer = TemplateRenderer(tokenizer, COMPACT, name="compact, embedded engine")
    trajectory = Trajectory(id=0, group_index=0, prompt=Prompt(index=0, text="", token_ids=()), seed=0)
    tree, messages = ConversationTree(trajectory, renderer), list[dict[str, Any]]()
    capture_s = again_s = generation_s = 0.0
    engine = HttpEngine(EngineAddress(name="engine", url=url), timeout_s=600)
    try:
        for turn in range(num_turns):
            messages.append({"role": "user", "content": f"{turn}+{turn + 1}=" + "?" * 16})
            start = time.thread_time()
            request = tree.prepare(messages)
            capture_s += time.thread_time() - start
            params = SamplingParams(max_new_tokens=32, ignore_eos=True, sampling_seed=turn)
            sent = time.perf_counter()
            (generation,) = await engine.generate(request.token_ids, params)
            generation_s += time.perf_counter() - sent
            start = time.thread_time()
            message = tree.add(request, generation).to_message()
            added = time.thread_time()
            renderer.parse(generation.output_ids, prompt_ids=renderer.render(messages))
            again_s += time.thread_time() - added
            capture_s += added - start
            messages.append(message)
    finally:
        await engine.close()
    return Cost(
        renderer=renderer.name,
        num_turns=num_turns,
        num_tokens=len(trajectory.token_ids()),
        num_sampled=trajectory.num_sampled,
        capture_s=capture_s,
        again_s=again_s,
        generation_s=generation_s,
    )


def measure_engine(num_turns: int) -> Cost:
    with tempfile.TemporaryDirectory() as name:
        config = ModelConfig(build=ModelBuild.tiny_qwen3_agent, max_position_embeddings=16_384)
        folder, port = build_model(config, Path(name)), reserve_port("127.0.0.1")
        command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={folder}", f"--port={port}"]
        command += ["--num-slots=1", "--log-level=WARNING", "--num-threads=1"]
        url = f"http://127.0.0.1:{port}"
        process = EngineProcess(command, name="engine", url=url, env=os.environ, log_path=Path(name) / "engine.log")
        process.start()
        try:
            process.wait_ready(timeout_s=120)
            return asyncio.run(run_engine(url, num_turns))
        finally:
            process.stop()


def write(costs: Sequence[Cost], out: Path, *, rate: float, load: float) -> bool:
    """Writes the table; whether the longest trajectories are within the limit."""
    rows = [
        f"| {c.renderer} | {c.num_turns} | {c.num_tokens:,} | {1e3 * c.capture_s:.0f} | {1e3 * c.again_s:.0f} |"
        f" {c.again_s / c.capture_s:.1f} | {c.generation_s:.1f} | {c.share:.2%} | {c.again_s / c.generation_s:.1%} |"
        for c in costs
    ]
    head = (
        "| renderer | turns | tokens | capture, ms | render again, ms | ratio | generation, s | capture of it |"
        " again of it |"
    )
    is_passed = all(cost.share <= LIMIT for cost in costs)
    text = (
        f"# Capture of trajectories of many turns\n\n{sentence([load])} {busy_note(load)}Made by "
        f"`python benchmarks/capture.py`.\n\nAbout {GIVEN} given and {SAMPLED} sampled tokens a turn. Generation of a "
        f"trajectory is assumed at {rate:g} tokens/s; that of the embedded engine on the tiny model is measured, "
        "with 32 sampled tokens a turn. Times of capture are CPU times of one trajectory, medians of the rounds.\n\n"
        + "\n".join([head, "|---|---|---|---|---|---|---|---|---|", *rows])
        + f"\n\nCapture takes at most {max(c.share for c in costs):.2%} of the generation: "
        + f"{'passed' if is_passed else 'not passed'} (limit {LIMIT:.0%}).\n"
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "capture.md").write_text(text)
    content = {"rate": rate, "passed": is_passed, "costs": [{**asdict(c), "share": c.share} for c in costs]}
    (out / "capture.json").write_text(json.dumps(content, indent=2) + "\n")
    return is_passed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--rate", type=float, default=100.0, help="assumed tokens/s of one trajectory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    texts = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs" / "how-to").glob("*.md"))]
    tokenizer, agent = bpe_tokenizer(texts), agent_tokenizer(1 << 20)
    cases = [
        (LibraryRenderer(tokenizer, "qwen3"), tokenizer),
        (TemplateRenderer(tokenizer, HERMES, name="chatml, template"), tokenizer),
        (TemplateRenderer(agent, COMPACT, name="compact, template"), agent),
    ]
    costs = []
    for renderer, used in cases:
        for num_turns in args.turns:
            cost = measure_turns(
                renderer, used, "".join(texts), num_turns=num_turns, rate=args.rate, rounds=args.rounds
            )
            costs.append(cost)
            sys.stderr.write(f"{cost}\n")
    costs.append(measure_engine(max(args.turns)))
    return 0 if write(costs, args.out, rate=args.rate, load=load) else 1


if __name__ == "__main__":
    sys.exit(main())
