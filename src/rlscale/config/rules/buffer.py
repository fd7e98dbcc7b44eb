"""Rules about the rollout buffer service."""

from __future__ import annotations

from rlscale.config.addresses import is_plain_url, public_url
from rlscale.config.keys import keys
from rlscale.config.problems import show
from rlscale.config.rules.conditions import is_sft, reads_buffer, uses_engines
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def buffer_url_is_a_url(config: RunConfig) -> list[Problem]:
    url = config.buffer.url
    if url is None or is_plain_url(url):
        return []
    rule, fix = "be http://<host>:<port> or https://<host>:<port>", "write e.g. http://10.0.0.1:8889"
    return [Problem(path="buffer.url", rule=rule, value=public_url(url), fix=fix)]


@rule
def buffer_excludes_a_rollout_function(config: RunConfig) -> list[Problem]:
    path = config.rollout.function_path
    if not reads_buffer(config) or path is None:
        return []
    fix = "remove it; the processes that submit trajectories generate the rollouts"
    return [Problem(path="rollout.function_path", rule="be null with buffer.url", value=path, fix=fix)]


@rule
def buffer_has_no_routes(config: RunConfig) -> list[Problem]:
    """Trajectories of the service have no expert routes."""
    if not reads_buffer(config) or not config.algo.use_rollout_routing_replay:
        return []
    fix = "remove it; trajectories of the service have no expert routes"
    path = "algo.use_rollout_routing_replay"
    return [Problem(path=path, rule="be false with buffer.url", value="true", fix=fix)]


@rule
def buffer_has_one_reward(config: RunConfig) -> list[Problem]:
    """A trajectory of the service has one number as its reward."""
    if not reads_buffer(config) or not config.reward.weights:
        return []
    fix = "remove it; a trajectory of the service has one reward"
    value = show(config.reward.weights)
    return [Problem(path="reward.weights", rule="be empty with buffer.url", value=value, fix=fix)]


USED_SAMPLING = frozenset(
    f"sampling.{name}"
    for name in (
        "all_samples_process_path",
        "custom_rollout_log_function_path",
        "dynamic_filter_path",
        "hook_timeout_s",
        "max_failed_share",
        "min_group_size",
        "sample_filter_path",
    )
)
"""Keys of sampling that apply to groups of the service, too."""

IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("buffer.fetch_trajectory_retry_times", "buffer.min_batch_collection_ratio", "buffer.task_type"),
        when=lambda config: config.buffer.url is None,
        why="buffer.url is not set",
    ),
    IgnoredKey(
        names=("buffer",),
        when=lambda config: is_sft(config) or not uses_engines(config),
        why="the run trains on its data files",
    ),
    IgnoredKey(
        names=tuple(path for path in keys() if path.startswith("sampling.") and path not in USED_SAMPLING),
        when=reads_buffer,
        why="the processes that submit trajectories to buffer.url generate them",
    ),
    IgnoredKey(
        names=tuple(
            path for path in keys() if path.startswith("reward.") and path not in ("reward.post_process_path",)
        ),
        when=lambda config: reads_buffer(config) and config.eval.interval is None,
        why="the trajectories of buffer.url have their rewards",
    ),
)
