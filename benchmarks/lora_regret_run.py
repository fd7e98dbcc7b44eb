"""A GRPO run in one process: the trainer and the embedded engine in turn, without Ray and HTTP."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlscale.config import RunConfig, load_config
from rlscale.data.batch import build_batch
from rlscale.data.microbatch_plan import plan_steps
from rlscale.driver.prepared_run import prepare_run
from rlscale.driver.trainer_spec import build_trainer_spec
from rlscale.engines.embedded.load_decoder import eos_ids, load_codec, load_decoder
from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.embedded.scheduler_options import SchedulerOptions
from rlscale.engines.embedded.weight_store import WeightStore
from rlscale.engines.server.generate_request import Answer, GenerateRequest
from rlscale.rewards.builtin import exact_match
from rlscale.rollout.generate_session import TRAINING, group_seed
from rlscale.rollout.generated import sampling_params
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.types import Group, Prompt, Sample, SampleStatus, SamplingParams

EVAL_SEED = 0
"""Equal for all runs, so that all are measured with the same draws."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the runs of a series have in common."""

    base_lr: float = 1.5e-4
    num_rollouts: int = 100
    eval_interval: int = 20
    num_prompts: int = 32  # of a rollout
    num_samples: int = 8  # of a prompt
    num_warmup: int = 10  # steps until the rate is constant
    alpha: int = 32


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run of the series."""

    rank: int  # 0: all weights are trained
    multiple: int  # of the base rate
    seed: int  # of prompts, samples and adapters


def overrides(model: Path, point: Point, settings: Settings) -> list[str]:
    """The run as arguments of `rlscale-train`, which trains the same with Ray."""
    return [
        "experiment=quickstart",
        "model=hf",
        f"model.hf_checkpoint={model}",
        "model.warmup_experiment=null",
        "optim=constant",
        f"optim.lr={point.multiple * settings.base_lr:g}",
        f"optim.lr_warmup_iters={settings.num_warmup}",
        f"train.lora.rank={point.rank}",
        f"train.lora.alpha={settings.alpha}",
        f"train.seed={point.seed}",
        f"rollout.seed={point.seed}",
        "rollout.deterministic=false",
        f"rollout.num_slots={settings.num_prompts * settings.num_samples}",
        f"batch.rollout_batch_size={settings.num_prompts}",
        f"batch.n_samples_per_prompt={settings.num_samples}",
        f"data.num_rollout={settings.num_rollouts}",
        f"eval.interval={settings.eval_interval}",
        "eval.stop_reward=null",
        "fsdp.num_threads=1",
    ]


class LocalEngine:
    """The embedded engine in a thread of this process."""

    def __init__(self, config: RunConfig, model: Path) -> None:
        decoder, _ = load_decoder(
            str(model), _no_other_model, dtype=torch.float32, device=torch.device("cpu"), max_context_len=None
        )
        codec = load_codec(model)
        assert codec is not None, "the model has a tokenizer"
        self._decoder, self._codec = decoder, codec
        weights = WeightStore(decoder.weights, decoder.aliases, receiver=None, checksum=None, version="0")
        options = SchedulerOptions(
            num_slots=config.rollout.num_slots,
            deterministic=config.rollout.deterministic,
            num_threads=1,
            eos_ids=eos_ids(str(model), decoder.config.raw),
        )
        self._scheduler = Scheduler(decoder, weights, options)
        self._scheduler.start()

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces all weights."""

        def copy() -> None:
            for name, tensor in weights.items():
                self._decoder.weights[self._decoder.aliases.get(name, name)].copy_(tensor)
            self._scheduler.weights.num_writes += 1
            self._scheduler.forget_prefills()

        self._scheduler.call(copy).result()

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], params: SamplingParams, *, num_samples: int, version: int
    ) -> list[Group]:
        """Graded groups, one for each prompt; `seeds` are those of their first samples."""
        futures = [
            self._scheduler.submit(
                GenerateRequest(
                    rid=str(i),
                    input_ids=tuple(prompt.token_ids),
                    params=replace(params, sampling_seed=seed),
                    n=num_samples,
                    return_logprob=True,
                )
            )
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        return [
            self._group(i, prompt, future.result(), version)
            for i, (prompt, future) in enumerate(zip(prompts, futures, strict=True))
        ]

    def _group(self, index: int, prompt: Prompt, answers: Sequence[Answer], version: int) -> Group:
        group = Group(index=index, prompt=prompt, samples=[])
        for j, answer in enumerate(answers):
            sample = Sample(index=index * len(answers) + j, group_index=index, prompt=prompt, seed=0)
            versions = [version] * len(answer.output_ids)
            sample.append(answer.output_ids, logprobs=answer.logprobs, weight_versions=versions)
            is_stopped = answer.finish_reason is not None and answer.finish_reason["type"] == "stop"
            sample.status = SampleStatus.completed if is_stopped else SampleStatus.truncated
            sample.response = self._codec.decode(answer.output_ids, skip_special_tokens=True)
            sample.reward = exact_match(sample)
            group.samples.append(sample)
        return group

    def close(self) -> None:
        self._scheduler.close()


def _no_other_model(path: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    raise AssertionError(f"{path} is a folder of safetensors files")


def mean_reward(groups: Sequence[Group]) -> float:
    return fmean(reward for group in groups for reward in group.trajectory_rewards())


@contextmanager
def world_of_one() -> Iterator[None]:
    """A process group of this process alone, which computes on one core."""
    torch.set_num_threads(1)
    join_world(0, 1, "127.0.0.1", 0, "gloo", 60.0)
    try:
        yield
    finally:
        leave_world()


def train(model: Path, point: Point, settings: Settings) -> dict[str, Any]:
    """Makes one run; returns held-out and training reward by step, and its costs. Needs a process group.

    Args:
        model: folder of the weights that the run starts from.
    """
    began, cpu = time.perf_counter(), time.process_time()
    config = load_config(overrides(model, point, settings))
    prepared = prepare_run(config, str(model))
    with tempfile.TemporaryDirectory() as folder:
        backend = FsdpBackend(build_trainer_spec(prepared, run_folder=Path(folder)), rank=0, world_size=1)
        engine = LocalEngine(config, model)
        (held_out,) = prepared.eval_sets
        eval_seeds = [group_seed(EVAL_SEED, held_out.name, i) for i in range(len(held_out.prompts))]
        params, number = sampling_params(config.rollout), config.batch.rollout_batch_size
        curve, rewards, differences = [], [], []
        for step in range(settings.num_rollouts + 1):
            if step % settings.eval_interval == 0 or step == settings.num_rollouts:
                groups = engine.generate(held_out.prompts, eval_seeds, held_out.params, num_samples=1, version=step)
                curve.append([step, mean_reward(groups)])
            if step == settings.num_rollouts:
                break
            seeds = [group_seed(point.seed, TRAINING, step * number + i) for i in range(number)]
            prompts = prepared.prompts.take(number)
            groups = engine.generate(prompts, seeds, params, num_samples=settings.num_samples, version=step)
            batch = replace(build_batch(groups, version=step), rollout_id=step)
            result = backend.train(batch, plan_steps(batch, config.batch, num_ranks=1))
            engine.write(dict(backend.weights()))
            rewards.append(mean_reward(groups))
            differences.append(result.metrics["logprob_diff/mean"])
        trained = sum(each.numel() for each in backend.policy.model.parameters() if each.requires_grad)
        engine.close()
        backend.close()
    return {
        "held_out": curve,
        "rewards": rewards,
        "trained_parameters": trained,
        "logprob_diff": max(differences),
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
    }
