"""Samples with images: the logits and gradients of transformers' own forward, packed and with shared prompts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlscale.config import ModelBuild
from rlscale.errors import DataError
from rlscale.images import Image
from rlscale.models.hf_models import load_causal_lm
from rlscale.models.image_processor import ImageProcessor, load_image_processor
from rlscale.training.attention.packed import PACKED_ATTENTION
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.step import compute_logits
from rlscale.training.fsdp.vision import use_vision_forward
from rlscale.training.packing.microbatch import Microbatch, pack
from rlscale.training.spec import ModelSource
from rlscale.types import TrainBatch
from tests.tiny_vision import VISION_BUILDS, open_image, write_tiny_vision
from tests.unit.training.rollouts import make_batch, plan, spec

CPU = torch.device("cpu")


def samples(processor: ImageProcessor) -> list[tuple[list[int], tuple[Image, ...]]]:
    """Tokens and images: two answers to one prompt, a prompt that differs in its picture alone, two images, none."""
    first, other = open_image(processor, 24, 16), open_image(processor, 24, 16, seed=3)
    wide = open_image(processor, 16, 8, seed=5)
    start, image = processor.layout.start_token, processor.layout.image_token

    def ids(tokens: Sequence[int], images: Sequence[Image]) -> list[int]:
        return list(processor.layout.expand(tokens, [each.grid for each in images]))

    one = ids([2, start, image, 106, 30, 31], [first])
    return [
        # The second answer contains a placeholder that the model generated.
        ([*one, 40, 41, 42], (first,)),
        ([*one, 40, image, 43, 44], (first,)),
        ([*one, 40, 41, 42], (other,)),
        ([*ids([2, start, image, 106, 9, start, image, 106], [first, wide]), 50], (first, wide)),
        ([2, 20, 21, 22, 23], ()),
        ([*one, 40, 60], (first,)),
    ]


def image_batch(processor: ImageProcessor) -> TrainBatch:
    known = samples(processor)
    prompts = [len(ids) - num for (ids, _), num in zip(known, (3, 4, 3, 1, 2, 2), strict=True)]
    batch = make_batch([(prompt, len(ids) - prompt) for prompt, (ids, _) in zip(prompts, known, strict=True)])
    tokens = np.concatenate([np.asarray(ids, np.int32) for ids, _ in known])
    return replace(batch, tokens=tokens, images=tuple(images for _, images in known))


def reference_logits(model: PreTrainedModel, batch: TrainBatch, micro: Microbatch, processor: ImageProcessor) -> Tensor:
    """Forward of transformers for each sample by itself, in packed order. [R, V]"""
    rows = []
    for i in micro.sample_indices:
        start, stop = batch.offsets[i], batch.offsets[i + 1]
        ids = torch.from_numpy(batch.tokens[start:stop].astype(np.int64))[None]
        images: dict[str, Any] = {}
        if batch.images[i]:
            grids = torch.tensor([image.grid for image in batch.images[i]])
            pixels = np.concatenate([processor.pixels(image) for image in batch.images[i]])
            types = (ids == processor.layout.image_token).int()
            images = {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": grids, "mm_token_type_ids": types}
        trainable = np.flatnonzero(batch.loss_mask[start:stop])
        rows.append(model(input_ids=ids, use_cache=False, **images).logits[0, trainable - 1])
    return torch.cat(rows)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("build", VISION_BUILDS)
@pytest.mark.slow
def test_packed_samples_equal_the_forward_of_transformers(build: ModelBuild, share: bool, tmp_path: Path) -> None:
    folder = write_tiny_vision(build, tmp_path)
    processor = load_image_processor(folder)
    batch = image_batch(processor)
    chosen = [0, 2, 3, 4, 5]  # transformers refuses the generated placeholder of sample 1
    micro = pack(batch, chosen, device=CPU, share_prompts=share, processor=processor)
    assert micro.images is not None
    # Three pictures of 24, 24 and 8 patches, each once, and the blank one.
    assert micro.images.pixels.shape[0] == 24 + 24 + 8 + 4
    packed = load_causal_lm(folder, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    alone = load_causal_lm(folder, dtype=torch.float32, attn_implementation="sdpa")
    assert packed.config.text_config._attn_implementation == PACKED_ATTENTION
    assert use_vision_forward(packed)
    got, expected = compute_logits(packed, micro), reference_logits(alone, batch, micro, processor)
    if micro.entries is not None:
        got = micro.entries.expanded(got)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, a), b in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("build", VISION_BUILDS)
def test_shared_prompts_and_generated_placeholders_keep_the_logits(build: ModelBuild, tmp_path: Path) -> None:
    folder = write_tiny_vision(build, tmp_path)
    processor = load_image_processor(folder)
    batch = image_batch(processor)
    model = load_causal_lm(folder, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    use_vision_forward(model)
    plain = pack(batch, range(6), device=CPU, processor=processor)
    shared = pack(batch, range(6), device=CPU, share_prompts=True, processor=processor)
    # Samples 0, 1 and 5 share prompt and first token; sample 2 has the same tokens and another picture.
    assert shared.input_ids.shape[1] == plain.input_ids.shape[1] - 24
    assert plain.images is not None and shared.images is not None
    assert len(plain.images.rows) - len(shared.images.rows) == 12
    expanded = compute_logits(model, shared)
    if shared.entries is not None:
        expanded = shared.entries.expanded(expanded)
    torch.testing.assert_close(expanded, compute_logits(model, plain), atol=1e-5, rtol=1e-5)


def test_a_sample_with_other_placeholders_than_its_image_stops_the_run(tmp_path: Path) -> None:
    processor = load_image_processor(write_tiny_vision(ModelBuild.tiny_qwen3_vl, tmp_path))
    batch = image_batch(processor)
    larger = open_image(processor, 32, 32)
    wrong = replace(batch, images=((larger,), *batch.images[1:]))
    with pytest.raises(DataError, match=r"sample 0 .* image 1 must have 16 placeholder tokens, got runs of \[6\]"):
        pack(wrong, [0], device=CPU, processor=processor)
    lost = replace(batch, images=((), *batch.images[1:]))
    with pytest.raises(DataError, match=r"sample 0 .* its prompt has 6 placeholder tokens, and no image"):
        pack(lost, [0], device=CPU, processor=processor)
    # Such a token in an answer was sampled: it is text.
    pack(replace(lost, prompt_lens=np.minimum(batch.prompt_lens, 2)), [0], device=CPU, processor=processor)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("build", VISION_BUILDS)
@pytest.mark.slow
def test_frozen_parts_keep_their_weights_and_all_others_change(build: ModelBuild, tmp_path: Path) -> None:
    folder = write_tiny_vision(build, tmp_path)
    processor = load_image_processor(folder)
    batch = image_batch(processor)
    chosen = [[[*range(6)], []]]  # the second micro-batch has no samples

    def changed(**fields: Any) -> set[str]:
        trainer = FsdpBackend(spec(folder, lr=1e-2, **fields), rank=0, world_size=1)
        before = {name: weight.clone() for name, weight in trainer.weights()}
        trainer.train(batch, [plan(batch, chosen)])
        return {
            name.split("visual.")[-1] for name, weight in trainer.weights() if not torch.equal(weight, before[name])
        }

    exported = tmp_path / "exported"
    FsdpBackend(spec(folder), rank=0, world_size=1).export_hf(exported)
    assert load_image_processor(str(exported)).pixels(batch.images[0][0]).shape == (24, 96)
    towers, everything = r"\.visual\.(?!.*merger)", changed()
    assert {"patch_embed.proj.weight", "merger.norm.weight" if "qwen3" in build else "merger.ln_q.weight"} <= everything
    frozen = changed(freeze_params=[towers])
    assert not any(name.startswith(("patch_embed", "blocks", "pos_embed")) for name in frozen)
    assert any("merger" in name for name in frozen)
    assert not any("merger" in name for name in changed(freeze_params=[towers, "merger"]))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("build", "kind", "chunk"),
    [(VISION_BUILDS[0], "top_k", -1), (VISION_BUILDS[0], "full", 2), (VISION_BUILDS[1], "full", 2)],
)
@pytest.mark.slow
def test_the_divergence_from_a_teacher_reads_images(build: ModelBuild, kind: str, chunk: int, tmp_path: Path) -> None:
    path, other = write_tiny_vision(build, tmp_path), write_tiny_vision(build, tmp_path, seed=1)
    processor = load_image_processor(path)
    batch = replace(image_batch(processor), rewards=np.zeros(6, np.float32))
    algo = {"opd_kl_coef": 0.5, "opd_kl": kind, "opd_top_k": 3, "calculate_per_token_loss": True}
    made = spec(path, algo=algo, teacher=ModelSource(path=other), log_probs_chunk_size=chunk)
    trainer = FsdpBackend(made, rank=0, world_size=1)
    # Before the step the gradient is that of the teacher alone: all rewards are 0.
    result = trainer.train(batch, [plan(batch, [[[0, 1, 2], [3, 4, 5]]])]).steps[0]
    micro = pack(batch, range(6), device=CPU, processor=processor)
    models = [load_causal_lm(each, dtype=torch.float32, attn_implementation=PACKED_ATTENTION) for each in (path, other)]
    for model in models:
        use_vision_forward(model)
    log_p, log_q = (torch.log_softmax(compute_logits(model, micro), dim=-1) for model in models)
    log_q = log_q.detach()
    if kind == "top_k":
        top = log_q.topk(3, dim=-1).indices
        chosen = [x.exp().gather(1, top) for x in (log_p, log_q)]
        log_p, log_q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1).log() for x in chosen)
    mean = (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()
    (0.5 * mean).backward()
    mean = mean.detach()
    norm = torch.stack([p.grad.norm() for p in models[0].parameters() if p.grad is not None]).norm()
    assert result["teacher_kl"] == pytest.approx(float(mean), rel=1e-4) and float(mean) > 1e-4
    assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
