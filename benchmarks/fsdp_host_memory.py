"""Host memory of trainer ranks on FSDP2: while they load their models, in a weight sync and in an export.

    python benchmarks/fsdp_host_memory.py [--before SRC] [--cases NAME ...] [--dry]

A random model of the shape of a 1B model is written once in bfloat16, into a temporary folder. Each case loads it on
2 or 4 ranks, one process each, on this machine; `fsdp_host_memory_probe.py` measures a rank. `--before` measures the
source folder of another checkout, too. Writes results/fsdp_host_memory.md and .json; rows of cases that are not
measured stay. `--cases` without names measures nothing and writes the page again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import machine, sentence

RESULTS, ROOT = Path(__file__).parent / "results", Path(__file__).parents[1]
PROBE = Path(__file__).with_name("fsdp_host_memory_probe.py")
GB, LIMIT, ALLOWANCE = 1e9, 1.2, 10**9

LARGE: Mapping[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
SMALL: Mapping[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ranks and models of a run."""

    name: str
    num_ranks: int
    roles: tuple[str, ...]
    sends: str = "all"
    channel: str = "disk"
    dtype: str = "bfloat16"
    exports: bool = False
    saves: bool = False  # a checkpoint
    lora_rank: int = 0
    bucket_bytes: int = 512 * 2**20  # of the sync; the default of train.update_weight_buffer_size
    fits_before: bool = True  # whether all ranks with whole models fit on a machine of 24 GB


TWO, FOUR = ("policy", "reference"), ("policy", "reference", "critic", "teacher")
CASES = (
    Case(name="2 ranks", num_ranks=2, roles=TWO, exports=True),
    Case(name="2 ranks, rank 0 sends", num_ranks=2, roles=("policy",), sends="rank 0", exports=True),
    Case(name="2 ranks, process group", num_ranks=2, roles=TWO, channel="process_group"),
    Case(name="2 ranks, shared memory", num_ranks=2, roles=TWO, channel="shared_memory"),
    Case(name="4 ranks, process group", num_ranks=4, roles=TWO, channel="process_group", fits_before=False),
    Case(name="4 ranks", num_ranks=4, roles=TWO, exports=True, fits_before=False),
    Case(name="2 ranks, critic and teacher", num_ranks=2, roles=FOUR),
    Case(name="4 ranks, critic and teacher", num_ranks=4, roles=FOUR, fits_before=False),
)


def write_model(folder: Path, shape: Mapping[str, Any], *, vocab_size: int = 32768) -> int:
    """Writes a random Qwen3 in bfloat16, a file for each layer; returns the number of its parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config

    from rlscale.models.char_tokenizer import character_tokenizer

    config = Qwen3Config(
        **shape,
        vocab_size=vocab_size,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(folder)
    character_tokenizer(2048).save_pretrained(str(folder))
    generator, by_tensor, by_file = torch.Generator().manual_seed(0), {}, {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        by_file.setdefault(f"model-{parts[2] if parts[1] == 'layers' else 'rest'}.safetensors", {})[name] = parameter
    for file, parameters in by_file.items():
        tensors = {
            name: torch.randn(p.shape, generator=generator).mul_(0.02).bfloat16() for name, p in parameters.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        by_tensor |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": by_tensor}))
    return sum(parameter.numel() for parameter in model.parameters())


def measure(case: Case, *, model: Path, small: Path, source: Path) -> list[dict[str, float]]:
    """Measurements of all ranks."""
    from rlscale.engines.fake import FakeServer
    from rlscale.engines.ports import free_port
    from rlscale.weights.receiver import EngineReceiver

    with tempfile.TemporaryDirectory() as folder, FakeServer(receiver=EngineReceiver()) as engine:
        arguments = {
            **asdict(case),
            "model": str(model),
            "small_model": str(small),
            "folder": folder,
            "port": free_port("127.0.0.1"),
            "engine_url": engine.url,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-W", "ignore", str(PROBE), json.dumps(arguments)]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(case.num_ranks)
        ]
        try:
            outputs = [rank.communicate(timeout=800)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), f"{case.name}: a rank failed"
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def plan_peak(case: Case, *, model: Path, small: Path) -> float:
    """Peak of a rank in the plan of a run with these models."""
    from rlscale.config import load_config_with_notes
    from rlscale.plan import find_hardware, make_plan

    overrides = [
        "experiment=quickstart",
        "model=hf",
        "model.warmup_experiment=null",
        f"model.hf_checkpoint={model}",
        f"cluster.actor_num_gpus_per_node={case.num_ranks}",
        "cluster.num_gpus_per_node=8",
        "cluster.offload_train=false",
        f"train.weight_channel={case.channel}",
        f"train.update_weight_buffer_size={case.bucket_bytes}",
        f"train.dtype={case.dtype}",
    ]
    if "reference" in case.roles:
        overrides += ["algo.use_kl_loss=true", "algo.kl_loss_coef=0.1"]
    if "critic" in case.roles:
        overrides += ["algo.advantage_estimator=ppo", f"critic.load={small}"]
    if "teacher" in case.roles:
        overrides += ["algo.opd_kl_coef=0.1", f"model.teacher_load={small}"]
    host = make_plan(load_config_with_notes(overrides, to_run=False).config, find_hardware("cpu")).host
    assert host is not None, "the run has trainers on FSDP2"
    return host.peak


def peak(rank: Mapping[str, float]) -> float:
    """Largest memory of a rank up to its first step."""
    return max(rank["peak"], rank["sync_peak"])


def row(result: Mapping[str, Any]) -> str:
    ranks = result["ranks"]
    worst = max(ranks, key=lambda each: peak(each) - LIMIT * each["kept"])
    limit = LIMIT * worst["kept"] + ALLOWANCE
    cells = [
        result["case"]["name"],
        ", ".join(result["case"]["roles"]),
        result["case"].get("channel", "disk"),
        result["code"],
        *(f"{worst[key] / GB:.2f}" for key in ("start", "kept", "peak", "sync_peak")),
        f"{result['planned'] / GB:.2f}" if result["code"] == "now" else "",
        f"{limit / GB:.2f}",
        "yes" if peak(worst) <= limit else "**no**",
        f"{max(each['seconds'] for each in ranks):.0f}",
    ]
    for key in ("sync", "export"):
        growth = [each.get(key) for each in ranks]
        cells += ["", ""] if growth[0] is None else [f"{growth[0] / GB:.2f}", f"{max(growth[1:]) / GB:.2f}"]
    return f"| {' | '.join(cells)} |"


def report(results: list[dict[str, Any]], *, parameters: Sequence[int]) -> str:
    header = (
        "| case | models | channel | code | at the start | keeps | peak: load | first sync | plan | limit | within "
        "| load, s | sync: rank 0 | others | export: rank 0 | others |"
    )
    where = sentence([each["load"] for each in results])
    large, small = (f"{number / GB:.2f}" for number in parameters)
    return "\n".join(
        [
            "# Host memory of FSDP2 ranks",
            "",
            f"{where} Policy and reference: a random Qwen3 of {large} billion parameters, critic and teacher "
            f"of {small} billion; bfloat16 files of one layer each. "
            "GB of anonymous memory (RssAnon) of the rank with the least room, sampled every ms from its start "
            "to the end of the first sync, after which the first step comes; the start is Python with its packages. A "
            "rank keeps its float32 shards of all models. The limit of both peaks is 1.2 x what it keeps + 1 GB. The "
            "plan is the peak that `rlscale-plan` prints. "
            "Sync and export: growth of the peak above the memory before, in the first sync, to one engine with "
            "train.update_weight_buffer_size at its default of 512 MiB, and in an export in Hugging Face format. "
            "Written by `python benchmarks/fsdp_host_memory.py`.",
            "",
            header,
            "|" + "---|" * 16,
            *map(row, results),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="source folder of an older checkout")
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--dry", action="store_true", help="writes no results")
    given = parser.parse_args()
    codes = [("now", ROOT / "src")]
    if given.before:
        codes.insert(0, ("before", given.before))
    kept = json.loads((RESULTS / "fsdp_host_memory.json").read_text())["results"]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        model, small = Path(folder) / "large", Path(folder) / "small"
        parameters = []
        for path, shape in ((model, LARGE), (small, SMALL)):
            path.mkdir()
            parameters.append(write_model(path, shape))
        for case in (each for each in CASES if each.name in given.cases):
            for code, source in codes:
                if code == "before" and not case.fits_before:
                    continue
                load = os.getloadavg()[0]
                ranks = measure(case, model=model, small=small, source=source)
                planned = plan_peak(case, model=model, small=small)
                result = {"case": asdict(case), "code": code, "load": load, "planned": planned, "ranks": ranks}
                sys.stdout.write(row(result) + "\n")
                sys.stdout.flush()
                kept = [each for each in kept if key(each) != key(result)] + [result]
        for each in kept:
            case = next(case for case in CASES if case.name == each["case"]["name"])
            each["planned"] = plan_peak(case, model=model, small=small)
    if not given.dry:
        write_results(sorted(kept, key=key), parameters=parameters)


def key(result: Mapping[str, Any]) -> tuple[int, str]:
    """Position of a row in the table; there is one of each case and code."""
    return [case.name for case in CASES].index(result["case"]["name"]), result["code"]


def write_results(results: list[dict[str, Any]], *, parameters: Sequence[int]) -> None:
    """Writes the page and the measurements."""
    (RESULTS / "fsdp_host_memory.md").write_text(report(results, parameters=parameters))
    content = {"machine": machine(), "results": results}
    (RESULTS / "fsdp_host_memory.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
