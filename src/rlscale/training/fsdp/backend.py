"""FsdpBackend: one trainer rank on FSDP2.

    rollout ─> pack ─> [old logprobs] ─> [reference logprobs] ─> advantages ─┐
                                                                             ▼
               weights <─ optimiser <─ clip <─ reduce-scatter <─ loss of each micro-batch, step by step

A bracketed pass is made only where the loss needs it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rlscale.algo.corrections import logprob_difference
from rlscale.algo.ragged import TokenLayout
from rlscale.config import LossType, compares_policies, uses_reference
from rlscale.errors import ConfigError, Problem
from rlscale.training.advantages import RolloutInputs, advantages_of_rollout, kl_of_rollout
from rlscale.training.asked import AskedLogprobs
from rlscale.training.attention import PACKED_ATTENTION
from rlscale.training.distributed import data_mesh, local_ranks, pick_device, use_threads
from rlscale.training.fsdp.export import export_hf, published_weights
from rlscale.training.fsdp.model import DTYPES, copy_weights, has_shapes_of, load_sharded
from rlscale.training.fsdp.state import Position, load_state, save_state
from rlscale.training.fsdp.step import StepSettings, optimizer_step, policy_terms, score
from rlscale.training.metrics import MetricSums
from rlscale.training.objective import TokenInputs, reduction, step_denominators, token_losses
from rlscale.training.optim import make_optimizer
from rlscale.training.packing import Microbatch, pack
from rlscale.training.schedule import LrSchedule
from rlscale.training.spec import TrainerSpec
from rlscale.training.weighing import engine_weights, normalizes_weights
from rlscale.types import StepPlan, TrainBatch, TrainResult


@dataclass(kw_only=True, slots=True)
class _Rollout:
    """A rollout while it is trained on. Columns are as long as the batch's tokens and live on the CPU."""

    batch: TrainBatch
    micros: list[list[Microbatch]]  # of this rank, by step
    old: Tensor | None = None
    gen: Tensor | None = None
    ref: Tensor | None = None
    advantages: Tensor | None = None
    weight_scale: float = 1.0
    has_entropy: bool = False  # whether its metric has been added
    metrics: MetricSums
    asked: AskedLogprobs
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def flat(self) -> list[Microbatch]:
        """This rank's micro-batches of all steps."""
        return [micro for step in self.micros for micro in step]


class FsdpBackend:
    """Trains a Hugging Face model that is sharded over all ranks of the default process group.

    Invariants: every method is a collective, called on all ranks alike; for the same inputs on the same number of ranks
    the numbers are the same bit for bit; between calls no parameter is gathered.

    Example:
        join_world(rank, world_size, "127.0.0.1", port, "gloo", 600.0)
        backend = FsdpBackend(spec, rank=rank, world_size=world_size)
        result = backend.train(batch, steps)
        for name, weight in backend.weights(): ...
    """

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        assert dist.is_initialized(), "join_world comes first"
        assert (rank, world_size) == (dist.get_rank(), dist.get_world_size()), "this rank joined as another"
        local_rank, num_local_ranks = local_ranks()
        self._spec = spec
        self._device = pick_device(spec.device, local_rank=local_rank)
        if self._device.type == "cpu":
            use_threads(spec.fsdp.num_threads, num_local_ranks=num_local_ranks)
        torch.manual_seed(spec.train.seed + rank)
        mesh = data_mesh(self._device)
        self._model = load_sharded(spec.model_path, mesh=mesh, fsdp=spec.fsdp, train=spec.train, is_trained=True)
        self._reference: PreTrainedModel | None = None
        if spec.ref_path is not None and uses_reference(spec.algo):
            self._reference = load_sharded(spec.ref_path, mesh=mesh, fsdp=spec.fsdp, train=spec.train, is_trained=False)
            self._check_reference(self._reference)
        self._optimizer = make_optimizer(self._model, optim=spec.optim)
        self._schedule = LrSchedule.from_config(spec.optim, total_steps=spec.total_steps)
        self._num_steps, self._num_rollouts = 0, 0

    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        """See TrainBackend. Raises WorkerError, naming step and rank, for a loss or gradient that is not finite."""
        rollout = self._prepare(batch, steps)
        results = []
        with _timed(rollout.seconds, "optimize"):
            for i, plan in enumerate(steps):
                results.append(self._step(rollout, plan=plan, micros=rollout.micros[i], is_first=i == 0))
        self._num_rollouts += 1
        self._update_reference()
        metrics, _ = rollout.metrics.gather()
        return TrainResult(
            steps=results, metrics=metrics, seconds=rollout.seconds, logprobs=rollout.asked.gather(self._device)
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainBackend. In `train.dtype`, as engines hold them."""
        return published_weights(self._model, dtype=DTYPES[self._spec.train.dtype])

    def save(self, folder: Path) -> None:
        """See TrainBackend."""
        save_state(
            folder,
            model=self._model,
            optimizer=self._optimizer,
            reference=self._moving_reference,
            position=Position(num_steps=self._num_steps, num_rollouts=self._num_rollouts),
        )

    def load(self, folder: Path) -> None:
        """See TrainBackend. Raises DataError for a folder that is no checkpoint of this model."""
        position = load_state(folder, model=self._model, optimizer=self._optimizer, reference=self._moving_reference)
        self._num_steps, self._num_rollouts = position.num_steps, position.num_rollouts

    def export_hf(self, folder: Path) -> None:
        """See TrainBackend. In `train.dtype`."""
        dtype = DTYPES[self._spec.train.dtype]
        export_hf(self._model, folder, source=self._spec.model_path, dtype=dtype)

    def close(self) -> None:
        """Drops models and optimiser. The process group belongs to who made it."""
        del self._model, self._reference, self._optimizer

    @property
    def _moving_reference(self) -> PreTrainedModel | None:
        """The reference if it follows the policy, and so is part of a checkpoint."""
        return None if self._spec.algo.ref_update_interval is None else self._reference

    def _check_reference(self, reference: PreTrainedModel) -> None:
        interval = self._spec.algo.ref_update_interval
        if interval is None or has_shapes_of(self._model, reference):
            return
        rule = "be null with a reference model of another shape than the policy's"
        fix = "set model.ref_load to a checkpoint of the same model"
        raise ConfigError([Problem(path="algo.ref_update_interval", rule=rule, value=str(interval), fix=fix)])

    def _update_reference(self) -> None:
        interval, reference = self._spec.algo.ref_update_interval, self._moving_reference
        if interval is not None and reference is not None and self._num_rollouts % interval == 0:
            copy_weights(self._model, reference)

    def _prepare(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> _Rollout:
        """Packs this rank's micro-batches and computes the columns that the loss needs."""
        rank, spec = dist.get_rank(), self._spec
        micros = [[self._pack(batch, samples) for samples in plan.microbatches[rank]] for plan in steps]
        rollout = _Rollout(batch=batch, micros=micros, metrics=MetricSums(self._device), asked=AskedLogprobs(batch))
        if spec.algo.loss_type == LossType.sft_loss:
            return rollout
        rollout.gen = torch.tensor(batch.rollout_logprobs)
        if not compares_policies(spec.algo):
            return rollout
        self._score_old(rollout)
        if self._reference is not None:
            with _timed(rollout.seconds, "ref_logprobs"):
                rollout.ref = self._score(self._reference, rollout)
        rollout.advantages = self._advantages(rollout)
        if normalizes_weights(spec.algo):
            rollout.weight_scale = self._weight_scale(rollout)
        return rollout

    def _score(self, model: PreTrainedModel, rollout: _Rollout, *, entropies: MetricSums | None = None) -> Tensor:
        return score(
            model,
            rollout.flat,
            num_tokens=len(rollout.batch.tokens),
            temperature=self._spec.temperature,
            entropies=entropies,
        )

    def _score_old(self, rollout: _Rollout) -> None:
        """Old logprobs, where the first training pass would not give the same numbers just as early."""
        algo, several_steps = self._spec.algo, len(rollout.micros) > 1
        if algo.use_rollout_logprobs:
            rollout.old = rollout.gen
            is_needed = algo.use_rollout_entropy and several_steps
        else:
            before_loss = algo.kl_coef > 0 or normalizes_weights(algo)
            is_needed = several_steps or before_loss or not self._spec.train.reuse_logprobs
        if not is_needed:
            return
        with _timed(rollout.seconds, "old_logprobs"):
            old = self._score(self._model, rollout, entropies=rollout.metrics if algo.use_rollout_entropy else None)
        rollout.has_entropy = algo.use_rollout_entropy
        if algo.use_rollout_logprobs:
            return
        rollout.old = old
        for micro in rollout.flat:
            lp = _pick(rollout.old, micro)
            self._compare(rollout, micro, trainer=lp)
            rollout.asked.add(micro, lp)

    def _pack(self, batch: TrainBatch, samples: Sequence[int]) -> Microbatch:
        shares = self._spec.train.share_prompts and self._model.config._attn_implementation == PACKED_ATTENTION
        return pack(batch, samples, device=self._device, share_prompts=shares)

    def _advantages(self, rollout: _Rollout) -> Tensor:
        """Of every trainable token of the whole rollout, on every rank: rewards are few. [T]"""
        algo, batch = self._spec.algo, rollout.batch
        trainable = np.flatnonzero(batch.loss_mask)
        rows = torch.from_numpy(trainable)
        samples = np.searchsorted(batch.offsets, trainable, side="right") - 1
        assert rollout.gen is not None
        if algo.kl_coef or algo.custom_advantage_function_path is not None:
            # Each rank scored its own samples; here it needs those of the others.
            rollout.old, rollout.ref = self._everywhere(rollout.old, rollout), self._everywhere(rollout.ref, rollout)
        inputs = RolloutInputs(
            rewards_S=torch.tensor(batch.rewards),
            group_ids_S=torch.tensor(batch.group_ids),
            response_lens_S=torch.from_numpy(batch.lengths - batch.prompt_lens),
            max_response_len=self._spec.max_response_len,
            layout=TokenLayout(
                mask_T=torch.ones(len(trainable), dtype=torch.bool),
                sample_ids_T=torch.from_numpy(samples.astype(np.int64)),
                num_samples=batch.num_samples,
            ),
            gen_T=rollout.gen[rows],
            old_T=None if rollout.old is None else rollout.old[rows],
            ref_T=None if rollout.ref is None else rollout.ref[rows],
        )
        kl_T = kl_of_rollout(algo, inputs)
        if kl_T is not None:  # the same on every rank, so their mean is the mean
            rollout.metrics.add({"rollout/kl": inputs.layout.sum_and_count(kl_T)})
        column = torch.zeros(len(batch.tokens))
        column[rows] = advantages_of_rollout(algo, inputs)
        return column

    def _everywhere(self, column: Tensor | None, rollout: _Rollout) -> Tensor | None:
        """A column with the values of all ranks; a collective. Every sample is on one rank, the others have zeros."""
        if column is None or column is rollout.gen:
            return column
        column = column.to(self._device)
        dist.all_reduce(column)
        return column.cpu()

    def _weight_scale(self, rollout: _Rollout) -> float:
        """What makes the mean weight of the rollout 1, over all ranks; a collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro in rollout.flat:
            old, gen = _pick(rollout.old, micro), _pick(rollout.gen, micro)
            assert old is not None and gen is not None
            _, parts = engine_weights(self._spec.algo, old=old, gen=gen, layout=micro.layout)
            sums += torch.stack(parts["mis_weight"]).double()
        dist.all_reduce(sums)
        total, count = sums.tolist()
        return count / total if total > 0 else 1.0

    def _step(
        self, rollout: _Rollout, *, plan: StepPlan, micros: Sequence[Microbatch], is_first: bool
    ) -> dict[str, float]:
        denominators_S = _denominators(rollout.batch, plan).to(self._device)
        metrics = MetricSums(self._device)
        # Without a pass for old logprobs, those of the policy count as long as no weight has changed.
        unchanged = is_first and (rollout.old is None or rollout.old is rollout.gen)
        compare = unchanged and rollout.gen is not None
        is_asked = self._spec.algo.use_rollout_entropy and rollout.advantages is not None
        measures_entropy = is_asked and is_first and not rollout.has_entropy

        def loss_of(micro: Microbatch) -> Tensor:
            algo = self._spec.algo
            lp, entropy = policy_terms(
                self._model, micro, temperature=self._spec.temperature, entropy_grad=algo.entropy_coef != 0
            )
            inputs = TokenInputs(
                old=_pick(rollout.old, micro),
                gen=_pick(rollout.gen, micro),
                ref=_pick(rollout.ref, micro),
                advantages=_pick(rollout.advantages, micro),
                weight_scale=rollout.weight_scale,
            )
            losses, sums = token_losses(algo, lp=lp, entropy=entropy, inputs=inputs, layout=micro.layout)
            metrics.add(sums)
            if compare:
                self._compare(rollout, micro, trainer=lp)
            if unchanged:
                rollout.asked.add(micro, lp)
            if measures_entropy:
                rollout.metrics.add({"rollout/entropy": micro.layout.sum_and_count(entropy)})
            samples = torch.from_numpy(micro.sample_indices).to(self._device)
            reduce = reduction(
                algo,
                plan=plan,
                layout=micro.layout,
                denominators_S=denominators_S[samples],
                max_response_len=self._spec.max_response_len,
            )
            return reduce(losses)

        settings = StepSettings(
            number=self._num_steps,
            lr=self._schedule.at(self._num_steps),
            max_grad_norm=self._spec.optim.clip_grad,
        )
        result = optimizer_step(
            self._model, self._optimizer, micros=micros, loss_of=loss_of, metrics=metrics, settings=settings
        )
        self._num_steps += 1
        return result

    def _compare(self, rollout: _Rollout, micro: Microbatch, *, trainer: Tensor | None) -> None:
        """Adds the difference of trainer and engine logprobs: tokens of the current weights, and stale ones apart."""
        gen = _pick(rollout.gen, micro)
        assert trainer is not None and gen is not None
        versions = torch.from_numpy(rollout.batch.weight_versions[micro.batch_rows]).to(self._device)
        is_current = micro.layout.mask_T & (versions == rollout.batch.version)
        current = logprob_difference(trainer, gen_T=gen, mask_T=is_current)
        rollout.metrics.add(current.sums, prefix="logprob_diff/")
        rollout.metrics.add_max("logprob_diff/max", current.max_abs)
        stale = logprob_difference(trainer, gen_T=gen, mask_T=micro.layout.mask_T & ~is_current)
        rollout.metrics.add(stale.sums, prefix="logprob_diff/stale_")


def _pick(column: Tensor | None, micro: Microbatch) -> Tensor | None:
    """The entries of a column that belong to a micro-batch, on its device. [R]"""
    if column is None:
        return None
    return column[torch.from_numpy(micro.batch_rows)].to(micro.targets.device)


def _denominators(batch: TrainBatch, plan: StepPlan) -> Tensor:
    """Of every sample of the batch. [S]"""
    samples = np.searchsorted(batch.offsets, np.flatnonzero(batch.loss_mask), side="right") - 1
    counts_S = torch.from_numpy(np.bincount(samples, minlength=batch.num_samples).astype(np.int64))
    return step_denominators(
        counts_S=counts_S,
        execution_ids_S=torch.tensor(batch.execution_ids),
        in_step_S=torch.tensor(sorted(plan.sample_indices), dtype=torch.int64),
    )


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
