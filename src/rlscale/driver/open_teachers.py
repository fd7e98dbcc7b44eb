"""Teachers behind URLs: their clients, and the checks of their servers before a run starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rlscale.config import RunConfig
from rlscale.config.addresses import proxy_for, public_url
from rlscale.config.groups.algo import OpdKl
from rlscale.config.rules import asks_teachers
from rlscale.engines.client.teacher_client import TeacherClient
from rlscale.errors import EngineError, Problem
from rlscale.rollout.teacher_grading import TeacherChoice, TeacherGrading
from rlscale.types import EngineAddress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEACHER_KEY_VARIABLE = "RLSCALE_TEACHER_API_KEY"
"""Environment variable with the key of the servers, which is in no config or log."""

CHECK_TIMEOUT_S = 60.0
NUM_PROBES, PROBE_TOKENS = 16, 12


def build_teachers(config: RunConfig, *, vocab_size: int) -> TeacherGrading | None:
    """The teachers that samples are sent to; None: the run has none behind a URL.

    Args:
        vocab_size: of the policy, which is the number of logprobs at each token with `algo.opd_kl=full`.
    """
    if not asks_teachers(config):
        return None
    timeout_s = config.rollout.timeout_s
    num_top = {OpdKl.sampled: 0, OpdKl.top_k: config.algo.opd_top_k, OpdKl.full: vocab_size}[config.algo.opd_kl]
    clients = {
        key: _open_client(key, url, config, timeout_s=timeout_s, num_top=num_top) for key, url in _urls(config).items()
    }
    sources = {name: clients[f"data.teacher_by_source.{name}"] for name in config.data.teacher_by_source}
    choice = TeacherChoice(
        default=clients.get("model.teacher_url"), by_source=sources, source_key=config.data.source_key
    )
    return TeacherGrading(choice, max_retries=config.sampling.max_retries)


def find_unusable_servers(config: RunConfig) -> list[Problem]:
    """Problems of servers that do not answer, or read no images in a run that has some."""
    return asyncio.run(_find_unusable(config))


def find_other_tokenizers(config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> list[Problem]:
    """Problems of teachers whose tokenizer gives other token ids than the policy's: their logprobs mean nothing.

    Args:
        vocab_size: of the policy, which a teacher must have exactly with `algo.opd_kl=full`.
    """
    exact = vocab_size if config.algo.opd_kl == OpdKl.full else None
    return asyncio.run(_find_other(config, list(_probe_texts(tokenizer)), sizes=(len(tokenizer), exact)))


def _urls(config: RunConfig) -> Mapping[str, str]:
    """The URLs of the config by their keys."""
    one = {} if config.model.teacher_url is None else {"model.teacher_url": config.model.teacher_url}
    return one | {f"data.teacher_by_source.{name}": url for name, url in config.data.teacher_by_source.items()}


def _open_client(key: str, url: str, config: RunConfig, *, timeout_s: float, num_top: int = 0) -> TeacherClient:
    address = EngineAddress(
        name=f"teacher of {key}",
        url=url,
        api_key=os.environ.get(TEACHER_KEY_VARIABLE) or None,
        proxy=proxy_for(url, config.network.http_proxy),
    )
    return TeacherClient(address, timeout_s=timeout_s, num_top=num_top)


async def _find_unusable(config: RunConfig) -> list[Problem]:
    problems = []
    for key, url in _urls(config).items():
        client = _open_client(key, url, config, timeout_s=CHECK_TIMEOUT_S)
        try:
            # A server that does not say so is asked with the first sample.
            is_blind = config.data.multimodal_keys is not None and await client.reads_images() is False
            await client.vocab_size()
        except EngineError as error:
            value, fix = f"{public_url(url)} ({error})", "start it, e.g. with rlscale-serve, or correct the URL"
            problems.append(Problem(path=key, rule="name a server that responds", value=value, fix=fix))
        else:
            if is_blind:
                rule, fix = "name a teacher that reads images, as data.multimodal_keys is set", "serve another model"
                problems.append(Problem(path=key, rule=rule, value=public_url(url), fix=fix))
        finally:
            await client.close()
    return problems


async def _find_other(
    config: RunConfig, probes: list[tuple[str, list[list[int]]]], *, sizes: tuple[int, int | None]
) -> list[Problem]:
    problems = []
    for key, url in _urls(config).items():
        client = _open_client(key, url, config, timeout_s=CHECK_TIMEOUT_S)
        try:
            difference = await _find_difference(client, probes, sizes=sizes)
        except EngineError as error:
            difference = str(error)
        finally:
            await client.close()
        if difference is not None:
            rule = "name a teacher with the tokenizer of the policy"
            fix = "use a teacher of the same model family, which has the same token ids"
            problems.append(Problem(path=key, rule=rule, value=f"{public_url(url)} ({difference})", fix=fix))
    return problems


async def _find_difference(
    client: TeacherClient, probes: list[tuple[str, list[list[int]]]], *, sizes: tuple[int, int | None]
) -> str | None:
    """The first difference between the tokenizers; None: they give the same ids.

    Args:
        sizes: fewest tokens that the teacher must have, and its exact number; None: any number.
    """
    (num_tokens, exact), size = sizes, await client.vocab_size()
    if size is not None and (size < num_tokens or size != (exact or size)):
        return f"it has {size} tokens, the policy {exact or num_tokens}"
    for text, allowed in probes:
        found = await client.encode(text)
        if found not in allowed:
            return f"it encodes {text[:40]!r} as {found[:8]}, the policy as {allowed[0][:8]}"
    return None


def _probe_texts(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[list[int]]]]:
    """Texts of tokens from the whole vocabulary, with the ids that the policy's tokenizer gives them.

    Of special tokens at the ends of a text servers differ, so the ids with and without them are allowed.
    """
    special = set(tokenizer.all_special_ids)
    ordinary = [each for each in range(len(tokenizer)) if each not in special]
    stride = max(1, len(ordinary) // (NUM_PROBES * PROBE_TOKENS))
    chosen = ordinary[::stride]
    # Each NUM_PROBES-th token: a text has tokens of all parts of the vocabulary.
    for start in range(min(NUM_PROBES, len(chosen))):
        ids = chosen[start::NUM_PROBES][:PROBE_TOKENS]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "decoding one list of ids gives one text"
        allowed = [list(tokenizer.encode(text, add_special_tokens=added)) for added in (False, True)]
        if text and allowed[0]:
            yield text, allowed
