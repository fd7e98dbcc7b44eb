"""Connects a run to the rollout buffer service: its name there, its announcement, and its source of rollouts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlscale.config import RunConfig
from rlscale.config.addresses import proxy_for
from rlscale.driver.prepared_run import PreparedRun
from rlscale.models.hf_models import load_hf_fields
from rlscale.rollout.buffered import BufferedRollouts, TrajectoryLimits
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generated import sampling_params
from rlscale.rollout.group_filters import GroupFilters
from rlscale.services.buffer_client import BufferAddress, BufferClient
from rlscale.types import EngineAddress

READER_FILE = "buffer_reader"
"""File of the run folder with the name under which the service delivers groups to this run, and to no other."""


def buffer_address(config: RunConfig) -> BufferAddress:
    """Address of `buffer.url`; through the proxy unless it is a loopback address."""
    assert config.buffer.url is not None, "checked by the caller"
    return BufferAddress.from_env(config.buffer.url, proxy=proxy_for(config.buffer.url, config.network.http_proxy))


def build_buffer_source(
    prepared: PreparedRun, pool: EnginePool, *, folder: Path, filters: GroupFilters
) -> BufferedRollouts:
    """The source of a run that reads from `buffer.url`.

    Args:
        folder: of the run; a run that resumes in it continues to read where its checkpoint was.
    """
    config, fields = prepared.config, load_hf_fields(prepared.model_path)
    vocab_size, positions = fields.get("vocab_size"), fields.get("max_position_embeddings")
    limits = TrajectoryLimits(
        vocab_size=None if vocab_size is None else int(vocab_size),
        max_tokens=config.rollout.max_context_len or (None if positions is None else int(positions)),
    )
    address, retries = buffer_address(config), config.buffer.fetch_trajectory_retry_times
    client = BufferClient(
        address,
        reader=reader_name(folder),
        announce=_announcer(config, limits, pool, shows_keys=address.api_key is not None),
        max_retries=None if retries < 0 else retries,
    )
    return BufferedRollouts(client, config, limits=limits, filters=filters)


def reader_name(folder: Path) -> str:
    """The name of the run at the service, which is written at its first start."""
    path = folder / READER_FILE
    if not path.exists():
        # Complete or absent: a run that starts again must not get another name.
        new = path.with_suffix(".new")
        new.write_text(uuid.uuid4().hex, encoding="ascii")
        new.replace(path)
    return path.read_text(encoding="ascii").strip()


def _announcer(
    config: RunConfig, limits: TrajectoryLimits, pool: EnginePool, *, shows_keys: bool
) -> Callable[[], Mapping[str, Any]]:
    """Returns the announcement at each call: engines may restart at other addresses."""
    fixed = {
        "task_type": config.buffer.task_type,
        "group_size": config.batch.n_samples_per_prompt,
        "vocab_size": limits.vocab_size,
        "max_tokens": limits.max_tokens,
        "sampling_params": sampling_params(config.rollout).to_wire(),
        "prompt_data": None if config.data.prompt_data is None else str(config.data.prompt_data),
    }
    return lambda: {**fixed, "engines": _engines([each.address for each in pool.present], shows_keys=shows_keys)}


def _engines(addresses: Sequence[EngineAddress], *, shows_keys: bool) -> list[dict[str, str]]:
    """Names and URLs; the keys of engines go only to a service that has a key itself."""
    return [
        {"name": each.name, "url": each.url}
        | ({"api_key": each.api_key} if shows_keys and each.api_key is not None else {})
        for each in addresses
    ]
