"""A scheduler with a tiny model, without HTTP."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.engines.embedded.load_decoder import load_codec, load_decoder
from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.embedded.scheduler_options import SchedulerOptions
from rlscale.engines.embedded.weight_store import WeightStore
from rlscale.engines.server.generate_request import Answer, GenerateRequest
from rlscale.types import SamplingParams
from tests.tiny_model import EOS_ID, write_tiny_qwen3

OpenScheduler = Callable[..., Scheduler]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def open_scheduler(model_path: Path) -> Iterator[OpenScheduler]:
    opened: list[Scheduler] = []

    def open_one(receiver: Any = None, path: Path = model_path, **options: Any) -> Scheduler:
        decoder, _ = load_decoder(
            str(path), no_transformers, dtype=torch.float32, device=torch.device("cpu"), max_context_len=None
        )
        weights = WeightStore(decoder.weights, decoder.aliases, receiver=receiver, checksum=None, version="0")
        settings = {"num_slots": 8, "num_threads": 1, "eos_ids": frozenset({EOS_ID}), **options}
        codec = load_codec(path)
        decode = None if codec is None else codec.decode
        opened.append(Scheduler(decoder, weights, SchedulerOptions(**settings), decode=decode))
        opened[-1].start()
        return opened[-1]

    yield open_one
    for scheduler in opened:
        scheduler.close()


def no_transformers(path: str) -> Any:
    raise AssertionError(f"{path} must be loaded without transformers")


_number = 0


def make_request(input_ids: list[int], *, n: int = 1, **params: Any) -> GenerateRequest:
    global _number
    _number += 1
    return GenerateRequest(
        rid=f"r{_number}", input_ids=tuple(input_ids), params=SamplingParams(**params), n=n, return_logprob=True
    )


def generate(scheduler: Scheduler, input_ids: list[int], *, n: int = 1, **params: Any) -> list[Answer]:
    return scheduler.submit(make_request(input_ids, n=n, **params)).result(timeout=60)
