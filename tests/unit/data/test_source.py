"""Custom prompt sources: created with the config and the tokenizer, and checked before the run starts."""

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlscale.config import DataConfig, RunConfig, load_config
from rlscale.config.user_functions import check_hooks
from rlscale.data.prompts import FilePromptSource
from rlscale.data.source import build_prompt_source
from rlscale.errors import ConfigError, DataError
from rlscale.models.char_tokenizer import character_tokenizer
from rlscale.plugins.args_view import Args
from rlscale.plugins.data_source_adapter import DocumentPromptSource
from rlscale.plugins.sample_view import DocumentSample

MODULE = """
import json
from pathlib import Path
from types import SimpleNamespace
from rlscale.types import Prompt

class Counting:
    def __init__(self, config, tokenizer, custom):
        self.position, self.step, self.tokenizer = 0, custom.get("step", 1), tokenizer
        self.size = config.batch.rollout_batch_size

    def take(self, num_prompts):
        rows = range(self.position, self.position + num_prompts * self.step, self.step)
        self.position += num_prompts * self.step
        texts = [f"{row}+0=" for row in rows]
        return [Prompt(index=i, text=t, token_ids=tuple(self.tokenizer.encode(t))) for i, t in zip(rows, texts)]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

class Half:
    def __init__(self, config, tokenizer): ...
    def take(self, num_prompts): return []

class Wrong(Counting):
    def take(self, num_prompts):
        found = super().take(num_prompts)
        kind = self.kind
        return {
            "none": None,
            "few": found[1:],
            "texts": [prompt.text for prompt in found],
            "empty": [Prompt(index=0, text="", token_ids=())] * num_prompts,
            "floats": [Prompt(index=0, text="", token_ids=(1.5,))] * num_prompts,
        }[kind]

    def state_dict(self):
        return {"position": (1, 2)} if self.kind == "none" else {3: 4}

def wrong(config, tokenizer, custom):
    source = Wrong(config, tokenizer, {})
    source.kind = custom["kind"]
    return source

class Sums:
    # In slime's form: groups of samples, and a position in a file.
    def __init__(self, args):
        self.args, self.position = args, 0

    def get_samples(self, num_samples):
        rows = range(self.position, self.position + num_samples)
        self.position += num_samples
        group = lambda row: [SimpleNamespace(prompt=f"{row}+1=", label=row + 1, metadata={"row": row})]
        return [group(row) * self.args.n_samples_per_prompt for row in rows]

    def save(self, rollout_id):
        folder = Path(self.args.save) / "rollout"
        folder.mkdir(exist_ok=True)
        (folder / f"state_{rollout_id}.json").write_text(json.dumps(self.position))

    def load(self, rollout_id):
        self.position = json.loads((Path(self.args.load) / "rollout" / f"state_{rollout_id}.json").read_text())

class Unsaved:
    def __init__(self, args): ...
    def get_samples(self, num_samples): ...

class Broken:
    def __init__(self, args):
        self.rows = args.no_such_argument

class Odd(Sums):
    def get_samples(self, num_samples):
        return [[], [SimpleNamespace(prompt="1+1=", multimodal_inputs={"image": 1})]][self.args.kind :] * num_samples

class Large(Sums):
    def save(self, rollout_id):
        (Path(self.args.save) / "rows.bin").write_bytes(bytes(2**24 + 1))

def no_arguments(): ...

number = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_sources_for_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != os.getcwd()])
    monkeypatch.delitem(sys.modules, "user_sources_for_test", raising=False)
    return "user_sources_for_test"


def config(module: str, name: str, *words: str) -> RunConfig:
    given = (f"data.data_source_path={module}:{name}", "data.rollout_global_dataset=false", "data.prompt_data=null")
    return load_config([*given, *words])


def test_a_custom_source_serves_the_prompts(module: str, tokenizer: PreTrainedTokenizerBase) -> None:
    source = build_prompt_source(config(module, "Counting", "custom.step=10"), tokenizer)
    assert [prompt.text for prompt in source.take(3)] == ["0+0=", "10+0=", "20+0="]
    state: Mapping[str, Any] = source.state_dict()
    source.take(1)
    source.load_state_dict(state)
    assert source.take(1)[0].text == "30+0="
    assert check_hooks(config(module, "Counting")) == []


def test_a_prompt_of_a_custom_source_leaves_a_token_of_the_context(
    module: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    words = ("custom.step=10", "rollout.max_context_len=5", "rollout.max_response_len=4", "eval.max_response_len=4")
    source = build_prompt_source(config(module, "Counting", *words), tokenizer)
    assert len(source.take(1)[0].token_ids) == 4
    with pytest.raises(DataError, match=r"must be at most rollout\.max_context_len minus 1 token \(4 tokens\), got 5"):
        source.take(1)
    # Supervised training checks a prompt with its answer.
    sft = config(module, "Counting", *words, "algo.loss_type=sft_loss", "batch.n_samples_per_prompt=1")
    assert len(build_prompt_source(sft, tokenizer).take(2)) == 2


@pytest.mark.slow
def test_without_a_custom_source_prompts_are_read_from_the_file(tokenizer: PreTrainedTokenizerBase) -> None:
    assert isinstance(build_prompt_source(load_config([]), tokenizer), FilePromptSource)
    assert check_hooks(load_config([])) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "data.data_source_path must be importable"),
        ("number", "data.data_source_path must be a class or a function that returns a data source"),
        ("no_arguments", "data.data_source_path must be callable with (config, tokenizer) or (args)"),
    ],
)
def test_an_unusable_source_is_an_error_at_load(module: str, name: str, message: str) -> None:
    (problem,) = check_hooks(config(module, name))
    assert str(problem).startswith(message)


def test_a_source_without_its_methods_is_an_error(module: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match="add state_dict, load_state_dict as in"):
        build_prompt_source(config(module, "Half"), tokenizer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", "got NoneType"),
        ("few", "got 1; continue with the next epoch at the end of one"),
        ("texts", "got str at index 0"),
        ("empty", r"got token_ids \(\) at index 0; return at least one token id"),
        ("floats", r"got token_ids \(1\.5,\) at index 0"),
    ],
)
def test_results_of_a_custom_source_are_checked(
    module: str, kind: str, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    source = build_prompt_source(config(module, "wrong", f"custom.kind={kind}"), tokenizer)
    rule = r"take\(2\) of user_sources_for_test:wrong must return 2 prompts \(rlscale\.types\.Prompt\), "
    with pytest.raises(DataError, match=rule + message):
        source.take(2)
    with pytest.raises(DataError, match=r"state_dict\(\) of user_sources_for_test:wrong must return a dict of JSON"):
        source.state_dict()


def test_a_source_of_slimes_form_continues_in_another_run(module: str, tokenizer: PreTrainedTokenizerBase) -> None:
    settings = config(module, "Sums", "batch.n_samples_per_prompt=4")
    assert check_hooks(settings) == []
    source = build_prompt_source(settings, tokenizer)
    first = source.take(3)
    assert [(p.index, p.text, p.label, p.metadata) for p in first] == [
        (row, f"{row}+1=", row + 1, {"row": row}) for row in range(3)
    ]
    assert list(first[0].token_ids) == tokenizer.encode("0+1=")
    state = json.loads(json.dumps(source.state_dict()))
    following = source.take(2)
    resumed = build_prompt_source(settings, tokenizer)
    resumed.load_state_dict(state)
    assert resumed.take(2) == following
    assert resumed.state_dict() == source.state_dict()


def test_a_source_of_slimes_form_may_render_messages(module: str) -> None:
    class Chats:
        def __init__(self, args: Args) -> None:
            self.name = args.hf_checkpoint

        def get_samples(self, num_samples: int) -> list[list[DocumentSample]]:
            messages = [{"role": "user", "content": "1+1="}]
            return [[DocumentSample(prompt=messages)], [DocumentSample(tokens=[5, 6])]][:num_samples]

        def save(self, rollout_id: int) -> None: ...

        def load(self, rollout_id: int) -> None: ...

    tokenizer = character_tokenizer(512)  # not the shared one: its template is replaced
    tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}0{% endif %}"
    source = DocumentPromptSource(Chats, Args(load_config([])), data=DataConfig(), tokenizer=tokenizer)
    chat, ids = source.take(2)
    assert chat.text == "1+1=0" and list(chat.token_ids) == tokenizer.encode("1+1=0", add_special_tokens=False)
    assert ids.token_ids == (5, 6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Unsaved",
            "TypeError: a data source of slime's form must have get_samples, save, load; it lacks save, load",
        ),
        (
            "Broken",
            "which raised AttributeError: args.no_such_argument must be an argument of slime or an entry of custom",
        ),
    ],
)
def test_an_incomplete_source_of_slimes_form_is_an_error(
    module: str, name: str, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_prompt_source(config(module, name), tokenizer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (0, r"get_samples\(\) must return groups of samples with a prompt, got \[\] at index 0"),
        (1, r"must have no multimodal_inputs, got some at index 0"),
    ],
)
def test_groups_of_slimes_form_are_checked(
    module: str, kind: int, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    source = build_prompt_source(config(module, "Odd", f"custom.kind={kind}"), tokenizer)
    with pytest.raises(DataError, match=message):
        source.take(1)


def test_the_files_of_a_source_are_small_and_stay_in_its_folder(
    module: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=r"at most 16777216 bytes, got 16777217 in rows\.bin; save the position"):
        build_prompt_source(config(module, "Large"), tokenizer).state_dict()
    source = build_prompt_source(config(module, "Sums"), tokenizer)
    with pytest.raises(DataError, match=r"must be in the folder of the data source, got '\.\./a'"):
        source.load_state_dict({"num_taken": 0, "files": {"../a": "AA=="}})
