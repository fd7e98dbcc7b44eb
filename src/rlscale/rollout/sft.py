"""Source of rollouts for supervised fine-tuning: labels as responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlscale.data.prompts import sft_answers
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.protocols import PromptSource
from rlscale.rollout.draw_prompts import draw_prompts
from rlscale.rollout.fixed_rollouts import FixedRollouts
from rlscale.types import Group, Prompt, Sample, SampleStatus, WeightVersion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SftSource(FixedRollouts):
    """Groups of one sample, whose response is the prompt's label and the end token; all of it is trainable.

    The response of a whole conversation is everything after the prompt; only its answers are trainable. Each label or
    turn is tokenised separately, as an engine that generates these tokens would leave it. The rollout logprobs are 0;
    there is no reward.
    """

    has_rewards = False

    def __init__(
        self,
        prompts: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        rollout_batch_size: int,
        positions: int | None = None,
        draw_timeout_s: float = 600.0,
    ) -> None:
        """Args:
            prompts: with labels or turns.
            tokenizer: of the model.
            rollout_batch_size: prompts of a rollout.
            positions: of the model, in tokens; None: no limit.
            draw_timeout_s: deadline of `prompts`, where they come from a class of the user.

        Raises:
            ConfigError: the tokenizer has no end token, so that the model could never learn to stop.
        """
        if tokenizer.eos_token_id is None:
            fix = "set eos_token in its tokenizer_config.json"
            raise ConfigError(
                [Problem(path="model.hf_checkpoint", rule="have an end-of-sequence token", value="none", fix=fix)]
            )
        self._prompts, self._tokenizer = prompts, tokenizer
        self._num_prompts, self._positions, self._draw_timeout_s = rollout_batch_size, positions, draw_timeout_s

    def next_prompts(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        """The next `rollout_batch_size` prompts with the indices of their groups."""
        first = rollout_id * self._num_prompts
        return list(enumerate(self._prompts.take(self._num_prompts), start=first))

    async def draw(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        """See RolloutSource."""
        return await draw_prompts(self, self._prompts, rollout_id, number, timeout_s=self._draw_timeout_s)

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])

    async def group(
        self,
        index: int,
        prompt: Prompt,
        *,
        oldest: WeightVersion,
        newest: WeightVersion | None,
        before: Group | None = None,
    ) -> Group:
        """The prompt with its label, which counts as made by the weights `oldest`.

        Raises:
            DataError: the prompt has no label, or both together are longer than the model allows; the message names
                its row.
        """
        group = labelled_group(index, prompt, self._tokenizer, version=oldest)
        length = group.samples[0].num_tokens
        if self._positions is not None and length > self._positions:
            raise DataError(
                f"prompt row {prompt.index + 1} must have at most {self._positions} tokens with its answer, the "
                f"positions of the model, got {length}; remove the row"
            )
        return group


def labelled_group(index: int, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, version: WeightVersion) -> Group:
    """One group of one sample, whose response is the label and the end token, or the turns, as if `version` made it.

    Raises:
        DataError: the prompt has neither; the message names its row.
    """
    turns = sft_answers(prompt)
    if not turns:
        raise DataError(
            f"prompt row {prompt.index + 1} must have a label for algo.loss_type=sft_loss, got none; set data.label_key"
        )
    assert tokenizer.eos_token_id is not None, "checked for the training data"
    sample = Sample(index=index, group_index=index, prompt=prompt, seed=index)
    for turn in turns:
        token_ids: list[int] = tokenizer.encode(turn.text, add_special_tokens=False)
        # The chat template has already put the end token into the turns of a conversation.
        if turn is turns[-1] and not prompt.turns:
            token_ids = [*token_ids, int(tokenizer.eos_token_id)]
        zeros, versions = [0.0] * len(token_ids), [version] * len(token_ids)
        sample.append(token_ids, logprobs=zeros, weight_versions=versions, trainable=turn.is_learned)
    sample.response, sample.status = "".join(turn.text for turn in turns), SampleStatus.completed
    return Group(index=index, prompt=prompt, samples=[sample])
