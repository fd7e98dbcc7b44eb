"""Offloading of models that share a device."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlscale.config import OffloadMode
from rlscale.errors import ConfigError
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.rank import FsdpRank
from rlscale.training.offload import (
    CpuOffload,
    MemorySaverOffload,
    NoOffload,
    Offloader,
    _memory_saver,
    make_offloader,
    state_tensors,
)
from rlscale.training.spec import CriticSpec, ModelSource, OffloadSpec
from rlscale.types import TrainResult
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec

CPU = torch.device("cpu")
BATCH = make_batch(RAGGED)
ALGO = {"advantage_estimator": "ppo", "use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}
MOVE = OffloadSpec(mode=OffloadMode.move)


def backend(model_path: str, *, offload: OffloadSpec | None, **algo: Any) -> FsdpBackend:
    """A trainer with all roles."""
    source = ModelSource(path=model_path)
    made = spec(
        model_path,
        algo={**ALGO, "opd_kl_coef": 0.1, **algo},
        ref_path=model_path,
        critic=CriticSpec(source=source, lr=1e-3),
        teacher=source,
        offload=offload,
        num_old_policies=1,
    )
    return FsdpBackend(made, rank=0, world_size=1)


def train(trainer: FsdpBackend) -> TrainResult:
    cuts = [[[[0, 1, 2], [3]]], [[[4, 5], [6, 7]]]]
    return trainer.train(BATCH, [plan(BATCH, cut) for cut in cuts])


def device_bytes(trainer: FsdpBackend) -> int:
    """Bytes that the roles of a trainer have on the device."""
    roles = [trainer.policy, trainer.critic, trainer.reference, trainer.teacher]
    # A storage of size 0 is offloaded; its tensors keep their shapes.
    tensors = [p for role in roles if role is not None for p in role.model.parameters()]
    tensors += [t for role in roles[:2] if role is not None for t in state_tensors(role.optimizer)]  # type: ignore[union-attr]
    return sum(_storage(tensor).nbytes() for tensor in tensors)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()


def layer(value: float) -> nn.Linear:
    made = nn.Linear(4, 4, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def is_here(module: nn.Linear) -> bool:
    return module.weight.untyped_storage().nbytes() > 0


@pytest.mark.parametrize("keeps_copies", [True, False])
def test_only_resident_models_have_memory(keeps_copies: bool) -> None:
    offloader, models = CpuOffload(CPU, keeps_copies=keeps_copies), {"a": layer(1.0), "b": layer(2.0), "c": layer(3.0)}
    for name, model in models.items():
        offloader.add(name, model.parameters)
    with offloader.resident("a", "c"):
        assert [is_here(model) for model in models.values()] == [True, False, True]
        models["a"].weight.data.mul_(5)
    with offloader.resident("b"):
        assert [is_here(model) for model in models.values()] == [False, True, False]
        assert torch.equal(models["b"].weight, torch.full((4, 4), 2.0))
    offloader.offload_all()
    assert not any(is_here(model) for model in models.values())
    with offloader.resident("a", "b", "c"):
        assert [model.weight[0, 0].item() for model in models.values()] == [5.0, 2.0, 3.0]


def test_a_frozen_model_is_copied_once_and_again_after_mark_dirty() -> None:
    offloader, model = CpuOffload(CPU, keeps_copies=True), layer(1.0)
    offloader.add("a", model.parameters, is_frozen=True)
    offloader.offload_all()
    with offloader.resident("a"):
        model.weight.data.fill_(2.0)  # without mark_dirty
    offloader.offload_all()
    with offloader.resident("a"):
        assert model.weight[0, 0] == 1.0, "no copy was made"
        model.weight.data.fill_(3.0)
        offloader.mark_dirty("a")
    offloader.offload_all()
    with offloader.resident("a"):
        assert model.weight[0, 0] == 3.0


def test_copies_are_dropped_without_keeps_copies() -> None:
    offloader, model = CpuOffload(CPU, keeps_copies=False), layer(1.0)
    offloader.add("a", model.parameters, is_frozen=True)
    offloader.offload_all()
    with offloader.resident("a"):
        model.weight.data.fill_(2.0)
    offloader.offload_all()
    with offloader.resident("a"):
        assert model.weight[0, 0] == 2.0


@pytest.mark.slow
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("keeps_copies", [True, False])
def test_offloading_changes_no_number_and_frees_all_memory(model_path: str, tmp_path: Path, keeps_copies: bool) -> None:
    offload = OffloadSpec(mode=OffloadMode.move, keeps_copies=keeps_copies)
    plain, moving = backend(model_path, offload=None), backend(model_path, offload=offload)
    assert device_bytes(plain) > 0 and device_bytes(moving) == 0
    for _ in range(3):
        expected, got = train(plain), train(moving)
        assert (got.steps, got.metrics) == (expected.steps, expected.metrics)
        assert device_bytes(moving) == 0
    pairs = list(zip(plain.weights(), moving.weights(), strict=True))
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    moving.offload()
    assert device_bytes(moving) == 0
    moving.save(tmp_path)
    # A loaded trainer offloads, too, and continues exactly.
    again = backend(model_path, offload=offload)
    again.load(tmp_path)
    assert device_bytes(moving) == device_bytes(again) == 0
    assert train(again).steps == train(moving).steps == train(plain).steps


class FakeSaver:
    """Fake memory saver of a process; the real one needs a GPU."""

    def __init__(self) -> None:
        self.memory_margin_bytes, self.calls = 0, list[str]()

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    @contextmanager
    def disable(self) -> Iterator[None]:
        self.calls.append("disable")
        yield
        self.calls.append("enable")


def test_the_memory_saver_pauses_while_no_model_is_resident() -> None:
    saver = FakeSaver()
    offloader: Offloader = MemorySaverOffload(saver, margin_bytes=7)
    offloader.offload_all()
    for _ in range(2):
        with offloader.resident("policy"):
            pass
        with offloader.resident("critic"):
            pass
        offloader.offload_all()
        offloader.offload_all()
    assert saver.calls == ["pause", "resume", "pause", "resume", "pause"]
    assert saver.memory_margin_bytes == 7


@pytest.mark.usefixtures("world")
def test_the_device_is_used_only_while_its_memory_is_mapped(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is made while the saver is paused may lie in unmapped memory, to which CUDA copies nothing."""
    saver, used = FakeSaver(), list[str]()
    monkeypatch.setattr("rlscale.training.offload._memory_saver", lambda: saver)

    def checked(name: str) -> Callable[..., Any]:
        original = getattr(FsdpRank, name)

        def call(*args: Any, **options: Any) -> Any:
            assert saver.calls[-1] == "resume", f"{name} while the memory is unmapped"
            used.append(name)
            return original(*args, **options)

        return call

    names = ("pack_rollout", "gather_metrics", "gather_logprobs", "gather_columns")
    for name in names:
        monkeypatch.setattr(FsdpRank, name, checked(name))
    trainer = backend(model_path, offload=OffloadSpec(mode=OffloadMode.tms))
    assert saver.calls == ["pause"]
    train(trainer)
    trainer.eval_loss(BATCH, [plan(BATCH, [[[0, 1, 2], [3]]])])
    assert set(used) == set(names)
    assert saver.calls == ["pause", "resume", "pause", "resume", "pause"]


def test_the_saver_knows_the_library_that_was_loaded_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("torch_memory_saver")
    # As Megatron-core leaves it.
    package.torch_memory_saver = SimpleNamespace(hook_mode="torch", memory_margin_bytes=0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_memory_saver", package)
    _memory_saver.cache_clear()
    try:
        assert isinstance(make_offloader(OffloadSpec(mode=OffloadMode.tms), device=CPU), MemorySaverOffload)
        assert package.torch_memory_saver.hook_mode == "preload"
    finally:
        _memory_saver.cache_clear()


def test_weights_are_sent_from_memory_that_engines_can_open() -> None:
    saver = FakeSaver()
    offloader = MemorySaverOffload(saver, margin_bytes=0)
    offloader.offload_all()
    with offloader.exportable(), offloader.resident("policy"):
        saver.calls.append("send")
    assert saver.calls == ["pause", "disable", "resume", "send", "enable"]
    for other in (NoOffload(), CpuOffload(CPU, keeps_copies=False)):
        with other.exportable():
            pass


def test_the_spec_selects_the_offloader() -> None:
    assert isinstance(make_offloader(None, device=CPU), NoOffload)
    assert isinstance(make_offloader(MOVE, device=CPU), CpuOffload)
    with pytest.raises(ConfigError, match=r"cluster\.offload_train_mode must be move without torch_memory_saver"):
        make_offloader(OffloadSpec(mode=OffloadMode.tms), device=CPU)


def test_tensors_on_the_host_are_not_moved() -> None:
    # As the moments of CpuAdam on the host, next to parameters on a GPU.
    moments = torch.arange(4.0)
    offloader = CpuOffload(torch.device("meta"), keeps_copies=False)
    offloader.add("policy.optimizer", lambda: [moments])
    offloader.offload_all()
    assert moments.tolist() == [0.0, 1.0, 2.0, 3.0]
    with offloader.resident("policy.optimizer"):
        assert moments.tolist() == [0.0, 1.0, 2.0, 3.0]
