"""Compares the plan's memory of a Megatron-core rank with torch's profiler, for shapes the model was not fitted to.

    python benchmarks/megatron_memory.py

Each case is a run on one or two ranks, given by its command-line overrides. `rlscale-plan`'s own code predicts;
`megatron_memory_probe.py` trains two steps and profiles the second, then a weight sync and a checkpoint. Writes
results/megatron_memory.*
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from machine import machine, sentence
from memory_model import HALF, LIMIT, REFERENCE, RESULTS, dense, experts, work
from memory_probe import Case

from rlscale.engines.ports import free_port
from rlscale.plan import find_hardware, make_plan

PROBE = Path(__file__).with_name("megatron_memory_probe.py")
PARTS = ("steady", "step", "sync", "save")
OTHER_MOMENTS = {"sync": "weight sync", "save": "checkpoint"}

TENSORS, SEQUENCES = "tensor_model_parallel_size=2", "sequence_parallel=true"
STAGES, CONTEXT = "pipeline_model_parallel_size=2", "context_parallel_size=2"
SPREAD, WITHIN = "expert_model_parallel_size=2", "expert_tensor_parallel_size=2"
FULL = "recompute_granularity=full"


def case(name: str, overrides: Sequence[str], *divided: str, ranks: int = 2, sample: tuple[int, int]) -> Case:
    """A case whose samples have the given tokens of prompt and response."""
    megatron = ["train=megatron", *(f"megatron.{each}" for each in divided)]
    last = f"cluster.actor_num_gpus_per_node={ranks}"
    return Case(name=name, overrides=[*overrides, *megatron, last], prompt=sample[0], response=sample[1])


GROUPED = dense(4, 320, 832, (10, 2, 32), 1100)
ALIKE = dense(8, 128, 448, (4, 4, 32), 900)
MIXTURE = experts(3, 224, (12, 3, 96), (8, 4, 32))
SENDS_OWN = "train.weight_channel=process_group"

CASES = (
    case("dp2, float32", [*GROUPED, *work(8, 8192)], sample=(40, 160)),
    case("dp2, bfloat16, reference", [*ALIKE, HALF, *REFERENCE, *work(6, 1600)], sample=(30, 130)),
    case("tp2, float32", [*ALIKE, *work(5, 8192)], TENSORS, sample=(60, 190)),
    case("tp2 with sequences, bfloat16", [*GROUPED, HALF, *work(6, 8192)], TENSORS, SEQUENCES, sample=(50, 150)),
    case("pp2, several micro-batches", [*ALIKE, *work(8, 1500)], STAGES, sample=(20, 130)),
    case("pp2, bfloat16, each stage sends", [*ALIKE, HALF, SENDS_OWN, *work(8, 1500)], STAGES, sample=(20, 130)),
    case("cp2, float32", [*GROUPED, *work(3, 4096)], CONTEXT, sample=(80, 560)),
    case("ep2, float32", [*MIXTURE, SENDS_OWN, *work(8, 8192)], SPREAD, sample=(30, 150)),
    case(
        "tp2, experts within, bfloat16", [*MIXTURE, HALF, *work(6, 8192)], TENSORS, SEQUENCES, WITHIN, sample=(30, 150)
    ),
    case("dp2, recomputed", [*GROUPED, *work(12, 8192)], FULL, sample=(40, 160)),
    case("tp2, recomputed, bfloat16", [*ALIKE, HALF, *work(10, 8192)], TENSORS, FULL, sample=(40, 160)),
)


def predict(one: Case) -> dict[str, float]:
    memory = make_plan(one.config(), find_hardware("cpu")).trainer
    assert memory is not None, "there is a trainer"
    phases = {name: sum(parts.values()) for name, parts in memory.phases.items()}
    others = {part: phases.pop(name, 0.0) for part, name in OTHER_MOMENTS.items()}
    return {"steady": memory.steady, "step": max(phases.values()), **others}


def measure(one: Case) -> dict[str, float]:
    """The maximum over the ranks, for each part. Each rank is a process."""
    ranks = one.config().cluster.actor_num_gpus_per_node
    port = free_port("127.0.0.1")
    command = [sys.executable, "-W", "ignore", str(PROBE), json.dumps(asdict(one))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the profiler reports its own memory there
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in running]
    assert all(process.returncode == 0 for process in running), f"{one.name} failed"
    found = [json.loads(text.splitlines()[-1]) for text in outputs]
    for each in found:
        each["steady"] = each["weights"] + each["optimizer"] + each["reference"]
    return {part: max(each[part] for each in found) for part in PARTS}


def row(one: Case) -> dict[str, Any]:
    predicted, measured = predict(one), measure(one)
    errors = {part: predicted[part] / measured[part] - 1 for part in PARTS}
    about = {"case": one.name, "overrides": list(one.overrides), "prompt": one.prompt, "response": one.response}
    return {**about, "predicted": predicted, "measured": measured, "errors": errors}


def table(rows: list[dict[str, Any]]) -> str:
    names = {"steady": "steady", "step": "step", "sync": "weights to engines", "save": "checkpoint"}
    lines = [
        "| case | " + " | ".join(f"{name}: plan | measured | error" for name in names.values()) + " |",
        "|---" * (1 + 3 * len(names)) + "|",
    ]
    for each in rows:
        cells = [each["case"]]
        for part in names:
            cells += [f"{each[side][part] / 1e6:.2f}" for side in ("predicted", "measured")]
            cells.append(f"{100 * each['errors'][part]:+.1f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    load = os.getloadavg()[0]
    rows = [row(one) for one in CASES]
    worst = {part: max((abs(each["errors"][part]) for each in rows), default=0.0) for part in PARTS}
    largest = ", ".join(f"{part} {100 * error:.1f} %" for part, error in worst.items())
    text = (
        f"# Memory of a trainer rank on Megatron-core: the plan compared with torch's profiler\n\n{sentence([load])} "
        "MB of "
        "the fullest of two ranks. Steady: weights, optimizer, reference. The others are the peak of a phase in "
        "addition, with the gradients, which stay allocated: of an optimizer step, of a weight sync, of a "
        f"checkpoint. None of these shapes was used to fit the model. Largest errors: {largest}; limit "
        f"{100 * LIMIT:.0f} %. Made by `python benchmarks/megatron_memory.py`.\n\n{table(rows)}\n"
    )
    (RESULTS / "megatron_memory.md").write_text(text)
    content = {"machine": machine(), "load": load, "cases": rows}
    (RESULTS / "megatron_memory.json").write_text(json.dumps(content, indent=1) + "\n")
    sys.stdout.write(text)
    sys.exit(0 if max(worst.values()) <= LIMIT else f"an error is above {LIMIT:.0%}")


if __name__ == "__main__":
    main()
