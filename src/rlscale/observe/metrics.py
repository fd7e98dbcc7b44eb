"""Names of metrics, durations by phase, and several sinks as one.

One flat record per rollout; `METRICS` says what each name means. Names with `<...>` stand for a family.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlscale.protocols import Metrics, MetricSink

PHASES = ("rollout", "train", "sync", "eval", "save")
"""The parts of a step, in the order they happen; `time/<phase>_s` is the duration of each."""

METRICS: dict[str, str] = {
    "reward/mean": "mean reward of the rollout's samples",
    "reward/std": "standard deviation of the rewards",
    "reward/min": "lowest reward",
    "reward/max": "highest reward",
    "reward/flat_groups": "share of groups whose samples all have the same reward, so that they teach nothing",
    "reward/<name>/mean": "mean of one number of a reward that gives several by name (reward.key)",
    "response_len/mean": "mean response length, tokens",
    "response_len/max": "longest response, tokens",
    "truncated/ratio": "share of samples cut off at rollout.max_response_len",
    "train/loss": "loss, mean over the optimiser steps of the rollout",
    "train/grad_norm": "norm of the gradient before clipping",
    "train/lr": "learning rate of the last optimiser step",
    "train/pg_clipfrac": "share of trainable tokens at which the clip of the policy loss is active",
    "train/pg_clipfrac_dual": "share of trainable tokens at which algo.eps_clip_c bounds the loss",
    "train/ratio_mean": "mean probability ratio of new and old policy",
    "train/kl": "approximate KL divergence of the new from the old policy",
    "train/kl_loss": "KL divergence from the reference model, when algo.use_kl_loss is on",
    "rollout/kl": "KL divergence of the policy before training from the reference model, when algo.kl_coef is above 0",
    "rollout/entropy": "mean entropy of the policy before training, nats, when algo.use_rollout_entropy is on",
    "rollout/padding": "share of the tokens in micro-batches that are padding, with train.qkv_format=bshd",
    "train/entropy": "mean entropy of the policy at trainable tokens, nats",
    "train/tis_mean": "mean weight of truncated importance sampling, when algo.use_tis is on",
    "train/tis_clipfrac": "share of trainable tokens whose weight was cut to algo.tis_clip or algo.tis_clip_low",
    "train/decoupled_mean": "mean weight of the decoupled loss before its bound, when algo.decoupled_loss is on",
    "train/decoupled_clipfrac": "share of trainable tokens whose weight was cut to algo.decoupled_weight_max",
    "train/mis_ratio": "mean ratio of trainer and engine by algo.mis.level, when algo.tis_type is mis or icepop",
    "train/mis_weight": "mean weight after its bounds, before rejection",
    "train/mis_clipfrac": "share of trainable tokens whose weight was bounded or masked",
    "train/mis_rejectfrac": "share of trainable tokens dropped by algo.mis.reject_level",
    "train/mis_vetofrac": "share of trainable tokens in responses dropped by algo.mis.veto",
    "train/routes/replayed": "share of tokens, by layer, whose experts were chosen before, with routing replay",
    "train/routes/differing": "share of those that the trainer's router would have sent to other experts",
    "train/opsm_maskfrac": "share of trainable tokens dropped by algo.opsm_delta",
    "logprob_diff/mean": "mean |trainer - engine| logprob under the current weights",
    "logprob_diff/max": "largest |trainer - engine| logprob",
    "logprob_diff/k1": "KL divergence of engine and trainer, estimator k1",
    "logprob_diff/k3": "KL divergence of engine and trainer, estimator k3",
    "logprob_diff/stale_mean": "mean |trainer - engine| logprob of tokens that older weights generated",
    "time/step_s": "seconds of the whole step",
    "time/rollout_s": "seconds of generation and rewards; of them those the trainer waited (rollout.max_staleness > 0)",
    "time/train_s": "seconds of logprobs, loss and optimiser steps",
    "time/sync_s": "seconds until the new weights were on the engines and verified",
    "time/eval_s": "seconds of evaluation",
    "time/save_s": "seconds of writing a checkpoint",
    "time/trainer_wait_s": "seconds the trainer waited for a rollout (rollout.max_staleness > 0)",
    "time/generation_s": "seconds from the first request of the rollout to its last reward (likewise)",
    "time/rollout_wait_s": "seconds the next rollout waited for the staleness bound or a place in the queue (likewise)",
    "time/eval_wait_s": "seconds the next update waited for an evaluation (likewise)",
    "time/drain_s": "seconds the update waited for running requests, with rollout.update_mode=boundary",
    "time/train_<part>_s": "seconds of a part of training",
    "throughput/tokens_per_s": "response tokens per second of the whole step",
    "throughput/samples_per_s": "samples per second of the whole step",
    "staleness/mean": "mean age of trainable tokens, in weight updates",
    "staleness/max": "age of the oldest trainable token, at most rollout.max_staleness",
    "staleness/dropped_groups": "groups generated again because they were aborted or too old",
    "queue/length": "finished rollouts that waited when the trainer asked for one",
    "weights/version": "weight updates that the engines have received",
    "eval/reward_mean": "mean reward over all evaluation sets",
    "eval/<set>/reward_mean": "mean reward of one evaluation set",
    "eval/<set>/reward/<name>/mean": "mean of one number of a reward that gives several, on one evaluation set",
    "eval/<set>/response_len_mean": "mean response length on one evaluation set, tokens",
    "eval/<set>/num_prompts": "prompts of one evaluation set",
    "eval/<set>/pass@<k>": "chance that one of k samples has reward 1, k = 2, 4, ... up to eval.n_samples_per_prompt",
    "passrate/pass@<k>": "the same on the rollout's groups, from k = 1 on, when logging.log_passrate is on",
    "multi_turn/turns_<mean/max>": "turns of the policy in a sample, when logging.log_multi_turn is on",
    "multi_turn/policy_tokens_<mean/max>": "response tokens of the policy, when logging.log_multi_turn is on",
    "multi_turn/environment_tokens_<mean/max>": "response tokens of its environment, when logging.log_multi_turn is on",
    "reward_category/<value>": "share of samples with this value under logging.log_reward_category",
}


class Timers:
    """Seconds by phase, added up until `reset`. Phases may be nested; each counts its whole span.

    Example:
        timers = Timers()
        with timers("rollout"):
            ...
        timers.seconds  # {"rollout": 1.2}
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Counts a duration that was measured elsewhere."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def reset(self) -> None:
        """Starts anew; a dictionary that was handed out keeps its numbers."""
        self.seconds = {}


class CombinedSink:
    """Several sinks as one. Every sink is closed even if closing an earlier one fails; the first failure is raised."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, metrics: Metrics, *, step: int) -> None:
        for sink in self._sinks:
            sink.log(metrics, step=step)

    def rewind(self, step: int) -> None:
        for sink in self._sinks:
            sink.rewind(step)

    def close(self) -> None:
        errors: list[Exception] = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
