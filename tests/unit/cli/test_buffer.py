"""Wrong arguments of `rlscale-buffer` end with one line before it serves anything."""

import socket
from pathlib import Path

import pytest

from rlscale.cli.buffer import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "--host must be a loopback address, got 0.0.0.0; set RLSCALE_BUFFER_API_KEY"),
        (("--file", "missing/file"), "--file must be a file of the rollout buffer, got missing/file; No such file"),
        (("--port", "{taken}"), "--port must be a free port of --host 127.0.0.1, got {taken}; "),
        (("--port", "70000"), "--port must be a free port of --host 127.0.0.1, got 70000; "),
        (("--host", "no.such.host.invalid"), "--host must be a loopback address, got no.such.host.invalid; "),
        (("--keep-groups", "0"), "--keep-groups must be at least 1, got 0; remove it to keep all"),
    ],
)
def test_wrong_arguments_end_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLSCALE_BUFFER_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main([word.replace("{taken}", port) for word in ("--port", "0", *arguments)]) == 2
    (record,) = caplog.records
    assert record.getMessage().startswith(message.replace("{taken}", port))
    assert not list(tmp_path.iterdir())


def test_an_argument_of_another_type_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--port", "banana"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("rlscale-buffer: --port must be an integer, got banana; ")
