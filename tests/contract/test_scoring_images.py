"""Logprobs of answers about images, which a teacher of distillation is asked for."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlscale.config import ModelBuild, RunConfig, load_config
from rlscale.data.batch import build_batch
from rlscale.driver.open_teachers import find_unusable_servers
from rlscale.engines.client.teacher_client import TeacherClient
from rlscale.errors import EngineError
from rlscale.models.image_processor import load_image_processor
from rlscale.rollout.teacher_grading import TeacherChoice, TeacherGrading
from rlscale.types import EngineAddress, Group, Sample, SampleStatus
from tests.contract.conftest import Target, open_embedded, sglang_launch
from tests.tiny_vision import VISION_BUILDS, open_image, write_tiny_vision
from tests.unit.engines.embedded.test_vision import prompt_of, response_logprobs


@contextmanager
def open_sglang(model: Path, folder: Path) -> Iterator[str]:
    address, process = replace(sglang_launch(model), reads_images=True).open(folder)
    process.start()
    try:
        process.wait_ready(timeout_s=300)
        yield address.url
    finally:
        process.stop()


@contextmanager
def open_ours(model: Path, folder: Path) -> Iterator[str]:
    with open_embedded(folder, write=lambda _: model) as target:
        yield target.url


def open_server(kind: str, model: Path, folder: Path) -> AbstractContextManager[str]:
    return {"embedded": open_ours, "sglang": open_sglang}[kind](model, folder)


@pytest.fixture(
    scope="module",
    params=[
        ("embedded", ModelBuild.tiny_qwen3_vl),
        pytest.param(("embedded", ModelBuild.tiny_qwen2_5_vl), marks=pytest.mark.nightly),
        pytest.param(("sglang", ModelBuild.tiny_qwen3_vl), marks=pytest.mark.nightly),
    ],
    ids="-".join,
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a server, and the folder of its model."""
    kind, build = request.param
    folder = tmp_path_factory.mktemp("teacher")
    model = Path(write_tiny_vision(build, folder))
    with open_server(kind, model, folder) as url:
        yield url, model


def teacher_config(url: str) -> RunConfig:
    words = ["+experiment=quickstart_vision", "model.warmup_experiment=null", "algo.opd_kl_coef=1.0"]
    return load_config([*words, f"model.teacher_url={url}"])


def make_group(model: Path) -> Group:
    """Answers to a text, to a picture, and to two others: in packed order, which is by length."""
    processor = load_image_processor(str(model))
    images = [
        open_image(processor, 16, 16),
        open_image(processor, 24, 16, seed=3),
        open_image(processor, 16, 16, seed=5),
    ]
    samples = []
    for index, own in enumerate([[], images[2:], images[:2]]):
        prompt = prompt_of(processor, *own)
        sample = Sample(index=index, group_index=0, prompt=prompt, seed=0, status=SampleStatus.completed, reward=0.0)
        sample.append([5 + index, 9, 7], logprobs=[-1.0] * 3, weight_versions=[0] * 3)
        sample.images = prompt.images
        samples.append(sample)
    return Group(index=0, prompt=samples[0].prompt, samples=samples)


async def test_logprobs_are_those_of_the_model(served: tuple[str, Path]) -> None:
    url, model = served
    group, client = make_group(model), TeacherClient(EngineAddress(name="teacher", url=url), timeout_s=60)
    await TeacherGrading(TeacherChoice(default=client, by_source={}), max_retries=0).grade(group)
    await client.close()
    assert not group.failed, group.failed[0].failure
    batch = build_batch([group], 0)
    assert batch.teacher is not None
    found = batch.teacher.logprobs[batch.loss_mask != 0]
    np.testing.assert_allclose(found, response_logprobs(str(model), batch, 3), atol=1e-5)
    # The pictures count: without them the answers have other logprobs.
    texts = replace(batch, images=(), prompt_lens=np.ones(3, np.int32))
    assert np.abs(found - response_logprobs(str(model), texts, 3))[3:].max() > 1e-4


def test_a_server_that_reads_images_is_accepted(served: tuple[str, Path]) -> None:
    assert not find_unusable_servers(teacher_config(served[0]))


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server of a model that reads text only."""
    with open_embedded(tmp_path_factory.mktemp("blind")) as target:
        yield target


def test_a_server_without_images_is_found_before_the_start(blind: Target) -> None:
    (problem,) = find_unusable_servers(teacher_config(blind.url))
    assert str(problem) == (
        f"model.teacher_url must name a teacher that reads images, as data.multimodal_keys is set, got {blind.url}; "
        "serve another model"
    )


async def test_a_server_without_images_refuses_them(blind: Target, tmp_path: Path) -> None:
    sample = make_group(Path(write_tiny_vision(VISION_BUILDS[1], tmp_path))).samples[-1]
    client = TeacherClient(EngineAddress(name="teacher", url=blind.url), timeout_s=60)
    with pytest.raises(EngineError, match="the model of this server reads no images"):
        await client.score(sample.tokens.tolist(), start=sample.prompt_len, images=sample.images)
    await client.close()
