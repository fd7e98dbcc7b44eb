"""Checks of model folders, hub ids and checkpoints before Ray starts."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlscale.architectures.hf_config import read_config_json
from rlscale.checkpoint.weight_folders import is_bare_weights
from rlscale.config import ModelConfig, RunConfig, TrainBackendName, load_config
from rlscale.driver.preflight.model_sources import (
    check_adapters,
    check_policy,
    check_roles,
    check_start,
    check_trained_parameters,
)
from rlscale.driver.trainer_spec import model_source, starting_weights
from rlscale.models.megatron_folder import torch_dist_folder
from rlscale.models.parameter_names import folder_parameters, merged_by_megatron, tiny_parameters
from rlscale.models.resolve_model import resolve_model
from tests.unit.config.rules.valid_config import config_with
from tests.weight_files import write_no_weights


def make_weights(folder: Path) -> Path:
    """The file by which a folder in Megatron-core's format is recognised."""
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


def config(load: Path, backend: TrainBackendName = TrainBackendName.megatron) -> RunConfig:
    return config_with({"train.backend": backend, "checkpoint.load": str(load)})


def test_the_format_of_megatron_core_is_found_in_each_of_its_places(tmp_path: Path) -> None:
    ours = make_weights(tmp_path / "ours" / "torch_dist")
    assert torch_dist_folder(tmp_path / "ours") == torch_dist_folder(ours) == ours
    theirs = make_weights(tmp_path / "theirs" / "iter_0000012")
    make_weights(tmp_path / "theirs" / "iter_0000011")
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert torch_dist_folder(tmp_path / "theirs") == torch_dist_folder(theirs) == theirs
    released = make_weights(tmp_path / "released" / "release")
    (tmp_path / "released" / "latest_checkpointed_iteration.txt").write_text("release")
    assert torch_dist_folder(tmp_path / "released") == released


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", '{"sharded_backend": "zarr"}'])
def test_other_formats_are_not(content: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(content)
    assert torch_dist_folder(tmp_path) is None and torch_dist_folder(tmp_path / "nowhere") is None


def test_a_run_starts_from_bare_weights(tmp_path: Path) -> None:
    make_weights(tmp_path / "torch_dist")
    assert check_start(config(tmp_path)) == []
    assert starting_weights(config(tmp_path)) == tmp_path
    source = model_source(str(tmp_path), key="model.ref_load", base="/base")
    assert (source.path, source.checkpoint) == ("/base", tmp_path)


def test_a_run_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "rollout_00000003"
    make_weights(folder / "torch_dist")
    (folder / "checkpoint.json").write_text(json.dumps({"format": 1, "rollout_id": 3, "state": {}}))
    for load in (folder, tmp_path):
        assert not is_bare_weights(str(load)) and starting_weights(config(load)) is None
        assert check_start(config(load)) == []


def test_fsdp_does_not_read_the_format_of_megatron_core(tmp_path: Path) -> None:
    make_weights(tmp_path / "torch_dist")
    (problem,) = check_start(config(tmp_path, TrainBackendName.fsdp))
    assert str(problem) == (
        f"checkpoint.load must be a Hugging Face folder or a checkpoint of a run with train.backend=fsdp, got "
        f"{tmp_path}; it is in Megatron-core's format; convert it: rlscale-convert {tmp_path} <new folder>"
    )


def test_a_folder_that_is_neither_is_refused(tmp_path: Path) -> None:
    (problem,) = check_start(config(tmp_path))
    assert str(problem) == (
        "checkpoint.load must name a Hugging Face folder, a checkpoint of a run or a folder in Megatron-core's format "
        f"(torch_dist), got {str(tmp_path)!r}; it has no config.json, no checkpoint.json and no "
        "torch_dist/metadata.json; check the path"
    )
    unfinished = tmp_path / "rollout_00000003.saving"
    unfinished.mkdir()
    (problem,) = check_start(config(unfinished))
    assert "that save was never completed" in str(problem)


def test_a_field_that_the_checkpoint_contradicts_has_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 7, "architectures": ["Qwen3ForCausalLM"]}', "utf-8")
    write_no_weights(tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").touch()
    run = load_config(["experiment=quickstart", "model=qwen3_4b", f"model.hf_checkpoint={tmp_path}"])
    (found,) = check_policy(run)
    assert (found.path, found.value) == ("model.num_layers", "36")
    assert found.rule == f"be 7, as in config.json of '{tmp_path}'"


def hf_folder(folder: Path, *, model_type: str = "qwen3", architecture: str = "Qwen3ForCausalLM") -> Path:
    """The files by which a folder is a model with weights and tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [architecture]}))
    write_no_weights(folder / "model.safetensors")
    (folder / "tokenizer.json").touch()
    return folder


def named(folder: Path | str, **values: object) -> RunConfig:
    return config_with({"model.build": None, "model.hf_checkpoint": str(folder), **values})


def test_a_model_needs_config_weights_and_tokenizer(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model")
    assert check_policy(named(folder, **{"model.max_position_embeddings": None})) == []
    for name, text in (
        ("tokenizer.json", "have a tokenizer, got "),
        ("model.safetensors", "be a folder with weights, got "),
        ("config.json", "be a Hugging Face checkpoint, got "),
    ):
        (folder / name).unlink()
        (problem,) = check_policy(named(folder))
        assert str(problem).startswith(f"model.hf_checkpoint must {text}")


def test_a_tokenizer_of_the_starting_weights(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (problem,) = check_policy(config_with({"checkpoint.load": str(folder)}))
    assert str(problem).startswith("checkpoint.load must have a tokenizer, got ")


def test_a_known_family_needs_its_own_class(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", architecture="Qwen3ForSequenceClassification")
    (problem,) = check_policy(named(folder))
    assert "must be a causal language model that transformers supports" in str(problem)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_hub_id_must_be_cached_without_a_network(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert check_policy(named("some/model")) == []
    monkeypatch.setenv(variable, "true")
    (problem,) = check_policy(named("some/model"))
    assert str(problem) == (
        f"model.hf_checkpoint must be in the local cache of Hugging Face with {variable}=true, got some/model; "
        f"download it where there is a network (hf download some/model), or unset {variable}"
    )
    cached = tmp_path / "models--some--model" / "snapshots" / "1"
    cached.parent.mkdir(parents=True)
    hf_folder(cached)
    assert check_policy(named("some/model", **{"model.max_position_embeddings": None})) == []


def test_a_source_of_several_models_is_reported_once(tmp_path: Path) -> None:
    values = {"model.ref_load": str(tmp_path / "gone"), "algo.use_kl_loss": True}
    assert check_roles(named(tmp_path / "gone", **values)) == []
    (problem,) = check_roles(named(tmp_path / "other", **values))
    assert problem.path == "model.ref_load"


@pytest.mark.slow
def test_other_models_read_the_images_of_the_policy(tmp_path: Path) -> None:
    config_json = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 5,
        "vision_start_token_id": 4,
        "vision_config": {"patch_size": 16},
        "text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}},
    }
    folders = {name: hf_folder(tmp_path / name) for name in ("policy", "same", "finer", "text")}
    for name in ("policy", "same"):
        (folders[name] / "config.json").write_text(json.dumps(config_json))
    (folders["finer"] / "config.json").write_text(json.dumps({**config_json, "vision_config": {"patch_size": 14}}))
    images = {"data.multimodal_keys": {"image": "images"}, "model.max_position_embeddings": None}
    for name, number in (("same", 0), ("finer", 1), ("text", 1)):
        path = str(folders[name])
        values = {**images, "algo.opd_kl_coef": 0.5, "model.teacher_load": path}
        found = check_roles(named(folders["policy"], **values))
        assert [each.path for each in found] == ["model.teacher_load"] * number
        assert check_roles(named(folders["policy"], **{**values, "data.multimodal_keys": None})) == []
    values = {**images, "model.ref_load": str(folders["text"]), "algo.use_kl_loss": True}
    (problem,) = check_roles(named(folders["policy"], **values))
    assert str(problem) == (
        f"model.ref_load must name a qwen3_vl model with the policy's patches and tokens, got {folders['text']}; "
        "choose one that reads the same images, or remove data.multimodal_keys"
    )


def test_a_broken_checkpoint_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text("no JSON")
    (problem,) = check_start(config(tmp_path))
    assert str(problem).startswith(f"checkpoint.load must name a checkpoint that can be read, got {tmp_path}; ")


@pytest.mark.parametrize("key", ["algo.use_rollout_routing_replay", "algo.use_routing_replay"])
def test_a_replay_of_routes_needs_experts(tmp_path: Path, key: str) -> None:
    run = named(hf_folder(tmp_path / "dense"), **{key: True})
    run.model.max_position_embeddings = None
    (problem,) = check_policy(run)
    assert str(problem).startswith(f"{key} must be false with a model that has no experts")


@pytest.mark.parametrize("build", ["tiny_qwen3", "tiny_qwen3_moe", "tiny_deepseek_v3"])
@pytest.mark.parametrize("tied", [False, True])
def test_names_of_parameters_are_those_of_the_model(build: str, tied: bool, tmp_path: Path) -> None:
    given = ModelConfig(build=build, cache_dir=str(tmp_path), num_layers=2, tie_word_embeddings=tied)
    folder = Path(resolve_model(given))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    expected = {name for name, _ in model.named_parameters()}
    assert set(folder_parameters(folder, read_config_json(str(folder))) or ()) == expected
    assert set(tiny_parameters(build, vars(given))) == expected


def test_names_of_an_unknown_family_are_not_known(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", model_type="gemma3")
    assert folder_parameters(folder, read_config_json(str(folder))) is None
    # The file is no safetensors file.
    assert folder_parameters(hf_folder(tmp_path / "broken"), {"model_type": "qwen3"}) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"train.only_train_params": ["norm", "nope"]}, "must have patterns that match a parameter name, got nope;"),
        ({"train.freeze_params": ["."]}, "must leave at least one parameter to train, got .;"),
        ({"train.lora.rank": 2, "train.lora.target_modules": ["query"]}, "must name linear layers of the model, got"),
    ],
)
def test_patterns_match_parameters_of_the_model(values: dict[str, object], expected: str) -> None:
    (problem,) = check_trained_parameters(config_with(values))
    assert expected in str(problem)
    assert "_proj" in problem.fix or "model.embed_tokens.weight" in problem.fix
    assert check_trained_parameters(config_with({**values, "debug.rollout_only": True})) == []


@pytest.mark.parametrize("build", ["tiny_qwen3", "tiny_qwen3_moe", "tiny_deepseek_v3"])
def test_patterns_match_whole_parameters_of_megatron(build: str) -> None:
    part, whole = ({"train.freeze_params": [each]} for each in ("k_proj|kv_b_proj", r"self_attn\.[qkv]"))
    megatron = {"train.backend": "megatron", "model.build": build}
    found = check_trained_parameters(config_with({**part, **megatron}))
    # Latent attention has a separate parameter for each projection.
    assert [problem.path for problem in found] == ["train.freeze_params"] * (build != "tiny_deepseek_v3")
    assert all("must match all or none of model.layers.0.self_attn.q_proj.weight, " in str(each) for each in found)
    assert check_trained_parameters(config_with({**whole, **megatron})) == []
    assert check_trained_parameters(config_with({**part, **megatron, "train.backend": "fsdp"})) == []


@pytest.mark.parametrize(("model_type", "groups"), [("qwen3_vl", 2), ("qwen2_5_vl", 3)])
def test_merged_parameters_of_models_with_images_have_their_names_in_transformers(model_type: str, groups: int) -> None:
    layer, tower = "model.language_model.layers.1.", "model.visual.blocks.0.attn.qkv.weight"
    attention = [f"{layer}self_attn.{each}_proj.{kind}" for kind in ("weight", "bias") for each in "qkv"]
    mlp = [f"{layer}mlp.{each}_proj.weight" for each in ("gate", "up")]
    names = [*attention[: 3 * (groups - 1)], *mlp, tower, "lm_head.weight"]
    found = merged_by_megatron(names, model_type)
    assert found == [*([attention[:3], attention[3:]][: groups - 1]), mlp]


def test_patterns_match_parameters_of_a_tower(tmp_path: Path) -> None:
    vision = {"model.build": "tiny_qwen2_5_vl", "model.cache_dir": str(tmp_path), "train.freeze_params": ["visual"]}
    assert check_trained_parameters(config_with(vision)) == []
    # The name in the files of a checkpoint, not in the model.
    (problem,) = check_trained_parameters(config_with({**vision, "train.freeze_params": [r"^visual\."]}))
    assert str(problem).startswith(
        r"train.freeze_params must have patterns that match a parameter name, got ^visual\.; the model has "
        "model.visual."
    )
    advice = re.search(r"; (\w+) and (\w+) are words for its vision tower and projector$", problem.fix)
    assert advice is not None
    for word in advice.groups():
        assert check_trained_parameters(config_with({**vision, "train.freeze_params": [word]})) == []


def test_good_patterns() -> None:
    for values in (
        {"train.only_train_params": [r"layers\.0\.", "norm"]},
        {"train.freeze_params": ["embed"]},
        {"train.lora.rank": 2, "train.lora.target_modules": ["v_proj", "self_attn.q_proj"]},
    ):
        assert check_trained_parameters(config_with(values)) == []


@pytest.mark.parametrize("name", ["qproj", "embed_tokens", "input_layernorm", "lm_head"])
def test_each_layer_with_adapters_is_a_linear_one(name: str) -> None:
    given = {"train.lora.rank": 2, "train.lora.target_modules": ["v_proj", name]}
    (problem,) = check_trained_parameters(config_with(given))
    assert str(problem) == (
        f"train.lora.target_modules must name linear layers of the model, got ['{name}']; it has down_proj, "
        "gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )


@pytest.mark.parametrize("build", ["tiny_deepseek_v3", "tiny_qwen3_moe"])
def test_adapters_of_experts_are_refused_with_names_that_are_not(build: str) -> None:
    given = {"model.build": build, "train.lora.rank": 2, "train.lora.target_modules": ["o_proj", "down_proj"]}
    (problem,) = check_trained_parameters(config_with(given))
    assert str(problem).startswith(
        "train.lora.target_modules must name layers of attention only in a model with experts, got ['o_proj', "
        "'down_proj']; adapters of experts cannot be merged"
    )
    advice = re.search(r"choose from \[(.+)\]$", problem.fix)
    assert advice is not None
    assert check_trained_parameters(config_with({**given, "train.lora.target_modules": advice[1].split(",")})) == []
    assert check_trained_parameters(config_with({**given, "train.lora.target_modules": None})) == []


def test_adapters_have_two_files(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    run = config_with({"train.lora.rank": 2, "train.lora.load": str(tmp_path)})
    (problem,) = check_adapters(run)
    assert str(problem) == (
        f"train.lora.load must be a folder of adapters in peft's format, got {tmp_path}; it has no "
        "adapter_model.safetensors; check the path"
    )
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 32, "use_rslora": false}')
    assert check_adapters(run) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"lora_alpha": 16.0}',
            "train.lora.alpha must be the lora_alpha=16 of the adapters in train.lora.load, got 32",
        ),
        (
            '{"lora_alpha": 8.5}',
            "an integer lora_alpha, got {folder}; choose others; adapter_config.json has lora_alpha=",
        ),
        ('{"lora_alpha": 32, "use_rslora": true}', "choose others; adapter_config.json has use_rslora"),
        (
            "[]",
            "train.lora.load must be a folder of adapters in peft's format, got {folder}; adapter_config.json has no",
        ),
        (
            "{",
            "train.lora.load must be a folder of adapters in peft's format, got {folder}; adapter_config.json has no",
        ),
    ],
)
def test_adapters_have_the_scale_of_the_run(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text(content)
    (problem,) = check_adapters(config_with({"train.lora.rank": 2, "train.lora.load": str(tmp_path)}))
    assert message.format(folder=tmp_path) in str(problem)
    if problem.path == "train.lora.alpha":
        given = {"train.lora.rank": 2, "train.lora.load": str(tmp_path), "train.lora.alpha": 16}
        assert problem.fix == "set it to 16" and check_adapters(config_with(given)) == []
