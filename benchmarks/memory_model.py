"""Compares the plan's memory of a trainer rank with torch's profiler, for shapes that the model was not fitted to.

    python benchmarks/memory_model.py

Each case is a run, given by its command-line overrides. `rlscale-plan`'s own code predicts; `memory_probe.py` builds
the model, trains two steps with the trainer's FSDP2 backend on one or two ranks, and profiles the second. Writes
results/memory_model.*
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from machine import machine, sentence
from memory_probe import Case, Measured

from rlscale.plan import find_hardware, make_plan

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LIMIT = 0.10


def dense(layers: int, hidden: int, mlp: int, heads: tuple[int, int, int], vocabulary: int) -> list[str]:
    """Overrides for a Qwen3; `heads`: query heads, key heads, head width."""
    return [
        "model=tiny_qwen3",
        f"model.num_layers={layers}",
        f"model.hidden_size={hidden}",
        f"model.intermediate_size={mlp}",
        *_heads(heads),
        f"model.vocab_size={vocabulary}",
    ]


def experts(layers: int, hidden: int, sizes: tuple[int, int, int], heads: tuple[int, int, int]) -> list[str]:
    """Overrides for a Qwen3 with experts; `sizes`: experts, experts per token, width of an expert."""
    number, chosen, width = sizes
    return [
        "model=tiny_qwen3_moe",
        f"model.num_layers={layers}",
        f"model.hidden_size={hidden}",
        f"model.num_experts={number}",
        f"model.num_experts_per_tok={chosen}",
        f"model.moe_intermediate_size={width}",
        *_heads(heads),
        "model.vocab_size=500",
    ]


def _heads(heads: tuple[int, int, int]) -> list[str]:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return [f"model.{name}={number}" for name, number in zip(names, heads, strict=True)]


def work(prompts: int, tokens: int, *, ranks: int = 1) -> list[str]:
    """Overrides for groups of four and micro-batches of at most `tokens`, on `ranks` ranks."""
    return [
        f"batch.rollout_batch_size={prompts}",
        "batch.n_samples_per_prompt=4",
        f"batch.max_tokens_per_gpu={tokens}",
        f"cluster.actor_num_gpus_per_node={ranks}",
        "cluster.num_gpus_per_node=4",
    ]


HALF, RECOMPUTE = "train.dtype=bfloat16", "fsdp.gradient_checkpointing=true"
SHARED = ["fsdp.context_parallel_size=2"]
REFERENCE = ["algo.use_kl_loss=true", "algo.kl_loss_coef=0.1", "algo.kl_loss_type=k3"]

CASES = (
    Case(
        name="dense, float32",
        overrides=[*dense(6, 192, 512, (6, 3, 32), 2000), *work(6, 8192)],
        prompt=20,
        response=140,
    ),
    Case(
        name="dense, bfloat16, several micro-batches",
        overrides=[*dense(5, 320, 900, (5, 5, 64), 600), HALF, *work(6, 2000)],
        prompt=30,
        response=200,
    ),
    Case(
        name="dense, float32, recomputed",
        overrides=[*dense(10, 256, 704, (8, 2, 32), 3000), RECOMPUTE, *work(5, 8192)],
        prompt=50,
        response=150,
    ),
    Case(
        name="vocabulary of 20,000, bfloat16",
        overrides=[*dense(4, 256, 640, (4, 2, 64), 20_000), HALF, *work(4, 1500)],
        prompt=60,
        response=190,
    ),
    Case(
        name="vocabulary of 32,000, 40 million parameters",
        overrides=[*dense(8, 512, 1408, (8, 4, 64), 32_000), *work(4, 4096)],
        prompt=64,
        response=192,
    ),
    Case(
        name="experts, float32",
        overrides=[*experts(5, 160, (12, 3, 112), (5, 5, 32)), *work(6, 8192)],
        prompt=25,
        response=125,
    ),
    Case(
        name="experts, bfloat16, recomputed",
        overrides=[*experts(6, 224, (10, 4, 96), (7, 7, 32)), HALF, RECOMPUTE, *work(8, 4096)],
        prompt=40,
        response=200,
    ),
    Case(
        name="short samples, bfloat16",
        overrides=[*dense(3, 160, 448, (5, 1, 32), 300), HALF, *work(24, 8192)],
        prompt=10,
        response=42,
    ),
    Case(
        name="two ranks, reference, bfloat16, two micro-batches",
        overrides=[*dense(6, 256, 720, (4, 4, 64), 1200), HALF, *REFERENCE, *work(8, 1600, ranks=2)],
        prompt=40,
        response=160,
    ),
    Case(
        name="two ranks, experts, float32",
        overrides=[*experts(4, 192, (8, 2, 160), (6, 2, 32)), *work(8, 8192, ranks=2)],
        prompt=30,
        response=170,
    ),
    Case(
        name="two ranks share samples, float32",
        overrides=[*dense(5, 256, 640, (4, 2, 64), 900), *SHARED, *work(2, 2048, ranks=2)],
        prompt=100,
        response=900,
    ),
    Case(
        name="two ranks share samples, bfloat16, recomputed",
        overrides=[*dense(8, 192, 512, (6, 3, 32), 3000), HALF, RECOMPUTE, *SHARED, *work(1, 3200, ranks=2)],
        prompt=200,
        response=1400,
    ),
)

OTHERS: dict[str, Any] = {
    "hidden_size": 224,
    "intermediate_size": 600,
    "num_hidden_layers": 5,
    "num_attention_heads": 7,
    "num_key_value_heads": 7,
    "head_dim": 32,
    "vocab_size": 1800,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MIXTURE = {
    "n_routed_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 88,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "use_qk_norm": True,
}
CASES += (
    Case(name="Llama, float32", overrides=work(5, 8192), prompt=30, response=150, family="llama", hf_fields=OTHERS),
    Case(
        name="GLM-4, bfloat16",
        overrides=[HALF, *work(5, 8192)],
        prompt=30,
        response=150,
        family="glm4",
        hf_fields=OTHERS,
    ),
    Case(
        name="GLM-4.5 with experts, bfloat16",
        overrides=[HALF, *work(6, 8192)],
        prompt=50,
        response=110,
        family="glm4_moe",
        hf_fields={**OTHERS, **MIXTURE},
    ),
)


def predict(case: Case) -> Measured:
    """The same parts from the plan."""
    memory = make_plan(case.config(), find_hardware("cpu")).trainer
    return Measured(
        weights=round(memory.weights),
        optimizer=round(memory.optimizer),
        reference=round(memory.reference),
        step=round(memory.step),
    )


def measure(case: Case) -> Measured:
    """The fullest rank of a case. Each rank is a process."""
    ranks = case.config().cluster.actor_num_gpus_per_node
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] if ranks > 1 else 0
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = [
        [sys.executable, str(HERE / "memory_probe.py"), json.dumps(asdict(case)), str(rank), str(ranks), str(port)]
        for rank in range(ranks)
    ]
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate()[0] for process in running]
    assert all(process.returncode == 0 for process in running), f"{case.name} failed"
    return max((Measured(**json.loads(text.splitlines()[-1])) for text in outputs), key=lambda each: each.total)


def row(case: Case) -> dict[str, Any]:
    predicted, measured = predict(case), measure(case)
    return {
        "case": case.name,
        "overrides": list(case.overrides),
        "prompt": case.prompt,
        "response": case.response,
        "predicted": vars(predicted),
        "measured": vars(measured),
        "error_of_step": predicted.step / measured.step - 1,
        "error": predicted.total / measured.total - 1,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| case | steady: plan | measured | step: plan | measured | error of the step | of the sum |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        sides = [each["predicted"], each["measured"]]
        steady = [(sum(side.values()) - side["step"]) / 1e6 for side in sides]
        step = [side["step"] / 1e6 for side in sides]
        cells = [*(f"{number:.2f}" for number in (*steady, *step))]
        errors = [f"{100 * each[name]:+.1f} %" for name in ("error_of_step", "error")]
        lines.append(f"| {each['case']} | " + " | ".join([*cells, *errors]) + " |")
    return "\n".join(lines)


def main() -> None:
    load = os.getloadavg()[0]
    rows = [row(case) for case in CASES]
    worst = max(abs(each[name]) for each in rows for name in ("error", "error_of_step"))
    text = (
        f"# Memory of a trainer rank: the plan compared with torch's profiler\n\n{sentence([load])} "
        "MB of the fullest rank. "
        "Steady: weights, optimizer, reference. Step: the peak of an optimizer step in addition. None of these "
        f"shapes was used to fit the model. Largest error: {100 * worst:.1f} %, limit {100 * LIMIT:.0f} %. "
        f"Made by `python benchmarks/memory_model.py`.\n\n{table(rows)}\n"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory_model.md").write_text(text)
    (RESULTS / "memory_model.json").write_text(json.dumps({"machine": machine(), "cases": rows}, indent=1) + "\n")
    sys.stdout.write(text)
    sys.exit(0 if worst <= LIMIT else f"an error is above {LIMIT:.0%}")


if __name__ == "__main__":
    main()
