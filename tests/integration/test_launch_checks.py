"""Everything that needs no GPU is reported before Ray starts: exit code 2, one line for each problem, no process.

The commands run with a module `sitecustomize` that makes packages missing and records every process that they start.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.weight_files import write_no_weights

ROOT = Path(__file__).parents[2]
MISSING, STARTED = "TEST_MISSING_PACKAGES", "TEST_STARTED_PROCESSES"

SITE = f"""
import os, sys

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in os.environ.get("{MISSING}", "").split(","):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def record(event, args):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork"):
        with open(os.environ["{STARTED}"], "a") as file:
            file.write(f"{{event}} {{args[:2]}}\\n")

sys.meta_path.insert(0, Missing)
sys.addaudithook(record)
"""

EVERY_NODE = "on every node (searched on this machine only)"
TINY_MEGATRON = ("model=tiny_qwen3", "train=megatron")


@dataclass(kw_only=True)
class Watched:
    """Runs commands in a folder, and reads the processes that they started."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, STARTED: str(self.folder / "started.txt"), "HF_HUB_OFFLINE": "1"}
        own |= {"HF_HOME": str(self.folder / "hf"), "RLSCALE_CACHE": str(self.folder / "cache")}
        return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own

    def run(self, module: str, *words: str, missing: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"rlscale.cli.{module}", *words],
            cwd=self.folder,
            env={**self.environment, MISSING: missing, **variables},
            text=True,
            capture_output=True,
            timeout=120,
        )

    @property
    def started(self) -> str:
        file = self.folder / "started.txt"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    return Watched(folder=tmp_path)


def quickstart(*overrides: str) -> tuple[str, ...]:
    return ("experiment=quickstart", "model.warmup_experiment=null", *overrides)


PACKAGES: list[tuple[str, tuple[str, ...], str]] = [
    (
        "megatron.core",
        quickstart(*TINY_MEGATRON),
        "train.backend must be fsdp without megatron-core, got megatron; pip install 'rlscale[megatron]' "
        f"{EVERY_NODE}, or choose train=fsdp",
    ),
    (
        "flash_attn",
        quickstart("cluster.device=cuda"),
        "fsdp.attn_implementation must be sdpa or eager without flash-attn, got flash_attention_2; pip install "
        f"flash-attn --no-build-isolation {EVERY_NODE}, or set fsdp.attn_implementation=sdpa, with the flash attention "
        "that comes with torch",
    ),
    (
        "peft",
        quickstart("train.lora.rank=4"),
        f"train.lora.rank must be 0 without peft, got 4; pip install 'rlscale[lora]' {EVERY_NODE}, or set "
        "train.lora.rank=0 to train all weights",
    ),
    (
        "math_verify",
        quickstart("reward=math"),
        "reward.type must have its library math-verify, got math; pip install 'rlscale[math]', or choose "
        "reward=exact_match",
    ),
    (
        "pyarrow",
        quickstart("data.prompt_data=rows.parquet"),
        "data.prompt_data must end in .jsonl without pyarrow, got rows.parquet; pip install 'rlscale[parquet]', or "
        "convert it",
    ),
    (
        "tensorboard",
        quickstart("logging.tensorboard.enabled=true"),
        "logging.tensorboard.enabled must be false if tensorboard is not installed, got true; install it: pip install "
        "'rlscale[tensorboard]'",
    ),
]


@pytest.mark.parametrize(("package", "overrides", "expected"), PACKAGES, ids=[case[0] for case in PACKAGES])
def test_a_missing_package(package: str, overrides: tuple[str, ...], expected: str, watched: Watched) -> None:
    (watched.folder / "rows.parquet").touch()
    done = watched.run("train", *overrides, missing=package)
    check_report(done, expected, watched)


VALUES: list[tuple[str, tuple[str, ...], str]] = [
    (
        "suffix",
        quickstart("data.prompt_data=a.csv"),
        "data.prompt_data must name files that can be read, got a.csv; a.csv must end in .jsonl, .jsonl.gz or .parquet",
    ),
    (
        "first row",
        quickstart("data.prompt_data=bad.jsonl"),
        "data.prompt_data must name a file whose rows can be used, got bad.jsonl; bad.jsonl row 1 must have a "
        "field 'prompt', got fields question; correct data.input_key or the file",
    ),
    (
        "evaluation",
        quickstart("eval.prompt_data=[a,bad.jsonl]"),
        "eval.prompt_data must name a file whose rows can be used, got bad.jsonl; bad.jsonl row 1 must have a ",
    ),
    (
        "run folder",
        quickstart("run.dir=a.csv"),
        "run.dir must name a folder that can be written, got a.csv; {folder}/a.csv is a file; choose another run.dir",
    ),
    (
        "warm-up",
        ("experiment=quickstart", "model.warmup_experiment=nope"),
        "model.warmup_experiment must be the name of an experiment, got nope; rlscale-train --help lists the "
        "experiments; null: no warm-up",
    ),
    (
        "parameters",
        quickstart("train.only_train_params=[nope]"),
        "train.only_train_params must have patterns that match a parameter name, got nope; the model has "
        "model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, ",
    ),
    (
        "rope type",
        quickstart(*TINY_MEGATRON, "megatron.rope_type=yarn"),
        "megatron.rope_type must be rope, as in config.json, got yarn; set it to rope",
    ),
    (
        "Ray's address",
        quickstart("cluster.ray_address=banana"),
        "cluster.ray_address must be auto, local or <host>:<port>, got banana; write e.g. 10.0.0.1:6379, or remove it",
    ),
    (
        "no cluster",
        quickstart("cluster.ray_address=127.0.0.1:1", "cluster.device=cpu"),
        "cluster.ray_address must be the address of a running Ray cluster, got 127.0.0.1:1; start one with `ray start "
        "--head`, or leave the key unset to start Ray here",
    ),
    (
        "tokenizer",
        quickstart("model=hf", "model.hf_checkpoint=model"),
        "model.hf_checkpoint must have a tokenizer, got 'model'; it has none of tokenizer.json,",
    ),
    (
        "user code",
        quickstart("reward.custom_path=no_such_module:reward"),
        "reward.custom_path must be importable, got no_such_module:reward; importing 'no_such_module' failed:",
    ),
    (
        "interpreter of SGLang",
        quickstart("rollout=sglang", f"sglang.python={sys.executable}"),
        f"sglang.python must name an interpreter that has SGLang, got {sys.executable}, which does not;",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), [case[1:] for case in VALUES], ids=[case[0] for case in VALUES])
def test_a_wrong_value(overrides: tuple[str, ...], expected: str, watched: Watched) -> None:
    write_files(watched.folder)
    done = watched.run("train", *overrides)
    check_report(done, expected.format(folder=watched.folder), watched)


GOOD = b'{"prompt": "1+1=", "label": "2"}\n'
HOSTILE: list[tuple[str, bytes | None, str]] = [
    ("json", GOOD + b'{"prompt": "1+', "rows.jsonl row 2 must be a JSON object, got "),
    ("nul", GOOD + b"\0" * 99 + b"\n", "rows.jsonl row 2 must be JSON without NUL characters, got "),
    ("fifo", None, "rows.jsonl must be a regular file, got a fifo, which can be read only once; copy it to a file: "),
]


@pytest.mark.parametrize(("content", "expected"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_file_is_one_line(content: bytes | None, expected: str, watched: Watched) -> None:
    file = watched.folder / "rows.jsonl"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    done = watched.run("train", *quickstart("data.prompt_data=rows.jsonl"))
    check_report(done, "data.prompt_data must name ", watched)
    assert expected in done.stderr


def test_all_problems_are_one_list(watched: Watched) -> None:
    write_files(watched.folder)
    wrong = ("data.prompt_data=a.csv", "run.dir=a.csv", "optim.lrr=1", "algo.eps_clip=x", "reward=math")
    done = watched.run("train", *quickstart(*wrong), missing="math_verify")
    heading, *lines = done.stderr.splitlines()
    assert (done.returncode, heading) == (2, "rlscale-train: 5 errors, nothing was started")
    assert [line.split(" must ")[0].strip() for line in lines] == [
        "optim.lrr",
        "algo.eps_clip",
        "reward.type",
        "data.prompt_data",
        "run.dir",
    ]
    assert watched.started == ""


def test_an_address_of_the_environment_names_the_variable(watched: Watched) -> None:
    done = watched.run("train", *quickstart(), RAY_ADDRESS="banana")
    check_report(
        done,
        "RAY_ADDRESS must be the address of a running Ray cluster, got banana; start one with `ray start --head`, or "
        "leave the environment variable unset to start Ray here (it is not of the form <host>:<port>)",
        watched,
    )


def test_a_sweep_reports_the_problems_of_its_jobs(watched: Watched) -> None:
    write_files(watched.folder)
    done = watched.run("train", "-m", *quickstart("data.prompt_data=a.csv,bad.jsonl"))
    assert done.returncode == 2
    assert "rlscale-train: 2 errors, nothing was started" in done.stderr
    assert watched.started == ""


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        (
            "convert",
            ("/nope", "/x"),
            "SOURCE must name an existing folder or a hub id, got '/nope'; e.g. Qwen/Qwen3-4B",
        ),
        (
            "convert",
            ("no/model", "new"),
            "SOURCE must be in the local cache of Hugging Face with HF_HUB_OFFLINE=1, got no/model; download it where "
            "there is a network (hf download no/model), or unset HF_HUB_OFFLINE",
        ),
        (
            "serve",
            ("--model-path", "/nope"),
            "--model-path must name an existing folder or a hub id, got '/nope'; e.g. Qwen/Qwen3-4B",
        ),
    ],
)
def test_other_commands_print_one_line(module: str, words: tuple[str, ...], expected: str, watched: Watched) -> None:
    done = watched.run(module, *words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith(expected)
    assert watched.started == ""


def write_files(folder: Path) -> None:
    (folder / "a.csv").write_text("prompt,label\n")
    (folder / "bad.jsonl").write_text('{"question": "1+1="}\n')
    (folder / "model").mkdir()
    about = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (folder / "model" / "config.json").write_text(json.dumps(about))
    write_no_weights(folder / "model" / "model.safetensors")


def check_report(done: subprocess.CompletedProcess[str], expected: str, watched: Watched) -> None:
    """Exit code 2, a list with the expected line, no traceback, and no process, so neither Ray nor anything else."""
    heading, *lines = done.stderr.splitlines()
    assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout, done.stderr
    assert heading == f"rlscale-train: {len(lines)} error{'s' if len(lines) > 1 else ''}, nothing was started"
    assert any(line.strip().startswith(expected) for line in lines), done.stderr
    processes = [line for line in watched.started.splitlines() if "_PRINT_PACKAGES" not in line]
    assert all("importlib import metadata" in line for line in processes), "only SGLang's interpreter is queried"
