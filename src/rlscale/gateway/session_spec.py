"""Settings of a session, as the driver sends them and as they are on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlscale.errors import EngineError
from rlscale.gateway.session_keys import ID_PATTERN
from rlscale.rollout.record_json import (
    params_from_json,
    params_to_json,
    prompt_from_json,
    prompt_to_json,
)
from rlscale.trajectory import Trajectory
from rlscale.types import Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSpec:
    """One trajectory that an agent generates, and its budgets.

    Attributes:
        id: 32 hexadecimal digits.
        params: of the run. `max_new_tokens` are the tokens that all answers together may have; `max_context_len` those
            of one conversation.
        max_turns: requests that are answered; None: no limit.
        expires_s: seconds since the epoch at which the key ends.
    """

    id: str
    trajectory_id: int
    group_index: int
    prompt: Prompt
    seed: int
    params: SamplingParams
    max_turns: int | None = None
    expires_s: float

    def new_trajectory(self) -> Trajectory:
        return Trajectory(id=self.trajectory_id, group_index=self.group_index, prompt=self.prompt, seed=self.seed)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "trajectory_id": self.trajectory_id,
            "group_index": self.group_index,
            "prompt": prompt_to_json(self.prompt),
            "seed": self.seed,
            "params": params_to_json(self.params),
            "max_turns": self.max_turns,
            "expires_s": self.expires_s,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SessionSpec:
        """The inverse of `to_json`.

        Raises:
            EngineError: a field is missing or of a wrong type.
        """
        try:
            if not ID_PATTERN.fullmatch(value["id"]):
                raise ValueError(f"id must be 32 hexadecimal digits, got {value['id']!r}")
            return cls(
                id=value["id"],
                trajectory_id=int(value["trajectory_id"]),
                group_index=int(value["group_index"]),
                prompt=prompt_from_json(value["prompt"]),
                seed=int(value["seed"]),
                params=params_from_json(value["params"]),
                max_turns=None if value["max_turns"] is None else int(value["max_turns"]),
                expires_s=float(value["expires_s"]),
            )
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise EngineError(f"a session must have all fields, got {type(error).__name__}: {error}") from error
