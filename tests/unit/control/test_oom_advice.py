"""Advice for out-of-memory errors; other errors stay as they are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlscale.config import RunConfig
from rlscale.config.load import load_config_with_notes
from rlscale.control.oom_advice import is_out_of_memory, with_memory_advice
from rlscale.errors import EngineError, WorkerError

SIZES = {"prefill": 2, "decode": 4}


def config(*overrides: str) -> RunConfig:
    return load_config_with_notes(overrides, to_run=False).config


def advice(error: Exception, *overrides: str) -> str:
    return str(with_memory_advice(error, config(*overrides)))


def test_messages_of_torch_and_numpy() -> None:
    with pytest.raises(RuntimeError) as by_torch:
        torch.empty(2**60)
    with pytest.raises(MemoryError) as by_numpy:
        np.empty(2**60, np.int8)
    assert is_out_of_memory(f"RuntimeError: {by_torch.value}")
    assert is_out_of_memory(f"MemoryError: {by_numpy.value}")


@pytest.mark.parametrize(
    "text",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "engine 0 ended with status 1; log: engine_0.log\nterminate called: std::bad_alloc",
        "Task was killed due to the node running low on memory.",
    ],
)
def test_messages_of_other_libraries(text: str) -> None:
    assert is_out_of_memory(text)


def test_another_error_is_unchanged() -> None:
    error = WorkerError("actor rank 0", "ValueError: memory of an elephant")
    assert with_memory_advice(error, config()) is error


def oom(worker: str, cause: str = "OutOfMemoryError: CUDA out of memory", **fields: Any) -> WorkerError:
    return WorkerError(worker, cause, **fields)


def test_a_trainer_names_the_keys_of_its_activations() -> None:
    text = advice(oom("actor rank 1"))
    assert "lower batch.max_tokens_per_gpu (now 8192)" in text and "fsdp.gradient_checkpointing=true" in text
    assert "batch.micro_batch_size" not in text and "sglang" not in text
    static = advice(oom("actor rank 1"), "batch.use_dynamic_batch_size=false", "batch.micro_batch_size=4")
    assert "lower batch.micro_batch_size (now 4)" in static and "max_tokens_per_gpu" not in static
    saving = advice(oom("actor rank 1"), "fsdp.gradient_checkpointing=true")
    assert "gradient_checkpointing" not in saving


def test_a_trainer_that_shares_its_gpus_names_the_share_of_the_engines() -> None:
    overrides = ("experiment=qwen3_4b_grpo", "cluster=one_node_colocate", "rollout=sglang")
    assert "lower sglang.mem_fraction_static (now SGLang's default)" in advice(oom("actor rank 1"), *overrides)


def test_an_engine_names_the_keys_of_its_cache() -> None:
    text = advice(oom("engine 0"))
    assert "lower rollout.num_slots (now 128), or lower rollout.max_response_len (now 6)" in text
    assert "batch" not in text
    overrides = ("rollout=sglang", "sglang.mem_fraction_static=0.5")
    full = advice(EngineError("engine 0: /generate: 500 CUDA out of memory"), *overrides)
    assert "lower sglang.mem_fraction_static (now 0.5)" in full and "sglang.chunked_prefill_size" in full
    small = advice(
        oom("engine 0", "RuntimeError: Not enough memory. Please increase --mem-fraction-static"), *overrides
    )
    assert "raise sglang.mem_fraction_static (now 0.5)" in small


def test_engines_of_two_sizes_are_named_with_both(tmp_path: Path) -> None:
    groups = [{"worker_type": name, "num_gpus": 4, "num_gpus_per_engine": size} for name, size in SIZES.items()]
    file = tmp_path / "engines.yaml"
    file.write_text(json.dumps({"sglang": [{"name": "actor", "server_groups": groups}]}))
    text = advice(oom("engine 0", "Not enough memory"), "rollout=sglang", "model=qwen3_4b", f"sglang.config={file}")
    assert "raise num_gpus_per_engine in the file of sglang.config (now 2 for prefill and 4 for decode)" in text


def test_a_killed_process_may_have_been_killed_for_memory() -> None:
    error = oom("engine 0", "engine 0 ended with status -9; the end of its log", failed_at_s=2.0, died=True)
    advised = with_memory_advice(error, config())
    assert isinstance(advised, WorkerError) and (advised.failed_at_s, advised.died) == (2.0, True)
    assert "if the kernel killed it because it was out of memory" in str(
        advised
    ) and ": lower rollout.num_slots" in str(advised)


def test_the_machine_or_the_gpu() -> None:
    on_cpu, on_gpu = config("cluster.device=cpu"), config("cluster.device=cuda")
    assert "the memory of its machine is used up" in str(with_memory_advice(oom("engine 0"), on_cpu))
    assert "the memory of its GPU is used up" in str(with_memory_advice(oom("engine 0"), replace(on_gpu)))
