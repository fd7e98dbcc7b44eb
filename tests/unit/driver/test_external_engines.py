"""External engines that do not answer or do not fit a run."""

from typing import Any

import pytest

from rlscale import load_config
from rlscale.driver.external_engines import KEY, ServerNeeds, check_servers
from rlscale.engines.fake import FakeServer


def address_of(server: FakeServer) -> str:
    return server.url.removeprefix("http://")


def report(server: FakeServer, **fields: object) -> None:
    """Adds SGLang's fields to the report of the fake."""
    own = server.service.info

    async def info() -> dict[str, Any]:
        return {**await own(), **fields}

    server.service.info = info  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("needs", "fits", "lacks", "advice"),
    [
        (
            ServerNeeds(separate_caches=True),
            {"disable_radix_cache": True},
            {"disable_radix_cache": False},
            "--disable-radix-cache",
        ),
        (
            ServerNeeds(releases_memory=True),
            {"enable_memory_saver": True},
            {"enable_memory_saver": False},
            "--enable-memory-saver",
        ),
        (ServerNeeds(joins_groups=True), {"pp_size": 1}, {"pp_size": 2}, "train.weight_channel=disk"),
    ],
)
def test_a_server_that_does_not_fit_is_named(
    needs: ServerNeeds, fits: dict[str, object], lacks: dict[str, object], advice: str
) -> None:
    with FakeServer() as first, FakeServer() as second:
        report(first, **fits)
        report(second, **lacks)
        assert check_servers([address_of(first), address_of(second)], ServerNeeds()) == []
        (problem,) = check_servers([address_of(first), address_of(second)], needs)
        assert problem.path == KEY and second.url in str(problem.value)
    assert advice in str(problem.fix)


def test_a_run_needs_what_its_keys_say() -> None:
    keys = ("rollout=external", "rollout.external_engine_addrs=['10.0.0.1:1']")
    assert ServerNeeds.of(load_config(keys)) == ServerNeeds(joins_groups=True)
    more = ("cluster.offload_rollout=true", "train.weight_channel=disk", "rollout.pause_mode=in_place")
    assert ServerNeeds.of(load_config([*keys, *more])) == ServerNeeds(releases_memory=True)


def test_servers_that_do_not_answer_are_named_by_their_addresses() -> None:
    with FakeServer() as answers:
        problems = check_servers([address_of(answers), "127.0.0.1:9", "127.0.0.1:10"], ServerNeeds())
    assert [str(problem.value).split(" ")[0] for problem in problems] == ["http://127.0.0.1:9", "http://127.0.0.1:10"]
