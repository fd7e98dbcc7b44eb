"""Models with images on Megatron-core: their names, positions and angles are those of transformers."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from rlscale.architectures.family import find_family
from rlscale.architectures.vision import VisionLayout, rotary_rows
from rlscale.config import MegatronConfig, ModelBuild, ModelConfig
from rlscale.models.image_processor import load_image_processor
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint
from rlscale.training.megatron.hf_mapping.mapping import map_weights
from rlscale.training.megatron.model.cpu_patches import megatron_device
from rlscale.training.megatron.model.model_inputs import PackingOptions, pack_samples
from rlscale.training.megatron.model.rotary import ImageRotaryEmbedding, inverse_frequencies
from rlscale.training.megatron.model.transformer_config import load_architecture
from rlscale.training.megatron.model.vision import TOWER, build_tower
from rlscale.training.packing.context_parallel import ContextGroup
from rlscale.training.packing.microbatch import pack
from tests.tiny_vision import VISION_BUILDS, write_tiny_vision
from tests.unit.training.fsdp.test_vision import image_batch

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("build", VISION_BUILDS)
def test_the_mapping_has_every_tensor_of_the_checkpoint_once(build: ModelBuild, tmp_path: Path) -> None:
    folder = write_tiny_vision(build, tmp_path)
    model = ModelConfig(use_hf_config_for_megatron=True)
    architecture = load_architecture(folder, model=model, megatron=MegatronConfig(), dtype=torch.float32)
    weights = [mapped.weight for mapped in map_weights(architecture)]
    checkpoint = HfCheckpoint(folder)
    assert sorted(name for weight in weights for name in weight.hf) == sorted(checkpoint.files)
    assert architecture.vision_config is not None
    with megatron_device():
        tower = build_tower(architecture.vision_config, config=architecture.transformer)
    parameters = {f"{TOWER}{name}": parameter for name, parameter in tower.named_parameters()}
    towers = {weight.megatron: weight.hf for weight in weights if weight.megatron.startswith(TOWER)}
    assert towers.keys() == parameters.keys()
    assert all(checkpoint.tensor(name).shape == parameters[ours].shape for ours, (name,) in towers.items())


@pytest.mark.parametrize(
    ("build", "kind"),
    [(VISION_BUILDS[0], Qwen2_5_VLRotaryEmbedding), (VISION_BUILDS[1], Qwen3VLTextRotaryEmbedding)],
)
def test_angles_are_those_of_transformers(build: ModelBuild, kind: type, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_tiny_vision(build, tmp_path))
    text, vision = config.get_text_config(), find_family(config.model_type).vision
    assert vision is not None
    positions = torch.randint(0, 500, (3, 1, 40), generator=torch.Generator().manual_seed(1))
    cos, sin = kind(text)(torch.zeros(1), positions)
    sections = VisionLayout.from_config_json(config.to_dict()).rotary_sections
    with megatron_device():
        rows = rotary_rows(sections, interleaved=vision.interleaved_rotary)
        embedding = ImageRotaryEmbedding(inverse_frequencies(text, head_dim=16), rows)
    angles = embedding(positions, sections)
    assert angles.shape == (40, 1, 1, 16)
    assert torch.equal(angles[:, 0, 0].cos(), cos[0]) and torch.equal(angles[:, 0, 0].sin(), sin[0])


@pytest.mark.parametrize("build", VISION_BUILDS)
def test_padding_moves_images_with_their_samples(build: ModelBuild, tmp_path: Path) -> None:
    processor = load_image_processor(write_tiny_vision(build, tmp_path))
    batch = image_batch(processor)
    options = PackingOptions(device=CPU, processor=processor)
    expected = pack(batch, range(6), device=CPU, processor=processor)
    # Samples of one length limit: only the last one is padded.
    found = pack_samples(batch, range(6), options=options, num_positions=150)
    assert found.params is not None and found.params.images is not None and expected.images is not None
    num_tokens = expected.input_ids.shape[1]
    assert found.position_ids.shape == (4, 1, 150) and found.input_ids.shape == (1, 150)
    assert torch.equal(found.position_ids[..., :num_tokens], expected.position_ids)
    assert torch.equal(found.input_ids[:, :num_tokens], expected.input_ids)
    for name in ("pixels", "grids", "rows", "features"):
        assert torch.equal(getattr(found.params.images, name), getattr(expected.images, name))
    # Tensor-parallel ranks with sequence parallelism have features of their part of the positions.
    whole, own = found.params.images, []
    for part in range(3):
        shared = pack_samples(batch, range(6), options=replace(options, multiple=3, part=part), num_positions=150)
        assert shared.params is not None and shared.params.images is not None
        images = shared.params.images
        assert torch.equal(images.pixels, whole.pixels) and (images.rows < 50).all()
        own.append((images.rows + 50 * part, images.features))
    assert torch.equal(torch.cat([rows for rows, _ in own]), whole.rows)
    assert torch.equal(torch.cat([features for _, features in own]), whole.features)
    # A stage without the tower has the positions alone.
    later = pack_samples(batch, range(6), options=PackingOptions(device=CPU, processor=processor, has_tower=False))
    assert later.params is not None and later.params.images is None
    assert np.array_equal(later.position_ids, expected.position_ids)


@pytest.mark.parametrize("build", VISION_BUILDS)
def test_context_parallel_ranks_have_features_of_their_chunks(build: ModelBuild, tmp_path: Path) -> None:
    processor = load_image_processor(write_tiny_vision(build, tmp_path))
    batch, features = image_batch(processor), []
    expected = pack(batch, range(6), device=CPU, processor=processor).images
    for index, part in product(range(2), range(2)):  # sequence parallelism divides the chunks of a rank
        group = ContextGroup(index=index, size=2, group=None)  # type: ignore[arg-type]  # packing does not communicate
        options = PackingOptions(device=CPU, processor=processor, context=group, multiple=2, part=part)
        micro = pack_samples(batch, range(6), options=options)
        assert micro.params is not None and micro.params.images is not None and expected is not None
        images = micro.params.images
        own = micro.input_ids[0].chunk(2)[part]
        assert (own[images.rows] == processor.layout.image_token).all()
        features.append(images.features)
        # Positions are those of all ranks.
        assert micro.position_ids.shape == (4, 1, 2 * micro.input_ids.shape[1])
        assert torch.equal(micro.params.positions, micro.position_ids[0, 0])
    assert torch.equal(torch.cat(features).sort().values, expected.features.sort().values)


def test_a_rank_without_samples_computes_the_blank_image(tmp_path: Path) -> None:
    processor = load_image_processor(write_tiny_vision(VISION_BUILDS[1], tmp_path))
    micro = pack_samples(image_batch(processor), [], options=PackingOptions(device=CPU, processor=processor))
    assert micro.params is not None and micro.params.images is not None
    assert len(micro.params.images.grids) == 1 and len(micro.params.images.rows) == 0
