"""Layers for multi-token prediction: tiny models that have them, a plain reference, and the comparison on ranks.

The reference follows the formulas of DeepSeek-V3 (arXiv:2412.19437, section 2.2) sample by sample. Only the decoder
layer inside is that of transformers. Of several layers each takes the normalised state of the one before, as in
Megatron-core.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config
from transformers.core_model_loading import revert_weight_conversion

from rlscale.architectures.architecture import Architecture
from rlscale.config import MegatronConfig, QkvFormat
from rlscale.models.megatron_folder import STATE
from rlscale.models.transformers_aliases import register_aliases
from rlscale.plan.frozen_parameters import NONE_FROZEN
from rlscale.plan.megatron_activations import ParallelSizes
from rlscale.plan.megatron_parameters import rank_parameters, trained_parameters
from rlscale.plan.mtp_layers import MtpLayers
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.megatron.export import write_weights
from rlscale.training.megatron.hf_mapping.export_hf import export_hf
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint, load_hf
from rlscale.training.megatron.model.megatron_model import MTP, MegatronModel, build_model, configure_pipeline
from rlscale.training.megatron.mtp_loss import MtpLoss
from rlscale.training.megatron.optim import zero_gradients
from rlscale.training.megatron.policy import MegatronPolicy
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.megatron.step import forward_backward
from rlscale.training.metrics import MetricSums
from tests.planned_checkpoint import planned_size
from tests.ranks.training.megatron_families import CONFIGS, NEWER, SHARED, write_families
from tests.ranks.training.megatron_ranks import BATCHES, cut, data_ranks, megatron_spec, train, weights_of
from tests.unit.training.rollouts import plan

FACTOR = 0.3
DEPTHS = {"glm4_moe": 2, "glm4_moe_lite": 1, "deepseek_v3": 1, "mimo": 1, "mimo_deep": 1}
"""Layers for multi-token prediction of each model."""

_NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


def mtp_configs() -> dict[str, PreTrainedConfig]:
    """The models by name."""
    own = {
        "deepseek_v3": CONFIGS["deepseek_v3"],
        "mimo": Qwen2Config(**SHARED),
        "mimo_deep": Qwen2Config(**{**SHARED, "num_hidden_layers": 4}),
    }
    return {name: own.get(name) or NEWER[name] for name in DEPTHS}


class PlainLayer(nn.Module):
    """One layer, by its formulas: h' = M [norm(h), norm(embedding)], then a decoder layer and a norm."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        config, last = model.config, model.model.layers[-1]
        width, self.eps = config.hidden_size, config.rms_norm_eps
        self.token_norm, self.hidden_norm, self.out_norm = (nn.Parameter(torch.ones(width)) for _ in range(3))
        self.projection = nn.Parameter(torch.zeros(width, 2 * width))  # of embedding, then hidden state
        self.decoder = type(last)(config, layer_idx=config.num_hidden_layers - 1)

    def forward(self, hidden_LH: Tensor, embedded_LH: Tensor, *, model: nn.Module) -> Tensor:
        both = torch.cat((self._norm(embedded_LH, self.token_norm), self._norm(hidden_LH, self.hidden_norm)), dim=-1)
        x, positions = (both @ self.projection.T)[None], torch.arange(len(both))[None]
        angles = model.model.rotary_emb(x, positions)
        out = self.decoder(x, position_embeddings=angles, position_ids=positions)
        return self._norm((out[0] if isinstance(out, tuple) else out)[0], self.out_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + self.eps).sqrt() * weight

    def tensors(self, k: int, *, model: nn.Module, is_mimo: bool, gradients: bool = False) -> dict[str, Tensor]:
        """The weights, or their gradients, under published names."""
        config = model.config
        index = config.num_hidden_layers + k
        projection = (self.projection.grad if gradients else self.projection.data).clone()
        if is_mimo:  # hidden state, then embedding
            projection = torch.cat(projection.chunk(2, dim=1)[::-1], dim=1)
        vectors = (self.token_norm, self.hidden_norm, self.out_norm)
        token, hidden, out = (each.grad if gradients else each.data for each in vectors)
        prefix = f"model.mtp_layers.{k}" if is_mimo else f"model.layers.{index}"
        found = zip(_MIMO if is_mimo else _NEXTN, (token, hidden, projection, out), strict=True)
        own = {f"{prefix}.{name}.weight": tensor.clone() for name, tensor in found}
        layer = {name: p.grad if gradients else p.data for name, p in self.decoder.named_parameters()}
        layer |= {name: each for name, each in self.decoder.named_buffers() if name.endswith("correction_bias")}
        inner = revert_weight_conversion(model, {f"model.layers.{index}.{name}": t for name, t in layer.items()})
        return own | {name.replace(f"model.layers.{index}", prefix): t.clone() for name, t in inner.items()}


def write_mtp_models(root: Path, names: tuple[str, ...] = tuple(DEPTHS)) -> None:
    """Writes one folder per model, each with random layers for multi-token prediction."""
    write_families(root, {name: config for name, config in mtp_configs().items() if name in names})
    for name in names:
        folder, file = root / name, root / name / "config.json"
        for k, layer in enumerate(plain_layers(str(folder), name)):
            tensors = layer.tensors(k, model=plain_model(str(folder)), is_mimo=name.startswith("mimo"))
            known = load_file(folder / "model.safetensors")
            if not name.startswith("mimo"):
                prefix = f"model.layers.{SHARED['num_hidden_layers'] + k}"
                tensors[f"{prefix}.embed_tokens.weight"] = known["model.embed_tokens.weight"].clone()
                tensors[f"{prefix}.shared_head.head.weight"] = known["lm_head.weight"].clone()
            save_file(known | tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads(file.read_text()) | {"num_nextn_predict_layers": DEPTHS[name]}
        file.write_text(json.dumps(config | {"model_type": name.removesuffix("_deep")}))


@cache
def plain_model(path: str) -> nn.Module:
    """The model of transformers, which ignores the layers for multi-token prediction."""
    register_aliases()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


@cache
def plain_layers(path: str, name: str) -> list[PlainLayer]:
    """Layers with weights of a fixed seed."""
    generator = torch.Generator().manual_seed(11)
    layers = [PlainLayer(plain_model(path)) for _ in range(DEPTHS[name])]
    with torch.no_grad():
        for layer in layers:
            for key, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1 + ("norm" in key))
    return layers


@cache
def reference(path: str, name: str) -> tuple[float, dict[str, Tensor]]:
    """The loss without its factor, and its gradients with it, under published names."""
    model, layers, batch = plain_model(path), plain_layers(path, name), BATCHES[0]
    sums, counts = [torch.zeros(()) for _ in layers], [0] * len(layers)
    for start, stop in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        ids = torch.from_numpy(batch.tokens[start:stop]).long()
        is_target = torch.from_numpy(batch.loss_mask[start:stop]).bool()
        with torch.no_grad():
            hidden = model.model(ids[None]).last_hidden_state[0]
            embedded = model.model.embed_tokens.weight[ids]
        for k, layer in enumerate(layers, start=1):
            if len(ids) <= k:
                break
            # h_i^k for i = 1 .. T - k, from h_i^(k-1) and the embedding of token i + k
            hidden = layer(hidden[: len(ids) - k], embedded[k:], model=model)
            logprobs = (hidden[:-1] @ model.lm_head.weight.detach().T).log_softmax(-1)
            targets, mask = ids[k + 1 :], is_target[k + 1 :]
            sums[k - 1] = sums[k - 1] - logprobs.gather(1, targets[:, None])[:, 0][mask].sum()
            counts[k - 1] += int(mask.sum())
    loss = torch.stack([total / count for total, count in zip(sums, counts, strict=True)]).mean()
    (FACTOR * loss).backward()
    tensors = [
        layer.tensors(k, model=model, is_mimo=name.startswith("mimo"), gradients=True) for k, layer in enumerate(layers)
    ]
    return loss.item(), {key: tensor for each in tensors for key, tensor in each.items()}


@dataclass(frozen=True, kw_only=True)
class MtpCase:
    """A model in a parallel layout."""

    model: str
    sizes: Mapping[str, Any]
    is_padded: bool = False

    def compare(self, root: Path, folder: Path) -> dict[str, Any]:
        """Differences of loss and gradients from the reference, and whether nothing else gets a gradient.

        Args:
            root: folder of the models.
            folder: for an export; does not exist yet.
        """
        path = str(root / self.model)
        core = {"mtp_num_layers": DEPTHS[self.model], "mtp_loss_scaling_factor": FACTOR}
        # Otherwise data-parallel ranks would hold parts of the gradients.
        sizes = {**self.sizes, "use_distributed_optimizer": False, "core_args": self.sizes.get("core_args", {}) | core}
        config = MegatronConfig(**sizes, enable_mtp_training=True)
        spec = megatron_spec(path, config, qkv_format=QkvFormat.bshd if self.is_padded else QkvFormat.thd)
        rank = MegatronRank.join(spec, rank=dist.get_rank(), world_size=dist.get_world_size())
        with rank.computing():
            model = build_model(path, model=spec.model, megatron=config, dtype=torch.float32)
            policy = MegatronPolicy(configure_pipeline(model, rank.dims), rank=rank)
            load_hf(model, path)
            found: dict[str, Any] = {"exported": writes_the_folder(model, path, folder)}
            step = plan(BATCHES[0], cut(data_ranks(config)))
            rollout = rank.pack_rollout(BATCHES[0], [step], with_scoring=False)
            metrics = MetricSums(rank.device, group=rank.dims.data_group)
            loss = MtpLoss(model, policy.head, rollout=rollout, step=0, metrics=metrics)
            zero_gradients(policy.trainable.chunks, policy.trainable.optimizer)

            def stage_loss(micro: Any, hidden: Tensor, decoder: Any) -> Tensor:
                # Stages exchange gradients, as with the loss of the policy.
                return loss(micro, hidden, decoder) + 0.0 * hidden[: len(micro.input_ids)].sum()

            forward_backward(policy.trainable.chunks, rollout.micros[0], loss=stage_loss)
            expected, grads = reference(path, self.model)
            shares = rank.dims.broadcast_from_last_stage(metrics.gather()[0])
            found["loss"] = abs(shares["mtp_loss"] - expected)
            return found | self._compare_gradients(model, grads)

    def _compare_gradients(self, model: Any, expected: Mapping[str, Tensor]) -> dict[str, Any]:
        others = [p.main_grad.abs().max() for name, p in model.named_parameters() if not name.startswith(MTP)]
        with torch.no_grad():
            for _, parameter in model.named_parameters():
                parameter.copy_(parameter.main_grad)
        worst, names = 0.0, set()
        for name, grad in export_hf(model):
            if name in expected:
                names.add(name)
                want = expected[name]
                worst = max(worst, ((grad - want).abs().max() / want.abs().max().clamp(min=1e-3)).item())
        is_complete = names == set(expected) or dist.get_rank() > 0
        return {"grads": worst, "others": max(map(float, others)), "complete": is_complete}


def writes_the_folder(model: MegatronModel, path: str, folder: Path) -> bool:
    """Whether an export is the folder that the model has loaded, byte for byte; engines get all but the copies."""
    sent = {name: tensor.clone() for name, tensor in export_hf(model)}
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    write_weights(model, folder)
    dist.barrier()
    before, after = HfCheckpoint(path), HfCheckpoint(str(folder))
    same = before.files.keys() == after.files.keys()
    same = same and all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.files)
    copies = {name for name in before.files if name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))}
    names = before.files.keys() - copies | {"model.embed_tokens.weight"}
    return same and (dist.get_rank() > 0 or sent.keys() == names)


def train_frozen_and_trained(root: Path, folder: Path) -> dict[str, bool]:
    """Steps of a trainer of two stages: what changes without and with training of the layer, and after a resume."""
    rank, path = dist.get_rank(), str(root / "mimo")
    layers, weights, found = {}, {}, {}
    for is_trained in (False, True):
        config = MegatronConfig(
            pipeline_model_parallel_size=2, enable_mtp_training=is_trained, core_args={"mtp_num_layers": 1}
        )
        # Clipping would scale all gradients by the norm of all of them.
        spec = megatron_spec(path, config, clip_grad=0.0)
        backend = MegatronBackend(spec, rank=rank, world_size=2)
        metrics = train(backend, BATCHES[0], 1)
        found[f"reports {is_trained}"] = ("mtp_loss" in metrics) == is_trained
        found[f"counted {is_trained}"] = _is_counted(backend, path, config)
        own = weights_of(backend)
        layers[is_trained] = {name: own.pop(name) for name in list(own) if ".mtp_layers." in name}
        weights[is_trained] = own
        if is_trained:
            if rank == 0:
                (folder / "saved").mkdir()
            dist.barrier()
            backend.save(folder / "saved")
            found["saved bytes"] = rank > 0 or _is_as_large(folder / "saved", path)
            later = [train(backend, BATCHES[1], 1), weights_of(backend)]
            backend.close()
            backend = MegatronBackend(spec, rank=rank, world_size=2)
            backend.load(folder / "saved")
            again = [train(backend, BATCHES[1], 1), weights_of(backend)]
            found["resumes"] = later[0] == again[0] and _equal(later[1], again[1])
        backend.close()
    checkpoint = HfCheckpoint(path)
    found["frozen"] = _equal(layers[False], {name: checkpoint.tensor(name) for name in layers[False]})
    found["trained"] = all(not torch.equal(layers[True][name], layers[False][name]) for name in layers[True])
    found["same policy"] = _equal(weights[True], weights[False])
    return found | {"has layers": bool(layers[True])}


def _is_counted(backend: MegatronBackend, path: str, config: MegatronConfig) -> bool:
    """Whether the plan counts the parameters of the last stage, which is the fullest."""
    if dist.get_rank() == 0:
        return True
    a = Architecture.from_config_json(json.loads((Path(path) / "config.json").read_text()))
    parallel = ParallelSizes.from_config(config, dist.get_world_size())
    mtp = MtpLayers(number=DEPTHS["mimo"], is_trained=config.enable_mtp_training)
    own = [parameter for _, parameter in backend.policy.model.named_parameters()]
    layers = sum(p.numel() for name, p in backend.policy.model.named_parameters() if name.startswith(MTP))
    # The plan ignores the final norm of a stage.
    whole = sum(p.numel() for p in own) - a.hidden_size
    trained = sum(p.numel() for p in own if p.requires_grad) - a.hidden_size
    return (layers, whole, trained) == (
        mtp.parameters(a),
        rank_parameters(a, parallel, mtp).total,
        trained_parameters(a, parallel, mtp, NONE_FROZEN).total,
    )


def _is_as_large(folder: Path, path: str) -> bool:
    """Whether the tensors of a checkpoint have the bytes of the plan."""
    given = ("train=megatron", "megatron.bf16=false", "megatron.mtp_num_layers=1", "megatron.enable_mtp_training=true")
    size = planned_size(path, *given, "model.use_hf_config_for_megatron=true")
    entries = FileSystemReader(folder / STATE).read_metadata().state_dict_metadata.values()
    tensors = [each for each in entries if isinstance(each, TensorStorageMetadata)]
    return size.total == sum(math.prod(each.size) * each.properties.dtype.itemsize for each in tensors)


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
