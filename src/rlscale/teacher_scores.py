"""Logprobs that the teacher of distillation gives to the tokens of samples.

Shape legend: T tokens of a sample's response or of a batch, K most likely tokens of the teacher.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherScores:
    """Logprobs by a teacher at temperature 1. Values at tokens that are not trainable are undefined.

    Example:
        TeacherScores(logprobs=np.array([-0.1, -2.3], np.float32))
    """

    logprobs: npt.NDArray[np.float32]  # [T] of the tokens themselves
    # [T, K] of the teacher's most likely tokens at each place; None: not requested
    top_ids: npt.NDArray[np.int32] | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None

    def __eq__(self, other: object) -> bool:
        """Equal values of all columns."""
        if not isinstance(other, TeacherScores):
            return NotImplemented
        pairs = zip(self.columns().items(), other.columns().items(), strict=False)
        same = all(a == b and np.array_equal(x, y) for (a, x), (b, y) in pairs)
        return same and self.columns().keys() == other.columns().keys()

    def columns(self) -> dict[str, npt.NDArray[np.float32] | npt.NDArray[np.int32]]:
        """The columns that exist, by name."""
        found = {"logprobs": self.logprobs, "top_ids": self.top_ids, "top_logprobs": self.top_logprobs}
        return {name: column for name, column in found.items() if column is not None}
