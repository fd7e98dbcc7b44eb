"""Downloads of known data sets, from a server of the test."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from rlscale.cli.data import main
from rlscale.config import DataConfig, load_config
from rlscale.data import downloads
from rlscale.data.downloads import DATASETS, advice_for, command_for, download
from rlscale.driver.preflight.data_files import check_file
from rlscale.errors import DataError

ROWS = b'{"prompt": "1+1=", "label": "2"}\n'


@dataclass
class Hub:
    """A server with the files of data sets."""

    url: str
    contents: dict[str, bytes] = field(default_factory=dict)  # by path
    asked: list[str] = field(default_factory=list)
    missing_bytes: int = 0  # of each answer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(self.path)
            content = hub.contents.get(self.path)
            self.send_response(200 if content is not None else 404)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write((content or b"")[: len(content or b"") - hub.missing_bytes])

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = Hub(url=f"http://127.0.0.1:{server.server_port}")
        for dataset in DATASETS.values():
            for file in dataset.files:
                hub.contents[f"/datasets/{dataset.repository}/resolve/main/{file}"] = ROWS + file.encode()
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


AIME = "/datasets/zhuzilin/aime-2024/resolve/main/aime-2024.jsonl"


def test_files_get_to_the_paths_of_the_options(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["download", *DATASETS]) == 0
    config = load_config(["experiment=qwen3_4b_grpo"])
    paths = [config.data.prompt_data, config.eval.prompt_data[1]]
    paths += [load_config(["data=gsm8k"]).data.prompt_data, load_config(["data=gsm8k_solutions"]).data.prompt_data]
    figures = load_config(["experiment=geo3k_vlm"])
    paths += [figures.data.prompt_data, figures.eval.prompt_data[1]]
    for path in paths:
        assert path is not None and Path(path).read_bytes().startswith(ROWS), path
    assert len(hub.asked) == 7 and not list(tmp_path.rglob("*.part"))
    checksum = hashlib.sha256(ROWS + b"aime-2024.jsonl").hexdigest()
    assert (tmp_path / "data/aime-2024/SHA256SUMS").read_text() == f"{checksum}  aime-2024.jsonl\n"
    assert "data/aime-2024/aime-2024.jsonl: downloaded; its checksum is recorded" in capsys.readouterr().out
    # Nothing is downloaded twice.
    assert main(["download", "aime"]) == 0 and len(hub.asked) == 7
    assert "is there; its checksum is that of the first download" in capsys.readouterr().out


def test_a_later_download_is_compared(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["download", "aime", "--into", str(tmp_path)]
    assert main(words) == 0
    file = tmp_path / "aime-2024" / "aime-2024.jsonl"
    file.unlink()
    right, hub.contents[AIME] = hub.contents[AIME], b"other rows"
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "must have the SHA-256" in message and "the source has changed" in message
    assert not file.exists() and not list(tmp_path.rglob("*.part"))
    hub.contents[AIME] = right
    assert main(words) == 0 and file.read_bytes() == right
    file.write_bytes(b"edited")
    assert main(words) == 2
    assert "delete it to download it again" in capsys.readouterr().err


def test_failures_leave_no_file(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.missing_bytes = 3
    with pytest.raises(DataError, match=r"aime-2024\.jsonl must be downloadable, got .*bytes.*HF_ENDPOINT"):
        download("aime", into=tmp_path, report=lambda file, text: None)
    hub.contents.clear()
    assert main(["download", "aime", f"--into={tmp_path}", "--endpoint", f"{hub.url}/"]) == 2
    assert "got HTTP Error 404" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "gsm9k"]) == 2
    assert "rlscale-data download must name one of gsm8k, gsm8k_solutions, dapo_math_17k" in capsys.readouterr().err
    assert main(["download", "aime", "--into"]) == 2
    assert "--into must have a value, got nothing" in capsys.readouterr().err


def test_the_error_of_a_missing_file_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = check_file("data.prompt_data", DataConfig(prompt_data="data/gsm8k/train.parquet"), template=None)
    assert problem.fix.startswith("get it by `rlscale-data download gsm8k`; looked for ")
    assert command_for(Path("/disk/data/aime-2024/aime-2024.jsonl")) == "rlscale-data download aime --into /disk/data"
    assert command_for(Path("data/mine.jsonl")) is None


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("gsm8k", "run `rlscale-data download gsm8k`, then write data/gsm8k/train.parquet"),
        ("openai/gsm8k", "run `rlscale-data download gsm8k`, then write data/gsm8k/train.parquet"),
        ("hf://datasets/openai/gsm8k", "run `rlscale-data download gsm8k`, then write data/gsm8k/train.parquet"),
        (
            "https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k",
            "run `rlscale-data download dapo_math_17k`, then write data/dapo-math-17k/dapo-math-17k.jsonl",
        ),
        ("https://example.com/a.jsonl", "a path is expected, so download the file first"),
        ("s3://bucket/folder/a.parquet", "a path is expected, so download the file first"),
        ("someone/my-prompts", "a path is expected, so download the file first"),
        ("data/mine.jsonl", ""),
        ("mine", ""),
    ],
)
def test_data_that_is_named_otherwise_than_by_its_path(path: str, advice: str) -> None:
    assert advice_for(path) == advice


def test_two_downloads_of_a_file_at_the_same_time(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Path] = []

    def open_slowly(url: str, *, timeout: float) -> Any:
        response = urlopen(url, timeout=timeout)
        read = response.read

        def read_after_another(size: int) -> bytes:
            monkeypatch.setattr(downloads, "urlopen", urlopen)
            response.read = read
            done.extend(download("aime", into=tmp_path, report=lambda *_: None))
            return bytes(read(size))

        response.read = read_after_another
        return response

    # As several nodes with one file system do.
    monkeypatch.setattr(downloads, "urlopen", open_slowly)
    assert download("aime", into=tmp_path, report=lambda *_: None) == done
    assert done[0].read_bytes() == ROWS + b"aime-2024.jsonl" and not list(tmp_path.rglob("*.part"))
