"""Time and memory from prompt files to the prompts of the first rollout, by the size and format of the files.

Each case is a separate process that opens the files, takes the prompts of a rollout, restores a position and
takes them again. Its memory is the growth of the peak over that of the imports. Writes results/prompt_files.md and
.json.

    python benchmarks/prompt_files.py [--large-gb 20]

RLSCALE_BENCH_FOLDER is the folder of its files; default ~/.cache/rlscale/benchmarks. They are removed at the end.
"""

import argparse
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import machine, sentence

HERE = Path(__file__).parent
RESULTS = HERE / "results"
NUM_PROMPTS = 256
SHORT_ROWS = 1_000_000
LONG_CHARS = 20_000
HUGE_CHARS = 50_000_000


def short_rows() -> Iterator[dict[str, Any]]:
    for i in range(SHORT_ROWS):
        yield {"input": f"{i % 1000:03d}+{i % 997:03d}=", "label": str(i % 1000 + i % 997), "metadata": {"row": i}}


def write_jsonl(file: Path) -> None:
    with file.open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in short_rows())


def write_gzip(file: Path) -> None:
    with gzip.open(file, "wt", compresslevel=1) as lines:
        lines.writelines(json.dumps(row) + "\n" for row in short_rows())


def write_parquet(file: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(short_rows())), file)


def write_huge_row(file: Path) -> None:
    rows = [{"input": "1+1=", "label": "2"}] * 1000 + [{"input": "1" * HUGE_CHARS, "label": "2"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_large(file: Path, num_bytes: int) -> None:
    """Rows of 20 KB with prompts of one length, from a few random texts."""
    texts = ["".join(random.Random(i).choices("0123456789+=", k=LONG_CHARS)) for i in range(64)]
    with file.open("w") as lines:
        written = number = 0
        while written < num_bytes:
            text = texts[number % len(texts)]
            written += lines.write(f'{{"input": "{number:08d}+1=", "label": "1", "notes": "{text}"}}\n')
            number += 1


def peak_kb() -> int:
    """The largest resident memory of this process so far; `getrusage` would count that of its parent."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def probe(path: str) -> dict[str, Any]:
    """One case, in this process."""
    from rlscale.config import DataConfig, RolloutConfig
    from rlscale.data.prompts import FilePromptSource
    from rlscale.models.char_tokenizer import character_tokenizer

    tokenizer = character_tokenizer(512)
    tokenizer(["1"])
    before, num_read, cpu_s = peak_kb(), bytes_read(), time.process_time()
    config, rollout = DataConfig(prompt_data=path, label_key="label"), RolloutConfig(shuffle=True, max_prompt_len=32)
    began = time.perf_counter()
    source = FilePromptSource(config, rollout, tokenizer)
    opened = time.perf_counter()
    source.take(NUM_PROMPTS)
    taken = time.perf_counter()
    used_s, num_bytes = time.process_time() - cpu_s, bytes_read() - num_read
    state, expected = source.state_dict(), source.take(NUM_PROMPTS)
    source.load_state_dict(state)
    assert source.take(NUM_PROMPTS) == expected
    return {
        "num_rows": len(source),
        "open_s": opened - began,
        "take_s": taken - opened,
        "cpu_s": used_s,
        "bytes_read": num_bytes,
        "growth_mb": (peak_kb() - before) / 1e3,
        "peak_mb": peak_kb() / 1e3,
        "num_dropped": sum(source.num_dropped.values()),
    }


def measure(name: str, file: Path, write: Callable[[Path], None]) -> dict[str, Any]:
    """Writes a file, opens it in a new process, and removes it."""
    write(file)
    size, load = file.stat().st_size, os.getloadavg()[0]
    env = {**os.environ, "TMPDIR": str(file.parent)}
    command = [sys.executable, str(Path(__file__)), "--probe", str(file)]
    output = subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE, text=True).stdout
    file.unlink()
    return {"name": name, "gb": size / 1e9, "load": load, **json.loads(output)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large-gb", type=float, default=20.0)
    parser.add_argument("--probe", default=None)
    arguments = parser.parse_args()
    if arguments.probe is not None:
        sys.stdout.write(json.dumps(probe(arguments.probe)))
        return
    root = Path(os.environ.get("RLSCALE_BENCH_FOLDER", Path.home() / ".cache/rlscale/benchmarks")) / "prompt_files"
    root.mkdir(parents=True, exist_ok=True)
    large = int(arguments.large_gb * 1e9)
    cases = [
        measure("1,000,000 short rows, JSONL", root / "short.jsonl", write_jsonl),
        measure("1,000,000 short rows, gzip", root / "short.jsonl.gz", write_gzip),
        measure("1,000,000 short rows, Parquet", root / "short.parquet", write_parquet),
        measure("a row of 50 MB", root / "huge.jsonl", write_huge_row),
        measure("rows of 20 KB, JSONL", root / "large.jsonl", lambda file: write_large(file, large)),
    ]
    shutil.rmtree(root)
    lines = [
        "# From prompt files to the first rollout",
        "",
        f"{sentence([case['load'] for case in cases])} {NUM_PROMPTS} prompts, shuffled, character tokenizer. Memory is "
        "the peak of the process, and its growth by the files. Made by `python benchmarks/prompt_files.py`.",
        "",
        "| files | GB | rows | open, s | first prompts, s | both, CPU s | peak, MB | growth, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {case['name']} | {case['gb']:.2f} | {case['num_rows']} | {case['open_s']:.2f} | {case['take_s']:.2f} "
        f"| {case['cpu_s']:.2f} | {case['peak_mb']:.0f} | {case['growth_mb']:.0f} |"
        for case in cases
    ]
    RESULTS.joinpath("prompt_files.md").write_text("\n".join(lines) + "\n")
    RESULTS.joinpath("prompt_files.json").write_text(
        json.dumps({"machine": machine(), "cases": cases}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
