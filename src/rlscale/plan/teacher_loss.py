"""Memory of a divergence over tokens from a teacher (`algo.opd_kl`), in addition to that of the logprobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlscale.architectures.architecture import Architecture
from rlscale.config import RunConfig, TrainBackendName
from rlscale.config.groups.algo import OpdKl, has_teacher_loss
from rlscale.plan.activations import FLOAT32, MicrobatchSpec, chunk_elements, default_chunk, is_chunked
from rlscale.plan.fsdp_memory import TrainerMemory

INT64 = 8
TABLE, LOGITS = "teacher's output layer", "teacher's logits"


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherLossMemory:
    """Bytes of one rank."""

    table: float  # copy of the teacher's output layer, while a rollout is trained on
    forward: float  # next to the logits
    backward: float  # next to their gradient

    def added_to(self, memory: TrainerMemory) -> TrainerMemory:
        """The memory of a trainer rank with that of the divergence."""
        logits = {"logits": self.forward, "gradient of logits": self.backward}
        phases: dict[str, Mapping[str, float]] = {}
        for name, parts in memory.phases.items():
            added = {TABLE: self.table, LOGITS: logits.get(name, 0.0)}
            phases[name] = {**parts, **{part: size for part, size in added.items() if size}}
        return replace(memory, phases=phases)


def teacher_loss_memory(
    config: RunConfig, models: Mapping[str, Architecture], micro: MicrobatchSpec
) -> TeacherLossMemory | None:
    """The memory of the divergence; None: the loss has none.

    Args:
        config: resolved.
        models: architectures by role; without `teacher` it is behind a URL.
        micro: the largest micro-batch of a rank.
    """
    if not has_teacher_loss(config.algo):
        return None
    a, teacher = models["policy"], models.get("teacher")
    is_full, rows = config.algo.opd_kl == OpdKl.full, micro.logit_rows
    if config.train.backend == TrainBackendName.megatron:  # its output layer works in chunks whatever the family
        ranks = config.megatron.tensor_model_parallel_size
        a = replace(a, vocab_size=-(-a.vocab_size // ranks), model_type=None)
        micro = micro if micro.chunk_tokens > 0 else replace(micro, chunk_tokens=default_chunk(a, micro))
    table = 0.0 if teacher is None or not is_full else float(micro.dtype_bytes * a.vocab_size * teacher.hidden_size)
    if not is_chunked(a, micro):
        # Logits, logprobs, the terms of the divergence, and the same of a teacher that has the whole vocabulary.
        whole = FLOAT32 * rows * a.vocab_size * (6 if is_full else 4)
        return TeacherLossMemory(table=table, forward=whole, backward=whole)
    # Next to a tile of the policy: logits of the teacher, their exponentials and the difference; backward, the
    # gradient of the divergence and one factor of it. Of the most likely tokens ids, logprobs and slopes are kept.
    tile = chunk_elements(a, micro) * FLOAT32
    given = rows * min(config.algo.opd_top_k, a.vocab_size) * (INT64 + 5 * FLOAT32)
    if is_full:
        given = 0 if teacher is not None else rows * models["policy"].vocab_size * (INT64 + 2 * FLOAT32)
    return TeacherLossMemory(table=table, forward=given + (3 * tile if is_full else 0), backward=given + 2 * tile)
