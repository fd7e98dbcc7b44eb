"""Forward passes over packed micro-batches, and one optimiser step.

Shape legend: R trainable tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlscale.algo.logprobs import logprobs_and_entropy, logprobs_from_logits
from rlscale.training.attention.context_attention import SpanLayout
from rlscale.training.attention.packed import PACKED_ATTENTION
from rlscale.training.batch_invariant.forward import computes_as_engine, drawn_logprobs, with_values
from rlscale.training.fsdp.model import reshard, sync_gradients
from rlscale.training.metrics import MetricSums
from rlscale.training.modules.logprob_head import Asked, LogprobHead, only_rows, output_layer
from rlscale.training.optim.optimizer import clip_gradient, names_with_bad_gradient, set_lr
from rlscale.training.optim.step_checks import StepSettings, check_gradient, check_loss
from rlscale.training.packing.microbatch import Microbatch, PaddedLayout

MicrobatchLoss = Callable[[Microbatch], Tensor]
"""Share of the step's loss, with gradient. Adds its own metrics."""


def logits_of(model: PreTrainedModel, micro: Microbatch) -> Tensor:
    """Logits of the positions that predict a trainable token, and of no others: of this rank's share. [R, V]"""
    layout = micro.packing
    if isinstance(layout, PaddedLayout):
        return _padded_logits(model, micro)
    if computes_as_engine(model):
        packing: dict[str, object] = {"packing": layout, "engine_rows": micro.engine_rows}
    elif isinstance(layout, SpanLayout) or model.config._attn_implementation == PACKED_ATTENTION:
        packing = {"packing": layout}
    else:  # flash attention takes these; eager reads the samples off position_ids
        packing = {
            "cu_seq_lens_q": layout.cu_seqlens,
            "cu_seq_lens_k": layout.cu_seqlens,
            "max_length_q": layout.max_len,
            "max_length_k": layout.max_len,
        }
    output = model(
        input_ids=micro.input_ids,
        position_ids=micro.position_ids,
        use_cache=False,
        logits_to_keep=micro.logit_rows,
        **packing,
    )
    logits: Tensor = output.logits
    return logits.squeeze(0)


def _padded_logits(model: PreTrainedModel, micro: Microbatch) -> Tensor:
    """Samples lie in rows of their own, so that any causal kernel reads them; rows of the logits are chosen late."""
    head = output_layer(model)
    assert head is not None, "a language model has an output layer"
    with only_rows(head, micro.logit_rows):
        logits: Tensor = model(input_ids=micro.input_ids, use_cache=False).logits
    return logits.squeeze(0)


def policy_terms(
    model: PreTrainedModel, micro: Microbatch, *, temperature: float, entropy_grad: bool, recompute: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprobs of the trainable tokens and the entropy at their positions. Both [R], float32.

    `recompute` keeps nothing but the logits for the backward pass (a `LogprobHead` does that without being told); the
    bits are the same. With context parallelism of all R tokens on each rank of the group, which must compute the same
    loss of them.
    """
    terms = _share_terms(model, micro, temperature=temperature, entropy_grad=entropy_grad, recompute=recompute)
    if micro.shard is None:
        return terms
    logprobs, entropy = micro.whole(torch.stack(terms, dim=-1)).unbind(dim=-1)
    return logprobs, entropy if entropy_grad else entropy.detach()


def _share_terms(
    model: PreTrainedModel, micro: Microbatch, *, temperature: float, entropy_grad: bool, recompute: bool
) -> tuple[Tensor, Tensor]:
    """`policy_terms` of this rank's share."""
    head = output_layer(model)
    if isinstance(head, LogprobHead):
        with head.asking(Asked(targets=micro.targets, temperature=temperature, entropy_grad=entropy_grad)):
            logprobs, entropy = logits_of(model, micro).unbind(dim=-1)
        return logprobs, entropy
    logits = logits_of(model, micro)
    terms = partial(logprobs_and_entropy, targets_T=micro.targets, temperature=temperature, entropy_grad=entropy_grad)
    logprobs, entropy = (
        checkpoint(terms, logits, use_reentrant=False, preserve_rng_state=False) if recompute else terms(logits)
    )
    return _drawn(model, logprobs, logits, micro=micro, temperature=temperature), entropy


def _logprobs(model: PreTrainedModel, micro: Microbatch, *, temperature: float) -> Tensor:
    if isinstance(output_layer(model), LogprobHead):
        return policy_terms(model, micro, temperature=temperature, entropy_grad=False)[0]
    logits = logits_of(model, micro)
    logprobs = logprobs_from_logits(logits, targets_T=micro.targets, temperature=temperature)
    return micro.whole(_drawn(model, logprobs, logits, micro=micro, temperature=temperature))


def _drawn(
    model: PreTrainedModel, logprobs: Tensor, logits: Tensor, *, micro: Microbatch, temperature: float
) -> Tensor:
    """The same logprobs, where the trainer computes as the engine does in the bits that the engine reports."""
    if not computes_as_engine(model):
        return logprobs
    return with_values(logprobs, drawn_logprobs(logits, targets_R=micro.targets, temperature=temperature))


@torch.no_grad()
def score(
    model: PreTrainedModel,
    micros: Sequence[Microbatch],
    *,
    num_tokens: int,
    temperature: float,
    entropies: MetricSums | None = None,
) -> Tensor:
    """Logprobs by `model` as a column of the batch, 0 where a token is not trainable or not in `micros`. [num_tokens]

    On the CPU, float32. `entropies` is given `rollout/entropy`; None: it is not computed. A collective: every rank
    passes the same number of micro-batches.
    """
    column = torch.zeros(num_tokens)
    for micro in micros:
        if entropies is None:
            lp = _logprobs(model, micro, temperature=temperature).cpu()
        else:
            lp, entropy = policy_terms(model, micro, temperature=temperature, entropy_grad=False)
            lp = lp.cpu()
            entropies.add({"rollout/entropy": micro.layout.sum_and_count(entropy)})
        trainable = micro.layout.mask_T.cpu()
        column[torch.from_numpy(micro.batch_rows)[trainable]] = lp[trainable]
    reshard(model)
    return column


def optimizer_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    *,
    micros: Sequence[Microbatch],
    loss_of: MicrobatchLoss,
    metrics: MetricSums,
    settings: StepSettings,
) -> dict[str, float]:
    """Accumulates the gradient over the micro-batches, checks and clips it, and steps.

    Args:
        model: sharded; gradients are reduced over the ranks in the last micro-batch only.
        optimizer: of its parameters.
        micros: of this rank; every rank passes the same number, at least one.
        loss_of: share of the loss of one micro-batch.
        metrics: the sums `loss_of` adds to.
        settings: number, rate and clipping.

    Returns:
        Metrics over all ranks, with `loss`, `grad_norm` and `lr`.

    Raises:
        WorkerError: loss or gradient is not finite. Raised on every rank, before any weight is changed.
    """
    assert micros, "a step needs at least one micro-batch on every rank"
    world_size = dist.get_world_size()
    for i, micro in enumerate(micros):
        sync_gradients(model, is_last=i == len(micros) - 1)
        loss = loss_of(micro)
        metrics.add_share("loss", loss / micro.num_shards)
        # FSDP averages over ranks; the shares add up, and so do the gradients by each rank's tokens.
        (loss * world_size).backward()  # type: ignore[no-untyped-call]
    result, shares_by_rank = metrics.gather(keep_empty=True)
    step, role = settings.number, settings.role
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
