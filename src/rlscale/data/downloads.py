"""Downloads of the data sets that options of `data` and `eval` name: `rlscale-data download gsm8k`."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit
from urllib.request import urlopen

from rlscale.errors import DataError

ENDPOINT, ENDPOINT_VARIABLE = "https://huggingface.co", "HF_ENDPOINT"
CHECKSUMS = "SHA256SUMS"
"""File next to the data, in the format of `sha256sum -c`: a checksum and a name per line."""

TIMEOUT_S = 60.0
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A data set of the Hugging Face Hub and the folder that the options name."""

    repository: str
    folder: str  # below the folder of all data
    files: tuple[str, ...]  # paths in the repository and below `folder`


DATASETS: Mapping[str, Dataset] = MappingProxyType(
    {
        "gsm8k": Dataset(repository="zhuzilin/gsm8k", folder="gsm8k", files=("train.parquet", "test.parquet")),
        "gsm8k_solutions": Dataset(
            repository="openai/gsm8k", folder="gsm8k-solutions", files=("main/train-00000-of-00001.parquet",)
        ),
        "dapo_math_17k": Dataset(
            repository="zhuzilin/dapo-math-17k", folder="dapo-math-17k", files=("dapo-math-17k.jsonl",)
        ),
        "geometry3k": Dataset(
            repository="hiyouga/geometry3k",
            folder="geometry3k",
            files=("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
        ),
        "aime": Dataset(repository="zhuzilin/aime-2024", folder="aime-2024", files=("aime-2024.jsonl",)),
    }
)

Report = Callable[[Path, str], None]


def download(name: str, *, into: Path, report: Report, endpoint: str | None = None) -> list[Path]:
    """Downloads the files of a data set that are not there, and compares each with its recorded checksum.

    The first download records the checksums, as the Hub publishes none that does not change with a file.

    Args:
        name: a key of DATASETS.
        into: folder of all data, `data` for the paths of the options.
        report: called with each file and what was done.
        endpoint: URL of the Hub or a mirror. None: `$HF_ENDPOINT`, else that of Hugging Face.

    Raises:
        DataError: a file cannot be downloaded, or differs from its recorded checksum.
    """
    dataset, base = DATASETS[name], endpoint or os.environ.get(ENDPOINT_VARIABLE) or ENDPOINT
    folder = into / dataset.folder
    known = _read_checksums(folder)
    files = []
    for file in dataset.files:
        target, url = folder / file, f"{base.rstrip('/')}/datasets/{dataset.repository}/resolve/main/{file}"
        if target.is_file():
            found, done = _sha256(target), "is there"
        else:
            found, done = _fetch(url, target, expected=known.get(file)), "downloaded"
        _check(target, found, known.get(file), folder)
        is_known = file in known
        known[file] = found
        _write_checksums(folder, known)
        report(target, f"{done}; its checksum {'is that of the first download' if is_known else 'is recorded'}")
        files.append(target)
    return files


def command_for(path: Path) -> str | None:
    """The command that downloads a missing file, recognised by the end of its path; None for another file."""
    for name, dataset in DATASETS.items():
        for file in dataset.files:
            parts = ("data", *Path(dataset.folder, file).parts)
            if path.parts[-len(parts) :] == parts:
                into = Path(*path.parts[: -len(parts) + 1])
                place = "" if into.absolute() == Path("data").absolute() else f" --into {into}"
                return f"rlscale-data download {name}{place}"
    return None


def advice_for(path: str) -> str:
    """Advice for a data set of the Hub or a URL where a path is expected; empty for a path."""
    words = re.fullmatch(r"(?:\w+://(?:huggingface\.co/)?(?:datasets/)?)?(?:[\w.-]+/)?([\w-]+)", path)
    wanted = words[1].lower().replace("-", "_") if words else ""
    for name, dataset in DATASETS.items():
        if wanted in (name, dataset.folder.replace("-", "_")):
            file = Path("data", dataset.folder, dataset.files[0])
            return f"run `rlscale-data download {name}`, then write {file}"
    if "://" in path or (words and "/" in path):
        return "a path is expected, so download the file first"
    return ""


def _fetch(url: str, target: Path, *, expected: str | None) -> str:
    """Downloads to a temporary name, which becomes `target` when the file is complete and right."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "name another folder with --into"
        raise DataError(f"{target.parent} must be a folder to write to, got {error.strerror}; {fix}") from error
    # Of this download alone: nodes with one file system may start the same one.
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    digest, size = hashlib.sha256(), 0
    try:
        with urlopen(url, timeout=TIMEOUT_S) as response, part.open("wb") as file:
            # A mirror may redirect to a storage server, but never from an encrypted connection to a plain one.
            if urlsplit(url).scheme == "https" != urlsplit(response.url).scheme:
                raise DataError(f"{url} must stay encrypted, got a redirect to {response.url}; use another mirror")
            length = response.headers.get("Content-Length")
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        if length is not None and size != int(length):
            raise OSError(f"the connection ended after {size} of {length} bytes")
        found = digest.hexdigest()
        # A changed file must not replace the right one, which may be needed by a run.
        if expected in (None, found):
            os.replace(part, target)
        return found
    except DataError:
        raise
    except (OSError, HTTPException, ValueError) as error:
        fix = f"check the network, set {ENDPOINT_VARIABLE} to a mirror, or copy the file to {target}"
        raise DataError(f"{url} must be downloadable, got {error}; {fix}") from error
    finally:
        part.unlink(missing_ok=True)


def _check(target: Path, found: str, expected: str | None, folder: Path) -> None:
    if expected not in (None, found):
        state = "delete it to download it again" if target.is_file() else "the source has changed"
        raise DataError(
            f"{target} must have the SHA-256 {expected}, which the first download recorded, got {found}; {state}, or "
            f"delete its line in {folder / CHECKSUMS} to accept the new one"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read_checksums(folder: Path) -> dict[str, str]:
    file = folder / CHECKSUMS
    if not file.is_file():
        return {}
    pairs = (line.split(maxsplit=1) for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    # sha256sum writes two characters between both: a space, and `*` for a binary file.
    return {pair[1].lstrip("*").strip(): pair[0] for pair in pairs if len(pair) == 2}


def _write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    lines = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items()))
    (folder / CHECKSUMS).write_text(lines, encoding="utf-8")
