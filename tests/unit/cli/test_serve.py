"""The command `rlscale-serve`."""

import pytest

from rlscale.cli.serve import main, make_parser
from rlscale.engines.server.http_server import API_KEY_VARIABLE


def test_other_machines_need_a_key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert main(["--model-path", "/no/model", "--host", "0.0.0.0"]) == 2
    assert f"set {API_KEY_VARIABLE}" in caplog.text


def test_defaults() -> None:
    args = make_parser().parse_args(["--model-path", "m"])
    assert (args.host, args.deterministic, args.dtype) == ("127.0.0.1", True, "float32")
    assert make_parser().parse_args(["--model-path", "m", "--no-deterministic"]).deterministic is False
