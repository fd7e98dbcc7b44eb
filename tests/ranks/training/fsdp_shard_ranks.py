"""Program of the three ranks of `test_fsdp_shards.py`: loads, exports and sends the shards of several models.

python -m tests.ranks.training.fsdp_shard_ranks <rank> <port> <models as JSON> <folder> <engines as JSON>

Three ranks divide most tensors unevenly. Engines are URLs: two accept every format of weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import rlscale.training.fsdp.export as export_module
from rlscale.config import LoraConfig
from rlscale.models.hf_models import load_causal_lm
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.export import ShardedExporter, export_hf
from rlscale.training.fsdp.shards import persistent_buffers
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint
from rlscale.training.optim.muon import local_shard
from rlscale.training.spec import CriticSpec, ModelSource, TrainerSpec, WeightOwners
from rlscale.types import EngineAddress
from tests.ranks.training.megatron_push_ranks import DELTA, DISK, GROUP, arrives, one_owner_fails, open_channel
from tests.unit.training.rollouts import spec

NUM_RANKS = 3
SMALL_BUCKET = 3000  # bytes: gives several rounds, and some weights are larger
LORA = LoraConfig(rank=2, alpha=8)
PUSHED = {"tied": GROUP, "untied": DELTA, "experts": DISK, "latent": GROUP}


def build(path: str, rank: int, **changes: Any) -> FsdpBackend:
    return FsdpBackend(spec(path, **changes), rank=rank, world_size=NUM_RANKS)


def full_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every parameter and buffer in full; a collective."""
    found = {name: p.detach().full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return found | dict(model.named_buffers())


def equals(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())


def loaded(path: str, backend: FsdpBackend) -> bool:
    """Whether the shards are those of transformers' loading, and no tensor is left on the meta device."""
    whole = load_causal_lm(path, dtype=torch.float32)
    expected = {name: p.detach() for name, p in whole.named_parameters()} | dict(whole.named_buffers())
    return equals(full_weights(backend.policy.model), expected)


def exported(backend: FsdpBackend, path: str, to: WeightOwners) -> dict[str, Any]:
    """The weights of each rank by published name, compared with the files."""
    exporter = ShardedExporter(backend.policy.model, dtype=torch.float32, to=to, bucket_bytes=SMALL_BUCKET)
    found = {name: tensor.clone() for name, tensor in exporter.weights()}
    checkpoint = HfCheckpoint(path)
    names: list[list[str]] = [[]] * NUM_RANKS
    dist.all_gather_object(names, list(found))
    return {
        "same": all(torch.equal(tensor, checkpoint.tensor(name)) for name, tensor in found.items()),
        "names": names,
        "wanted": list(checkpoint.files),
        "senders": list(exporter.senders),
        "bytes": sum(tensor.nbytes for tensor in found.values()),
        "most": max(tensor.nbytes for tensor in found.values()) if found else 0,
        "peak": exporter.plan.peak_bytes(dist.get_rank()),
    }


def written(backend: FsdpBackend, path: str, folder: Path, *, limit: int) -> dict[str, Any]:
    """A folder that all ranks write, because the model is larger than `limit`."""
    export_module.ONE_WRITER_BYTES = limit
    export_module.MAX_FILE_BYTES = 20 * SMALL_BUCKET
    export_hf(backend.policy.model, folder, source=path, dtype=torch.float32)
    theirs, ours = (AutoModelForCausalLM.from_pretrained(each) for each in (path, folder))
    before, after = HfCheckpoint(path), HfCheckpoint(str(folder))
    return {
        "loads": equals(dict(ours.named_parameters()), dict(theirs.named_parameters())),
        "same": before.files.keys() == after.files.keys()
        and all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.files),
        "files": sorted(file.name for file in folder.iterdir()),
    }


def adapted(path: str, rank: int) -> dict[str, bool]:
    """Adapters on three ranks: drawn as on one, and merged alike by both ways to gather."""
    backend = build(path, rank, lora=LORA)
    with torch.no_grad():
        for name, parameter in backend.policy.model.named_parameters():
            if ".lora_B." in name:
                local_shard(parameter).fill_(0.1)
    drawn = {name: t for name, t in full_weights(backend.policy.model).items() if ".lora_A." in name}
    on_all, spread = (
        ShardedExporter(backend.policy.model, dtype=torch.float32, to=to, bucket_bytes=SMALL_BUCKET)
        for to in (WeightOwners.every, WeightOwners.owners)
    )
    expected = dict(on_all.weights())
    return {
        "drawn": equals(drawn, drawn_on_one(path)),
        "merged": all(torch.equal(expected[name], tensor) for name, tensor in spread.weights()),
        "changed": any(not torch.equal(t, HfCheckpoint(path).tensor(name)) for name, t in expected.items()),
    }


def drawn_on_one(path: str) -> dict[str, Tensor]:
    """Factors A that peft draws in a model whose weights are loaded."""
    from rlscale.training.modules.lora import add_adapters

    model = load_causal_lm(path, dtype=torch.float32)
    add_adapters(model, LORA, seed=spec(path).train.seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if ".lora_A." in name}


def roles(models: dict[str, str], rank: int) -> dict[str, bool]:
    """Critic and teacher from other files than the policy."""
    critic = CriticSpec(source=ModelSource(path=models["tied"]), lr=1e-3)
    made: TrainerSpec = spec(
        models["untied"],
        algo={"advantage_estimator": "ppo", "opd_kl_coef": 0.1},
        critic=critic,
        teacher=ModelSource(path=models["untied"]),
    )
    backend = FsdpBackend(made, rank=rank, world_size=NUM_RANKS)
    assert backend.critic is not None and backend.teacher is not None
    of_critic, of_teacher = full_weights(backend.critic.model), full_weights(backend.teacher.model)
    whole = {name: p.detach() for name, p in load_causal_lm(models["tied"], dtype=torch.float32).named_parameters()}
    head = of_critic.pop("lm_head.weight")
    return {
        "critic": all(torch.equal(of_critic[name], tensor) for name, tensor in whole.items()),
        "head": head.shape[0] == 1 and not head.any(),
        "teacher": equals(of_teacher, full_weights(backend.policy.model)),
    }


def main(rank: int, port: int, models: dict[str, str], folder: Path, urls: list[str]) -> None:
    engines = [EngineAddress(name=f"engine {i}", url=url) for i, url in enumerate(urls)]
    join_world(rank, NUM_RANKS, "127.0.0.1", port, "gloo", 60.0)
    report: dict[str, Any] = {}
    for name, path in models.items():
        backend = build(path, rank, weight_owners=WeightOwners.owners)
        model = backend.policy.model
        owners = ShardedExporter(model, dtype=torch.float32, to=WeightOwners.owners, bucket_bytes=SMALL_BUCKET)
        report[name] = {
            "loaded": loaded(path, backend),
            "buffers": [key for key, _ in persistent_buffers(model)],
            "exported": {to: exported(backend, path, to) for to in WeightOwners},
            "written": written(backend, path, folder / name, limit=1000),
        }
        if name in PUSHED:
            channel = open_channel(PUSHED[name], rank=rank, senders=owners.senders, folder=folder)
            report[name]["pushed"] = arrives(channel, owners, path, engines)
        if name == "experts":
            report["failure"] = one_owner_fails(owners, path, engines, rank=rank, folder=folder)
    whole = build(models["tied"], rank)
    report["one file"] = written(whole, models["tied"], folder / "one", limit=10**9)
    report["adapters"] = adapted(models["untied"], rank)
    report["roles"] = roles(models, rank)
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]), json.loads(sys.argv[5]))
    # All results are on disk. Threads of torch.distributed sometimes abort the interpreter at exit.
    os._exit(0)
