"""Forward passes over packed micro-batches, and the parts of an optimiser step.

Shape legend: T tokens of the batch, R trainable tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlscale.algo.linear_distillation import TeacherRequest
from rlscale.algo.logprobs import logprobs_and_entropy, logprobs_from_logits
from rlscale.algo.ragged import at_least_float32
from rlscale.architectures.family import find_family
from rlscale.training.attention.context_attention import SpanLayout
from rlscale.training.attention.packed import PACKED_ATTENTION
from rlscale.training.batch_invariant.forward import computes_as_engine, engine_logprobs, with_values
from rlscale.training.fsdp.model import reshard, sync_gradients
from rlscale.training.metrics import MetricSums
from rlscale.training.modules.expert_routing import RoutingReplay
from rlscale.training.modules.logprob_head import LogprobHead, LogprobRequest, output_layer, select_rows
from rlscale.training.optim.optimizer import clip_gradient, names_with_bad_gradient, set_lr
from rlscale.training.optim.step_checks import StepSettings, check_gradient, check_loss
from rlscale.training.packing.microbatch import Microbatch, PaddedLayout
from rlscale.training.rollout_state import PackedRollout, write_microbatch


def compute_logits(model: PreTrainedModel, micro: Microbatch) -> Tensor:
    """Logits of the positions that predict a trainable token, of this rank's share of them. [R, V]"""
    layout = micro.packing
    if isinstance(layout, PaddedLayout):
        return _padded_logits(model, micro)
    if computes_as_engine(model):
        packing: dict[str, object] = {"packing": layout, "engine_rows": micro.engine_rows}
    elif isinstance(layout, SpanLayout) or model.config._attn_implementation == PACKED_ATTENTION:
        packing = {"packing": layout}
    else:  # flash attention reads these; eager attention infers the samples from position_ids
        packing = {
            "cu_seq_lens_q": layout.cu_seqlens,
            "cu_seq_lens_k": layout.cu_seqlens,
            "max_length_q": layout.max_len,
            "max_length_k": layout.max_len,
        }
    positions = micro.position_ids
    if find_family(model.config.model_type).vision:
        packing["images"] = micro.images
    elif positions.dim() > 2:  # packed for a policy with images; the first row are the positions of the text
        positions = positions[0]
    output = model(
        input_ids=micro.input_ids,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=micro.logit_rows,
        **packing,
    )
    logits: Tensor = output.logits
    return logits.squeeze(0)


def _padded_logits(model: PreTrainedModel, micro: Microbatch) -> Tensor:
    """Logits where each sample has its own row, for any causal kernel. `logits_to_keep` cannot select per row."""
    head = output_layer(model)
    assert head is not None, "a language model has an output layer"
    with select_rows(head, micro.logit_rows):
        logits: Tensor = model(input_ids=micro.input_ids, use_cache=False).logits
    return logits.squeeze(0)


class PolicyTerms(NamedTuple):
    """Columns that the loss of the policy reads instead of logits, float32. [R] each"""

    logprobs: Tensor
    entropy: Tensor
    teacher_kl: Tensor | None = None  # None: it is not computed in tiles


def computes_in_tiles(model: PreTrainedModel) -> bool:
    """Whether the output layer can return the columns of `PolicyTerms` instead of logits."""
    return isinstance(output_layer(model), LogprobHead)


def compute_policy_terms(
    model: PreTrainedModel,
    micro: Microbatch,
    *,
    temperature: float,
    entropy_grad: bool,
    recompute: bool = False,
    teacher: TeacherRequest | None = None,
) -> PolicyTerms:
    """Logprobs of the trainable tokens and the entropy at their positions, and where the model `computes_in_tiles` the
    divergence from `teacher`, which has the entries of this rank.

    `recompute` keeps only the logits for the backward pass (a `LogprobHead` always does); the result is bitwise equal.
    With context parallelism this is a collective of the context group: every rank gets all R tokens and must compute
    the same loss from them.
    """
    columns = _share_terms(
        model, micro, temperature=temperature, entropy_grad=entropy_grad, recompute=recompute, teacher=teacher
    )
    if not micro.is_whole:
        # All columns in one collective.
        columns = micro.gather_shards(torch.stack(columns, dim=-1)).unbind(dim=-1)
    logprobs, entropy, *others = columns
    return PolicyTerms(logprobs, entropy if entropy_grad else entropy.detach(), *others)


def _share_terms(
    model: PreTrainedModel,
    micro: Microbatch,
    *,
    temperature: float,
    entropy_grad: bool,
    recompute: bool,
    teacher: TeacherRequest | None,
) -> tuple[Tensor, ...]:
    """The columns of `compute_policy_terms` for this rank's share."""
    head = output_layer(model)
    if isinstance(head, LogprobHead):
        request = LogprobRequest(
            targets=micro.targets, temperature=temperature, entropy_grad=entropy_grad, teacher=teacher
        )
        with head.requesting(request):
            return compute_logits(model, micro).unbind(dim=-1)
    assert teacher is None, "the divergence is computed from the logits"
    logits = compute_logits(model, micro)
    terms = partial(logprobs_and_entropy, targets_T=micro.targets, temperature=temperature, entropy_grad=entropy_grad)
    logprobs, entropy = (
        checkpoint(terms, logits, use_reentrant=False, preserve_rng_state=False) if recompute else terms(logits)
    )
    return _with_engine_values(model, logprobs, logits, micro=micro, temperature=temperature), entropy


def compute_loss_terms(
    model: PreTrainedModel, micro: Microbatch, *, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs [R] and entropy [R] as `compute_policy_terms`, and the logits / temperature [R, V], float32.

    For a loss that reads logits: a `LogprobHead` returns plain logits here, so R x V numbers and their gradient exist.
    """
    logits = at_least_float32(compute_logits(model, micro)) / temperature
    logprobs, entropy = logprobs_and_entropy(logits, targets_T=micro.targets, entropy_grad=entropy_grad)
    if computes_as_engine(model):
        logprobs = with_values(
            logprobs, engine_logprobs(logits * temperature, targets_R=micro.targets, temperature=temperature)
        )
    if micro.is_whole:
        return logprobs, entropy, logits
    columns = micro.gather_shards(torch.cat([logprobs[:, None], entropy[:, None], logits], dim=-1))
    entropy = columns[:, 1]
    return columns[:, 0], entropy if entropy_grad else entropy.detach(), columns[:, 2:]


def _logprobs(model: PreTrainedModel, micro: Microbatch, *, temperature: float) -> Tensor:
    if isinstance(output_layer(model), LogprobHead):
        return compute_policy_terms(model, micro, temperature=temperature, entropy_grad=False).logprobs
    logits = compute_logits(model, micro)
    logprobs = logprobs_from_logits(logits, targets_T=micro.targets, temperature=temperature)
    return micro.gather_shards(_with_engine_values(model, logprobs, logits, micro=micro, temperature=temperature))


def _with_engine_values(
    model: PreTrainedModel, logprobs: Tensor, logits: Tensor, *, micro: Microbatch, temperature: float
) -> Tensor:
    """Logprobs with the exact bits that the engine reports, where the model computes as the engine."""
    if not computes_as_engine(model):
        return logprobs
    return with_values(logprobs, engine_logprobs(logits, targets_R=micro.targets, temperature=temperature))


@torch.no_grad()
def score_logprobs(
    model: PreTrainedModel,
    rollout: PackedRollout,
    *,
    temperature: float,
    entropies: MetricSums | None = None,
    replay: RoutingReplay | None = None,
) -> Tensor:
    """Logprobs by `model` as a column of the batch, 0 where a token is not trainable or on another rank. [T]

    On the CPU, float32. `entropies` gets `rollout/entropy`; None: the entropy is not computed. `replay` learns the
    tokens of each micro-batch. A collective of all ranks, which have the same number of micro-batches.
    """
    column = torch.zeros(rollout.num_tokens)
    # No early exit: each forward pass gathers parameters, so all ranks must run the same number.
    for micro in rollout.scoring_micros:
        if replay is not None:
            replay.select(micro.token_rows)
        if entropies is None:
            logprobs = _logprobs(model, micro, temperature=temperature)
        else:
            logprobs, entropy, _ = compute_policy_terms(model, micro, temperature=temperature, entropy_grad=False)
            entropies.add({"rollout/entropy": micro.layout.sum_and_count(entropy)})
        write_microbatch(column, micro, logprobs.cpu())
    reshard(model)
    return column


def iterate_micros(
    model: PreTrainedModel, micros: Sequence[Microbatch], *, replay: RoutingReplay | None = None
) -> Iterator[Microbatch]:
    """Yields the micro-batches of a step. Only the last backward pass reduces the gradients over the ranks.

    The caller finishes the backward pass of one before it takes the next: `replay` has the tokens of one micro-batch.
    """
    assert micros, "a step needs at least one micro-batch on every rank"
    for i, micro in enumerate(micros):
        sync_gradients(model, is_last=i == len(micros) - 1)
        if replay is not None:
            replay.select(micro.token_rows)
        yield micro


def backward(loss: Tensor, micro: Microbatch, *, metrics: MetricSums) -> None:
    """Adds the gradient of a micro-batch's share of the loss; a collective of all ranks in the last micro-batch."""
    # Context-parallel ranks compute the same share: each counts its part of it.
    metrics.add_share("loss", loss / micro.num_shards)
    # FSDP averages gradients over all ranks. Shares add up instead, so the average is scaled back to a sum.
    (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]


def optim_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, *, metrics: MetricSums, settings: StepSettings
) -> dict[str, float]:
    """Checks loss and gradient, clips the gradient and makes the optimiser step; a collective of all ranks.

    Args:
        model: sharded, with the gradient of the step.
        optimizer: of its parameters.
        metrics: sums of the step.
        settings: number, rate and clipping.

    Returns:
        Metrics over all ranks, with `loss`, `grad_norm` and `lr`.

    Raises:
        WorkerError: loss or gradient is not finite. Raised on every rank, before any weight is changed.
    """
    result, shares_by_rank = metrics.gather(keep_empty=True)
    step, role = settings.number, settings.role
    # Each rank has the shares of all ranks, so that every rank names the same one.
    check_loss(shares_by_rank["loss"], step=step, role=role)
    result["grad_norm"] = clip_gradient(list(model.parameters()), max_norm=settings.max_grad_norm)
    check_gradient(
        result["grad_norm"],
        step=step,
        bad_names=lambda: names_with_bad_gradient(model.named_parameters()),
        role=role,
    )
    set_lr(optimizer, lr=settings.lr)
    optimizer.step()
    optimizer.zero_grad()
    return result | {"lr": settings.lr}
