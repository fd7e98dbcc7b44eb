"""Client of a server that scores given tokens: the teacher of `model.teacher_url`.

    POST /generate {input_ids, image_data, max_new_tokens: 0, return_logprob, logprob_start_len, top_logprobs_num}
      ->  meta_info.input_token_logprobs [[logprob, id, text], ...], meta_info.input_top_logprobs

Any engine of the contract answers it: `rlscale-serve` or SGLang.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlscale.engines.client.http_connection import HttpConnection
from rlscale.engines.server.server_name import SERVER_KEY, SERVER_NAME
from rlscale.errors import EngineError
from rlscale.images import Image, collapse_placeholders
from rlscale.teacher_scores import TeacherScores
from rlscale.types import EngineAddress


class TeacherClient:
    """One server. Not bound to an event loop until its first call; see `Teacher` of `rlscale.protocols`.

    Args:
        timeout_s: of each request.
        num_top: most likely tokens whose logprobs each place gets; 0: none.

    Example:
        teacher = TeacherClient(EngineAddress(name="teacher", url="http://127.0.0.1:30000"), timeout_s=600)
        scores = await teacher.score([4, 7, 5, 9], start=2)     # logprobs of 5 and 9
        await teacher.close()
    """

    def __init__(self, address: EngineAddress, *, timeout_s: float, num_top: int = 0) -> None:
        self._connection = HttpConnection(address, router=address, timeout_s=timeout_s)
        self._endpoint, self._num_top = self._connection.endpoint("/generate"), num_top
        self._holder: asyncio.Task[None] | None = None
        self._is_sglang: bool | None = None  # None: not known yet

    async def score(self, token_ids: Sequence[int], *, start: int, images: Sequence[Image] = ()) -> TeacherScores:
        """See Teacher."""
        assert 0 < start < len(token_ids), "the first token has no logprob"
        if self._holder is None or self._holder.done():
            self._holder = asyncio.get_running_loop().create_task(self._hold())
        body = {
            "input_ids": await self._wire_ids(token_ids, images),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # With repeated placeholders. The first entry has no logprob: the server does not compute the token before.
            "logprob_start_len": start - 1,
            **({"top_logprobs_num": self._num_top} if self._num_top else {}),
            **({"image_data": [image.data_url() for image in images]} if images else {}),
        }
        answer = await self._connection.call("POST", "/generate", body, may_repeat=True)
        try:
            return self._parse(answer["meta_info"], token_ids[start:])
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise EngineError(
                f"{self._endpoint} must return input logprobs as SGLang does, got {type(e).__name__}: {e}"
            ) from e

    async def _wire_ids(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """The token ids to send. SGLang takes one placeholder for each image, and repeats it."""
        if not images:
            return list(token_ids)
        if self._is_sglang is None:
            self._is_sglang = (await self._model_info()).get(SERVER_KEY) != SERVER_NAME
        try:
            return collapse_placeholders(token_ids, images) if self._is_sglang else list(token_ids)
        except ValueError as error:
            raise EngineError(f"{self._endpoint} {error}", status=400, reason=str(error)) from error

    def _parse(self, meta: Mapping[str, Any], ids: Sequence[int]) -> TeacherScores:
        entries = meta["input_token_logprobs"][1:]
        if [int(entry[1]) for entry in entries] != list(ids):
            raise ValueError(f"input_token_logprobs must be those of the {len(ids)} tokens, got {len(entries)} entries")
        logprobs = [_finite(entry[0]) for entry in entries]
        if not self._num_top:
            return TeacherScores(logprobs=np.asarray(logprobs, np.float32))
        top = meta["input_top_logprobs"][1:]
        shape = (len(ids), self._num_top)
        # Entries of a place are [logprob, id, text], the most likely first.
        values = np.asarray([[_finite(entry[0]) for entry in place] for place in top], np.float32)
        top_ids = np.asarray([[int(entry[1]) for entry in place] for place in top], np.int32)
        if values.shape != shape:
            raise ValueError(f"input_top_logprobs must have shape {shape}, got {values.shape}")
        return TeacherScores(logprobs=np.asarray(logprobs, np.float32), top_ids=top_ids, top_logprobs=values)

    async def encode(self, text: str) -> list[int]:
        """The token ids that the server's tokenizer gives a text, from the ids in the answer to a prompt of text."""
        body = {
            "text": text,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._connection.call("POST", "/generate", body, may_repeat=True)
        try:
            return [int(entry[1]) for entry in answer["meta_info"]["input_token_logprobs"]]
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise EngineError(f"{self._endpoint} must return input logprobs, got {type(e).__name__}: {e}") from e

    async def vocab_size(self) -> int | None:
        """Size of the server's vocabulary; None: the server does not report it."""
        size = (await self._model_info()).get("vocab_size")
        return size if isinstance(size, int) else None

    async def reads_images(self) -> bool | None:
        """Whether the server's model reads images; None: the server does not report it."""
        found = (await self._model_info()).get("has_image_understanding")
        return found if isinstance(found, bool) else None

    async def _model_info(self) -> Mapping[str, Any]:
        info = await self._connection.call("GET", "/model_info", may_repeat=True)
        return info if isinstance(info, Mapping) else {}

    async def _hold(self) -> None:
        # The end of the event loop cancels this task, which closes the connections.
        try:
            await asyncio.Event().wait()
        finally:
            await self._connection.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._connection.close()


def _finite(value: Any) -> float:
    """A logprob; raises ValueError for one that is missing or not finite, which is never replaced by a zero."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"logprobs must be finite, got {value}")
    return number
