"""Compares training on trees with training on separate samples: samples/s, CPU time, activations and gradient.

Both trainers (`train.share_prompts` true and false) have the same weights and the same optimiser step, planned and
packed as a run does it, one after the other in one process. Ratios are of one round; the table has their medians. CPU
seconds are of the process: other work on the machine does not change them as it does the wall time. Activations are the
distinct memory that autograd keeps for the backward pass of the largest micro-batch, without weights. Writes
`results/tree_training.md` and `.json`.

    python benchmarks/tree_training.py [--cases NAME ...] [--rounds 7] [--dry]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import THREADS, busy_note, machine, sentence
from torch import Tensor

from rlscale.config import (
    AlgoConfig,
    BatchConfig,
    ComputeDtype,
    FsdpConfig,
    ModelBuild,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from rlscale.data.microbatch_plan import plan_steps
from rlscale.models.resolve_model import resolve_model
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.step import compute_policy_terms
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan, TrainBatch

RESULTS = Path(__file__).parent / "results"
MODELS: Mapping[str, Mapping[str, Any]] = {
    "3M": {
        "num_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "33M": {
        "num_layers": 10,
        "hidden_size": 512,
        "intermediate_size": 1664,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
MAX_TOKENS = 8192  # of a micro-batch
VOCABULARY = 14
LIMIT = 2.5
"""Least ratio of samples/s for each case in `LIMITED`."""

LIMITED = ("branches_1024", "branches_1024_larger")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: for each sample its tokens, the length of its prompt, its mask and its trajectory."""

    text: str
    samples: Callable[[np.random.Generator], list[tuple[list[int], int, list[int], int]]]
    model: str = "3M"


def branches(length: int, *, num: int = 8, model: str = "3M") -> Case:
    """Paths of a trajectory that have 75 % in common, of which the first third is the prompt."""

    def build(rng: np.random.Generator) -> list[tuple[list[int], int, list[int], int]]:
        common, prompt_len = length * 3 // 4, length // 4
        samples = []
        trunk = _draw(rng, common)
        for branch in range(num):
            # The first path trains the common turns, the others only their own.
            mask = [0] * prompt_len + [int(branch == 0)] * (common - prompt_len) + [1] * (length - common)
            samples.append((trunk + _draw(rng, length - common), prompt_len, mask, 0))
        return samples

    return Case(text=f"{num} paths of {length:,} tokens, 75 % in common", samples=build, model=model)


def own_advantages(length: int, *, num: int = 8) -> Case:
    """The same tokens, but each sample is its own trajectory and trains what it shares, too."""
    whole = branches(length, num=num)

    def build(rng: np.random.Generator) -> list[tuple[list[int], int, list[int], int]]:
        return [
            (tokens, prompt_len, [0] * prompt_len + [1] * (length - prompt_len), i)
            for i, (tokens, prompt_len, _, _) in enumerate(whole.samples(rng))
        ]

    return Case(text=f"{num} trajectories of {length:,} tokens, 75 % in common and trained in each", samples=build)


def chain(num_turns: int, turn_len: int) -> Case:
    """A trajectory of many turns with a side branch at each, e.g. a sub-agent that sees the history."""

    def build(rng: np.random.Generator) -> list[tuple[list[int], int, list[int], int]]:
        trunk, samples = _draw(rng, turn_len), []
        for _ in range(num_turns):
            mask = [0] * len(trunk) + [1] * turn_len
            samples.append((trunk + _draw(rng, turn_len), turn_len, mask, 0))
            trunk = trunk + _draw(rng, turn_len)
        samples.append((trunk, turn_len, [0] * turn_len + [1] * (len(trunk) - turn_len), 0))
        return samples

    return Case(text=f"a chain of {num_turns} turns of {turn_len} tokens, a branch at each", samples=build)


def group_prompts(prompt_len: int, answer_len: int, *, num_groups: int) -> Case:
    """Groups of 8 answers, which have only their prompt in common."""

    def build(rng: np.random.Generator) -> list[tuple[list[int], int, list[int], int]]:
        samples = []
        for group in range(num_groups):
            prompt = _draw(rng, prompt_len)
            for answer in range(8):
                length = int(rng.integers(answer_len // 2, answer_len * 3 // 2 + 1))
                mask = [0] * prompt_len + [1] * length
                samples.append((prompt + _draw(rng, length), prompt_len, mask, group * 8 + answer))
        return samples

    text = f"{num_groups} prompts of {prompt_len} tokens with 8 answers of about {answer_len}"
    return Case(text=text, samples=build)


CASES: dict[str, Case] = {
    "branches_512": branches(512),
    "branches_1024": branches(1024),
    "branches_1024_larger": branches(1024, model="33M"),
    "branches_2048": branches(2048),
    "own_advantages_1024": own_advantages(1024),
    "chain": chain(12, 64),
    "group_prompts_long": group_prompts(256, 128, num_groups=2),
    "group_prompts_short": group_prompts(8, 4, num_groups=16),
}


def _draw(rng: np.random.Generator, length: int) -> list[int]:
    tokens: list[int] = rng.integers(0, VOCABULARY, length).tolist()
    return tokens


def build_case(case: Case) -> TrainBatch:
    rng = np.random.default_rng(0)
    rows = case.samples(rng)
    lengths = np.asarray([len(tokens) for tokens, *_ in rows], dtype=np.int64)
    mask = np.concatenate([mask for _, _, mask, _ in rows]).astype(np.uint8)
    ids = np.asarray([trajectory for *_, trajectory in rows], dtype=np.int64)
    return TrainBatch(
        tokens=np.concatenate([tokens for tokens, *_ in rows]).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=(-2.6 * mask).astype(np.float32),
        weight_versions=np.zeros(len(mask), dtype=np.int32),
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        prompt_lens=np.asarray([prompt_len for _, prompt_len, *_ in rows], dtype=np.int32),
        rewards=rng.random(len(rows)).astype(np.float32)[ids],
        group_ids=np.zeros(len(rows), dtype=np.int64),
        trajectory_ids=ids,
        version=0,
    )


class Side:
    """A trainer that shares prefixes or not, and its plan of one step."""

    def __init__(self, model_path: str, batch: TrainBatch, *, shares: bool) -> None:
        spec = TrainerSpec(
            model_path=model_path,
            train=TrainConfig(dtype=ComputeDtype.float32, share_prompts=shares),
            fsdp=FsdpConfig(num_threads=THREADS),
            optim=OptimConfig(lr=0.0, clip_grad=0.0, adam_beta1=0.0),
            # Rewards without normalisation: a trajectory that is alone in its group would have no gradient.
            algo=AlgoConfig(rewards_normalization=False),
            temperature=1.0,
            max_response_len=4096,
            total_steps=1000,
            device="cpu",
        )
        self.backend, self._batch, self._shares = FsdpBackend(spec, rank=0, world_size=1), batch, shares
        config = BatchConfig(
            rollout_batch_size=1,
            global_batch_size=len(np.unique(batch.trajectory_ids)),
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=MAX_TOKENS,
        )
        self.plan: list[StepPlan] = plan_steps(batch, config, num_ranks=1, shares_prefixes=shares)

    def step(self) -> tuple[float, float]:
        """Makes the step; returns its wall and CPU seconds."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.backend.train(self._batch, self.plan)
        return time.perf_counter() - wall, time.process_time() - cpu

    def gradient(self) -> Tensor:
        # With beta1 = 0 Adam's first moment is the gradient of the step.
        state, model = self.backend.policy.optimizer.state, self.backend.policy.model
        return torch.cat([state[each]["exp_avg"].flatten() for each in model.parameters()])

    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(each) for each in self._positions())

    def operations(self, model: Mapping[str, Any]) -> int:
        """Multiplications of a forward pass through all layers; those of the backward pass are in proportion."""
        hidden, width = model["hidden_size"], model["num_attention_heads"] * model["head_dim"]
        key_width = model["num_key_value_heads"] * model["head_dim"]
        matrices = hidden * (2 * width + 2 * key_width + 3 * model["intermediate_size"])
        # A row attends to its own path: as many keys as its position says, and itself. Scores and values of each.
        keys = sum(int((each + 1).sum()) for each in self._positions())
        return int(model["num_layers"] * (self.tokens() * matrices + keys * 2 * width))

    def _positions(self) -> list[Tensor]:
        """Positions of the packed rows of each micro-batch."""
        cuts = [samples for plan in self.plan for samples in plan.microbatches[0]]
        return [self.backend.rank.pack(self._batch, samples).position_ids[0] for samples in cuts]

    def activations(self) -> int:
        """Bytes that autograd keeps for the largest micro-batch."""
        model, saved = self.backend.policy.model, dict[int, int]()
        weights = {each.untyped_storage().data_ptr() for each in model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        micro = self.backend.rank.pack(self._batch, self.plan[0].microbatches[0][0])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            terms = compute_policy_terms(model, micro, temperature=1.0, entropy_grad=False)
        assert torch.isfinite(terms[0]).all()
        return sum(saved.values())


def measure(name: str, model_path: str, *, rounds: int) -> dict[str, Any]:
    batch, model = build_case(CASES[name]), MODELS[CASES[name].model]
    tree, apart = (Side(model_path, batch, shares=shares) for shares in (True, False))
    tree.step(), apart.step()  # the first step allocates
    difference = float((tree.gradient() - apart.gradient()).norm() / apart.gradient().norm())
    seconds = []
    for number in range(rounds):
        # Each is first in every other round.
        pair = {side: side.step() for side in ((tree, apart) if number % 2 else (apart, tree))}
        seconds.append((*pair[tree], *pair[apart]))
    columns = np.asarray(seconds)
    wall, cpu, other_wall, other_cpu = (statistics.median(column) for column in columns.T.tolist())
    return {
        "case": name,
        "text": CASES[name].text,
        "model": CASES[name].model,
        "samples": batch.num_samples,
        "tokens": [tree.tokens(), apart.tokens()],
        "micro_batches": [len(each.plan[0].microbatches[0]) for each in (tree, apart)],
        "wall_s": [wall, other_wall],
        "cpu_s": [cpu, other_cpu],
        "wall_ratio": statistics.median((columns[:, 2] / columns[:, 0]).tolist()),
        "cpu_ratio": statistics.median((columns[:, 3] / columns[:, 1]).tolist()),
        "activation_bytes": [tree.activations(), apart.activations()],
        "operations_ratio": apart.operations(model) / tree.operations(model),
        "gradient_difference": difference,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| samples | model | tokens, tree / apart | samples/s, tree / apart | ratio, wall | ratio, CPU "
        "| ratio of operations | activations, MB | gradient |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = " / ".join(f"{row['samples'] / seconds:.1f}" for seconds in row["wall_s"])
        tokens = " / ".join(f"{number:,}" for number in row["tokens"])
        memory = " / ".join(f"{number / 1e6:.0f}" for number in row["activation_bytes"])
        lines.append(
            f"| {row['text']} | {row['model']} | {tokens} | {rates} | {row['wall_ratio']:.2f} "
            f"| {row['cpu_ratio']:.2f} | {row['operations_ratio']:.2f} | {memory} | {row['gradient_difference']:.1e} |"
        )
    return lines


def report(rows: Sequence[Mapping[str, Any]], *, load: float, rounds: int) -> str:
    verdict = [""] if any(row["case"] in LIMITED for row in rows) else []
    for row in rows:
        if row["case"] in LIMITED:
            met = "met" if min(row["wall_ratio"], row["cpu_ratio"]) >= LIMIT else "not met"
            verdict.append(
                f"Limit: at least {LIMIT} times the samples/s with 8 branches of 1,024 tokens and 75 % in common. With "
                f"the model of {row['model']}: {row['wall_ratio']:.2f} in wall time, {row['cpu_ratio']:.2f} in CPU "
                f"time; {met}."
            )
    sizes = " or ".join(
        f"{model['num_layers']} layers of width {model['hidden_size']} ({name} parameters)"
        for name, model in MODELS.items()
    )
    lines = [
        "# Training on trees",
        "",
        f"{sentence([load])} {busy_note(load)}Qwen3 with {sizes}, float32, {THREADS} threads; one optimiser step "
        f"(forward, backward, Adam), in micro-batches of {MAX_TOKENS:,} tokens. Medians of {rounds} rounds in which "
        "both run, one after the other.",
        "",
        *table(rows),
        "",
        "Gradient: norm of the difference, relative to the norm of the gradient of separate samples. Activations: of "
        "the largest micro-batch, which may hold more samples where they are a tree. Ratio of operations: of the "
        "multiplications in layers and attention, what sharing saves at most; attention to a common prefix is not "
        "shared, and its part is larger the smaller the model is.",
        *verdict,
        "",
        "    python benchmarks/tree_training.py",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: argparse.Namespace) -> None:
    load = os.getloadavg()[0]
    torch.set_num_threads(THREADS)
    join_world(0, 1, "127.0.0.1", 0, "gloo", 60.0)
    with tempfile.TemporaryDirectory() as folder:
        models = {
            size: resolve_model(ModelConfig(build=ModelBuild.tiny_qwen3, cache_dir=folder, **figures))
            for size, figures in MODELS.items()
        }
        rows = []
        for name in arguments.cases:
            rows.append(measure(name, models[CASES[name].model], rounds=arguments.rounds))
            print(rows[-1], flush=True)
    leave_world()
    text = report(rows, load=load, rounds=arguments.rounds)
    print(text)
    if not arguments.dry:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "tree_training.md").write_text(text)
        data = {"machine": machine(), "load": load, "rounds": arguments.rounds, "rows": rows}
        (RESULTS / "tree_training.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="print the results only")
    main(parser.parse_args())
