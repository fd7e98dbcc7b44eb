"""External engines that do not answer or do not fit a run."""

from typing import Any

from rlscale.driver.external_engines import KEY, check_servers
from rlscale.engines.fake import FakeServer


def report_cache(server: FakeServer, *, disable_radix_cache: bool) -> None:
    """Adds SGLang's report about its prefix cache to the fake."""
    own = server.service.info

    async def info() -> dict[str, Any]:
        return {**await own(), "disable_radix_cache": disable_radix_cache}

    server.service.info = info  # type: ignore[method-assign]


def test_a_shared_cache_is_refused_where_weights_change_under_it() -> None:
    with FakeServer() as fits, FakeServer() as shares:
        report_cache(fits, disable_radix_cache=True)
        report_cache(shares, disable_radix_cache=False)
        assert check_servers([fits.url, shares.url]) == []
        (problem,) = check_servers([fits.url, shares.url], mixes_caches=True)
        assert problem.path == KEY and shares.url in str(problem.value)
        assert "--disable-radix-cache" in str(problem.fix)


def test_servers_that_do_not_answer_are_named_by_their_addresses() -> None:
    with FakeServer() as answers:
        problems = check_servers([answers.url, "127.0.0.1:9", "127.0.0.1:10"])
    assert [str(problem.value).split(" ")[0] for problem in problems] == ["http://127.0.0.1:9", "http://127.0.0.1:10"]
