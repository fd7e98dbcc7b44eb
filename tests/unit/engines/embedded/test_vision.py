"""Generation from images: the logprobs of the trainer, and features that follow the weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlscale.config import ModelBuild
from rlscale.data.batch import build_batch
from rlscale.engines.embedded.embedded_service import EmbeddedService
from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.server.generate_request import Answer, BadRequest, Limits, parse_generate
from rlscale.images import Image
from rlscale.models.hf_models import load_causal_lm
from rlscale.models.image_processor import ImageProcessor, load_image_processor
from rlscale.training.attention.packed import PACKED_ATTENTION
from rlscale.training.fsdp.step import compute_policy_terms
from rlscale.training.fsdp.vision import use_vision_forward
from rlscale.training.packing.microbatch import pack
from rlscale.trajectory import Trajectory
from rlscale.types import Group, Prompt, Sample, SampleStatus, TrainBatch
from tests.tiny_vision import VISION_BUILDS, open_image, write_tiny_vision
from tests.unit.engines.embedded.conftest import OpenScheduler, make_request
from tests.unit.engines.embedded.test_scheduler import ScriptedReceiver, bucket_of

LIMITS = Limits(vocab_size=109, max_context_len=1024, has_images=True)


def prompt_of(processor: ImageProcessor, *images: Image) -> Prompt:
    start, image, tokens = processor.layout.start_token, processor.layout.image_token, [2, 30]
    for _ in images:
        tokens += [start, image, start + 1]
    ids = processor.layout.expand([*tokens, 31, 4], [each.grid for each in images])
    return Prompt(index=0, text="", token_ids=ids, images=images)


def answers_to(scheduler: Scheduler, prompt: Prompt, *, n: int = 1, **params: Any) -> list[Answer]:
    request = make_request(list(prompt.token_ids), n=n, **{"max_new_tokens": 6, "ignore_eos": True, **params})
    return scheduler.submit(replace(request, images=prompt.images)).result(timeout=60)


def trainer_logprobs(folder: str, prompt: Prompt, answers: list[Answer], weights: dict[str, Any] | None = None) -> Any:
    """Logprobs of the generated tokens by the model of the trainer, sample by sample."""
    samples = []
    for index, answer in enumerate(answers):
        sample = Sample(index=index, group_index=0, prompt=prompt, seed=index, status=SampleStatus.completed)
        sample.append(answer.output_ids, logprobs=answer.logprobs, weight_versions=[0] * len(answer.output_ids))
        samples.append(replace(sample, reward=0.0))
    batch = build_batch([Group(index=0, prompt=prompt, samples=samples)], 0)
    terms = response_logprobs(folder, batch, len(samples), weights)
    return np.split(terms, np.cumsum([len(answer.output_ids) for answer in answers])[:-1])


def response_logprobs(folder: str, batch: TrainBatch, num_samples: int, weights: dict[str, Any] | None = None) -> Any:
    """Logprobs of all response tokens by the model of the trainer."""
    model = load_causal_lm(folder, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    if weights is not None:
        model.load_state_dict(weights)
    use_vision_forward(model)
    processor = load_image_processor(folder)
    micro = pack(batch, range(num_samples), device=torch.device("cpu"), share_prompts=True, processor=processor)
    with torch.no_grad():
        terms = compute_policy_terms(model, micro, temperature=1.0, entropy_grad=False)
    return terms.logprobs.numpy()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("build", VISION_BUILDS)
@pytest.mark.slow
def test_logprobs_equal_those_of_the_trainer(
    build: ModelBuild, deterministic: bool, open_scheduler: OpenScheduler, tmp_path: Path
) -> None:
    folder = write_tiny_vision(build, tmp_path)
    processor = load_image_processor(folder)
    scheduler = open_scheduler(path=Path(folder), deterministic=deterministic, eos_ids=frozenset())
    # Prompts with two, one and no image are computed in one batch of the engine.
    wide, small = open_image(processor, 32, 16), open_image(processor, 16, 16, seed=2)
    prompts = [prompt_of(processor, wide, small), prompt_of(processor, small), prompt_of(processor)]
    futures = [
        scheduler.submit(
            replace(make_request(list(prompt.token_ids), n=3, max_new_tokens=6, sampling_seed=5), images=prompt.images)
        )
        for prompt in prompts
    ]
    for prompt, future in zip(prompts, futures, strict=True):
        answers = future.result(timeout=60)
        expected = trainer_logprobs(folder, prompt, answers)
        for answer, own in zip(answers, expected, strict=True):
            np.testing.assert_allclose(answer.logprobs, own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("build", VISION_BUILDS)
@pytest.mark.slow
def test_turns_with_later_images_have_the_logprobs_of_the_trainer(
    build: ModelBuild, open_scheduler: OpenScheduler, tmp_path: Path
) -> None:
    folder = write_tiny_vision(build, tmp_path)
    processor = load_image_processor(folder)
    scheduler = open_scheduler(path=Path(folder), eos_ids=frozenset())
    prompt = prompt_of(processor, open_image(processor, 16, 16))
    trajectory = Trajectory(id=0, group_index=0, prompt=prompt, seed=0)
    for turn, size in enumerate([(32, 16), (16, 24), None]):
        whole = replace(prompt, token_ids=tuple(trajectory.token_ids()), images=trajectory.images())
        (answer,) = answers_to(scheduler, whole, sampling_seed=turn)
        versions = [0] * len(answer.output_ids)
        trajectory.extend(answer.output_ids, logprobs=answer.logprobs, weight_versions=versions, sampled=True)
        if size is not None:
            # As a tool that returns an image.
            result = prompt_of(processor, open_image(processor, *size, seed=turn))
            number = trajectory.extend(result.token_ids)
            trajectory.turns[number].images = result.images
    (sample,) = trajectory.samples()
    assert len(sample.images) == 3 and sample.loss_mask.sum() == 18
    sample = replace(sample, status=SampleStatus.completed, reward=0.0)
    batch = build_batch([Group(index=0, prompt=prompt, samples=[sample])], 0)
    is_sampled = sample.loss_mask.astype(bool)
    expected = response_logprobs(folder, batch, 1)
    np.testing.assert_allclose(sample.rollout_logprobs[is_sampled], expected, rtol=0, atol=1e-5)


def test_a_request_that_is_computed_again_continues_with_its_image(
    open_scheduler: OpenScheduler, tmp_path: Path
) -> None:
    folder = write_tiny_vision(ModelBuild.tiny_qwen3_vl, tmp_path)
    processor = load_image_processor(folder)
    prompt = prompt_of(processor, open_image(processor, 32, 32))
    scheduler = open_scheduler(path=Path(folder), eos_ids=frozenset())
    (whole,) = answers_to(scheduler, prompt, sampling_seed=3, max_new_tokens=12)
    # As after an abort: the tokens so far are part of the next prompt.
    (rest,) = answers_to(
        scheduler, replace(prompt, token_ids=(*prompt.token_ids, *whole.output_ids[:-1])), temperature=0.0
    )
    longer = replace(prompt, token_ids=(*prompt.token_ids, *whole.output_ids[:-1]))
    (expected,) = trainer_logprobs(folder, longer, [rest])
    np.testing.assert_allclose(rest.logprobs, expected, rtol=0, atol=1e-5)


def test_features_are_computed_again_after_an_update(open_scheduler: OpenScheduler, tmp_path: Path) -> None:
    folder, receiver = write_tiny_vision(ModelBuild.tiny_qwen3_vl, tmp_path), ScriptedReceiver()
    processor = load_image_processor(folder)
    prompt = prompt_of(processor, open_image(processor, 32, 16))
    scheduler = open_scheduler(receiver=receiver, path=Path(folder), eos_ids=frozenset())
    (before,) = answers_to(scheduler, prompt, temperature=0.0)
    generator = torch.Generator().manual_seed(1)
    receiver.tensors = {
        name: weight + 0.1 * torch.randn(weight.shape, generator=generator) * (".visual." in name)
        for name, weight in scheduler.weights._weights.items()
    }
    scheduler.call(scheduler.weights.begin).result()
    scheduler.call(lambda: scheduler.weights.receive(bucket_of(receiver.tensors), "g")).result()
    scheduler.call(scheduler.weights.end).result()
    (after,) = answers_to(scheduler, prompt, temperature=0.0)
    assert before.logprobs != after.logprobs
    weights = {**receiver.tensors, "lm_head.weight": receiver.tensors["model.language_model.embed_tokens.weight"]}
    (expected,) = trainer_logprobs(folder, prompt, [after], weights)
    np.testing.assert_allclose(after.logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("build", VISION_BUILDS)
def test_fixed_batches_of_images_have_the_bits_of_each_alone(
    build: ModelBuild, open_scheduler: OpenScheduler, tmp_path: Path
) -> None:
    folder = write_tiny_vision(build, tmp_path)
    processor, tower = load_image_processor(folder), open_scheduler(path=Path(folder))._decoder.tower
    assert tower is not None
    images = [open_image(processor, width, 16, seed=seed) for seed, width in enumerate([16] * 20 + [32] * 3)]
    together = tower.features(images, state=0, is_fixed=True)
    assert len(together) == 23
    for place in (0, 15, 16, 19, 22):
        image = images[place]
        alone = tower.features([image], state=place + 1, is_fixed=True)[image.digest]
        assert [torch.equal(*each) for each in zip(together[image.digest], alone, strict=True)].count(False) == 0
    free = tower.features(images, state=-1, is_fixed=False)
    for digest, parts in together.items():
        assert [part.shape for part in parts] == [part.shape for part in free[digest]]
        assert all(torch.allclose(*each, rtol=0, atol=1e-5) for each in zip(parts, free[digest], strict=True))


@pytest.fixture
def service(open_scheduler: OpenScheduler, tmp_path: Path) -> EmbeddedService:
    folder = write_tiny_vision(ModelBuild.tiny_qwen3_vl, tmp_path)
    scheduler = open_scheduler(path=Path(folder))
    tower = scheduler._decoder.tower
    assert tower is not None
    return EmbeddedService(scheduler, LIMITS, facts={}, open_images=tower.open)


def body_of(prompt: Prompt, **fields: Any) -> dict[str, Any]:
    urls = [image.data_url() for image in prompt.images]
    sampling = {"max_new_tokens": 2, "ignore_eos": True}
    return {"input_ids": list(prompt.token_ids), "image_data": urls, "sampling_params": sampling, **fields}


async def test_a_service_reads_the_images_of_a_request(service: EmbeddedService, tmp_path: Path) -> None:
    processor = load_image_processor(write_tiny_vision(ModelBuild.tiny_qwen3_vl, tmp_path))
    prompt = prompt_of(processor, open_image(processor, 16, 16))
    ([request], _) = parse_generate(body_of(prompt), LIMITS)
    (answer,) = await service.generate(request)
    assert len(answer.output_ids) == 2


WRONG: list[tuple[Callable[[Prompt], dict[str, Any]], str]] = [
    (lambda prompt: body_of(prompt, image_data=["/etc/passwd"]), "image_data must hold data URLs"),
    (lambda prompt: body_of(prompt, image_data=7), "image_data must hold data URLs"),
    (lambda prompt: body_of(prompt, image_data=["data:image/png;base64,AAAA"]), "image_data must fit the prompt"),
    (lambda prompt: body_of(prompt, input_ids=[1, 2]), "image 1 must have 4 placeholder tokens, got runs of"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
@pytest.mark.slow
async def test_images_that_do_not_fit_the_prompt_are_refused(
    make: Callable[[Prompt], dict[str, Any]], message: str, service: EmbeddedService, tmp_path: Path
) -> None:
    processor = load_image_processor(write_tiny_vision(ModelBuild.tiny_qwen3_vl, tmp_path))
    prompt = prompt_of(processor, open_image(processor, 16, 16))
    with pytest.raises(BadRequest, match=message):
        ([request], _) = parse_generate(make(prompt), LIMITS)
        await service.generate(request)


def test_a_server_of_a_text_model_refuses_images() -> None:
    body = {"input_ids": [1], "image_data": ["data:image/png;base64,AAAA"]}
    with pytest.raises(BadRequest, match="the model of this server reads no images"):
        parse_generate(body, replace(LIMITS, has_images=False))
