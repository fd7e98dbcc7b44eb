"""Rules about teachers: of the trainer, and behind URLs."""

from __future__ import annotations

from collections.abc import Iterator

from rlscale.config.addresses import advise_url, is_url, public_url
from rlscale.config.groups.algo import OpdKl, has_teacher_loss, uses_teacher
from rlscale.config.problems import show
from rlscale.config.rules.conditions import asks_teachers
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

_EXAMPLE = "http://10.0.0.1:30000"


def _servers(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The URLs of the config by their keys."""
    if config.model.teacher_url is not None:
        yield "model.teacher_url", config.model.teacher_url
    for name, url in config.data.teacher_by_source.items():
        yield f"data.teacher_by_source.{name}", url


@rule
def teacher_url_is_a_url(config: RunConfig) -> list[Problem]:
    rule = "be the URL of a server, http://<host>:<port> or https://..."
    return [
        Problem(path=path, rule=rule, value=public_url(url), fix=fix)
        for path, url in _servers(config)
        if (fix := _advice(url)) is not None
    ]


def _advice(url: str) -> str | None:
    """Advice to correct a URL; None: it is right."""
    # The URL of slime's --rm-url has the endpoint.
    base = url.rstrip("/").removesuffix("/generate")
    if base != url.rstrip("/") and is_url(base):
        return f"write {public_url(base)}; the run adds the endpoint"
    return advise_url(url, example=_EXAMPLE)


@rule
def teacher_has_one_source(config: RunConfig) -> list[Problem]:
    """A teacher is a model of the trainer, or it is served."""
    if config.model.teacher_load is None or not uses_teacher(config.algo):
        return []
    for path, _ in _servers(config):
        rule, fix = f"be null with {path}", "remove it, or remove the server; a run has one kind of teacher"
        return [Problem(path="model.teacher_load", rule=rule, value=config.model.teacher_load, fix=fix)]
    return []


@rule
def whole_distributions_of_a_loaded_teacher_need_its_output_layer(config: RunConfig) -> list[Problem]:
    """The kernels of true-on-policy mode return logits, and not the input of the output layer."""
    is_full = has_teacher_loss(config.algo) and config.algo.opd_kl == OpdKl.full
    if not is_full or config.model.teacher_load is None or not config.train.true_on_policy_mode:
        return []
    rule = "not be full with model.teacher_load and train.true_on_policy_mode"
    fix = "set it to top_k, or set train.true_on_policy_mode=false"
    return [Problem(path="algo.opd_kl", rule=rule, value=config.algo.opd_kl, fix=fix)]


@rule
def served_teachers_have_the_temperature_of_the_policy(config: RunConfig) -> list[Problem]:
    """Servers return logprobs of given tokens at temperature 1."""
    if not asks_teachers(config) or config.rollout.temperature == 1:
        return []
    rule, fix = "be 1 with a teacher behind a URL", "set it to 1; servers return logprobs at temperature 1"
    return [Problem(path="rollout.temperature", rule=rule, value=show(config.rollout.temperature), fix=fix)]


@rule
def served_teachers_score_generated_samples(config: RunConfig) -> list[Problem]:
    """Samples get the logprobs of a teacher when the run has generated and graded them."""
    given = {
        "buffer.url": config.buffer.url,
        "debug.load_rollout_data": config.debug.load_rollout_data,
        "rollout.function_path": config.rollout.function_path,
        "train.convert_samples_path": config.train.convert_samples_path,
    }
    servers = [path for path, _ in _servers(config)]
    if not servers or not uses_teacher(config.algo):
        return []
    rule, fix = f"be null with {servers[0]}", "remove it, or set model.teacher_load instead of the server"
    return [
        Problem(path=path, rule=rule, value=public_url(value), fix=fix)
        for path, value in given.items()
        if value is not None
    ]
