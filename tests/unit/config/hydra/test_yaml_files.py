"""YAML files: problems are reported with file and line; a user's folder adds options."""

from pathlib import Path

import pytest

from rlscale.config import load_config
from rlscale.config.hydra.config_folders import ConfigFolders, natural_order
from tests.unit.config.config_errors import config_errors, only_error

MINE = """\
# @package _global_
defaults:
  - override /model: tiny_qwen3
  - override /data: arithmetic
  - override /rollout: embedded
  - override /reward: exact_match
  - override /train: fsdp
  - override /cluster: cpu
data:
  num_rollout: 1
rollout:
  max_response_len: 8
batch:
  rollout_batch_size: 4
  n_samples_per_prompt: 4
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "algo").mkdir()
    return tmp_path


def write(folder: Path, text: str, name: str = "experiment/mine") -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_user_experiment(folder: Path) -> None:
    write(folder, MINE)
    assert load_config(["experiment=mine"], config_dir=folder).batch.rollout_batch_size == 4
    assert "did you mean mine?" in only_error(["experiment=mnie"], config_dir=folder)
    assert "experiment must be one of its options, got mine" in only_error(["experiment=mine"])


def test_a_user_option(folder: Path) -> None:
    write(folder, "eps_clip: 0.7\n", "algo/wide")
    assert load_config(["algo=wide"], config_dir=folder).algo.eps_clip == 0.7


def test_errors_in_a_file_are_reported_with_their_line(folder: Path) -> None:
    file = write(folder, MINE + "algo:\n  eps_clp: 0.1\n  eps_clip: abc\noptim:\n  lr: -1\n")
    assert config_errors("experiment=mine", "train.sed=3", config_dir=folder) == [
        "train.sed must be a known key, got 3; did you mean train.seed? (command line)",
        f"algo.eps_clp must be a known key, got 0.1; did you mean algo.eps_clip? ({file}:17)",
        f"algo.eps_clip must be a number, got abc; remove it to use the default, 0.2 ({file}:18)",
        f"optim.lr must be >= 0, got -1.0; remove it to use 2e-05: the default with train.backend=fsdp ({file}:20)",
    ]


@pytest.mark.parametrize(
    ("lines", "path", "line"),
    [
        ("optim: {null: 2}", "optim", 16),
        ("optim:\n  lr: {null: 2}", "optim.lr", 17),
        ("sglang: {a: [{null: 2}]}", "sglang.a", 16),
    ],
)
def test_a_value_without_a_name_gets_one_message(folder: Path, lines: str, path: str, line: int) -> None:
    file = write(folder, f"{MINE}{lines}\n")
    rule = "give each of its values a name that is a text, got null; replace null by a name"
    assert config_errors("experiment=mine", config_dir=folder) == [f"{path} must {rule} ({file}:{line})"]


def test_a_rule_points_to_the_file_that_set_the_key(folder: Path) -> None:
    file = write(folder, MINE + "  global_batch_size: 5\n")
    assert only_error(["experiment=mine"], config_dir=folder).endswith(f"({file}:16)")
    typed = only_error(["experiment=mine", "batch.global_batch_size=6"], config_dir=folder)
    assert typed.endswith("(command line)")


def test_a_key_without_default_must_be_set(folder: Path) -> None:
    write(folder, MINE.replace("  rollout_batch_size: 4\n", ""))
    found = only_error(["experiment=mine"], config_dir=folder)
    assert found.startswith("batch.rollout_batch_size must be set, got nothing; add batch.rollout_batch_size=<value>")
    assert load_config(["experiment=mine", "batch.rollout_batch_size=2"], config_dir=folder)


def test_a_file_with_an_unknown_option(folder: Path) -> None:
    file = write(folder, MINE.replace("model: tiny_qwen3", "model: qwen9"))
    found = only_error(["experiment=mine"], config_dir=folder)
    options = ", ".join(ConfigFolders.find().groups()["model"])
    assert found == f"model must be one of its options, got qwen9; options: {options} ({file}:3)"


FILE_CASES = [
    ("batch: [1\n", "{file} must be valid YAML, got", 3),
    ("batch:\n\t- 1\n", "{file} must be valid YAML, got", 3),
    ("- 1\n", "{file} must set keys, each as `name: value`, got", 1),
    ("algo:\n  eps_clip: 1\n  eps_clip: 2\n", "{file} must set each key once, got eps_clip", 4),
    (
        "algo: 3\n",
        "algo must be set one key at a time, got 3; set one of its keys, e.g. `advantage_",
        2,
    ),
    ("algo: null\n", "algo must be set one key at a time, got null", 2),
    ("modle:\n  num_layers: 3\n", 'modle must be a known group, got {"num_layers": 3}; did you mean model?', 2),
    ("algo:\n  eps_clip: ???\n", "algo.eps_clip must be set, got nothing", 3),
    ("algo:\n  eps_clip: ${algo.kl_coeff}\n", "algo.eps_clip must refer to a key that exists, got ${algo.kl_coeff}", 3),
    ("algo:\n  eps_clip: ${algo.\n", "algo.eps_clip must close every ${ with a }, got ${algo.", 3),
    ("hydra:\n  foo: 3\n", "hydra.foo must be accepted by Hydra, got \"Key 'foo' not in 'HydraConf'\"", 3),
    ("defaults: {a: 1}\n", 'defaults must be a list, got {"a": 1}; write `- override /<group>: <option>`', 2),
    ("defaults:\n  - [1]\n", "defaults must have one `group: option` pair per entry, got [1]", 3),
    ("defaults:\n  - override /algo: gspoo\n", "algo must be one of its options, got gspoo; did you mean gspo?", 3),
    (
        "defaults:\n  - override /fault_tolerance: on\n",
        'fault_tolerance must be one of its options, got true; write "on" in quotes; options: on, spot',
        3,
    ),
    ("defaults:\n  - override /modle: hf\n", "modle must be a known group, got hf; did you mean model?", 3),
    ("defaults:\n  - /algo: gspo\n", 'algo must be selected with override and a slash, got "/algo: gspo"; write', 3),
    (
        "defaults:\n  - override algo: gspo\n",
        'must be selected with override and a slash, got "override algo: gspo"',
        3,
    ),
    (
        "algo: gspo\n",
        "algo must be set one key at a time, got gspo; write `- override /algo: gspo` in the list",
        2,
    ),
    (
        "experiment: quickstart\n",
        "experiment must be selected as an option, not set as a key, got quickstart",
        2,
    ),
    ("algo.eps_clip: 0.1\n", "algo.eps_clip must be nested in a file, where a dotted name has", 2),
    (
        "algo:\n  mis.low: 5\n",
        "algo.mis.low must be nested in a file, where a dotted name has no meaning",
        3,
    ),
    ("algo: !!python/object:os.system {}\n", "{file} must contain plain values only, got", 2),
    ("? [a, b]\n: 5\n", "{file} must contain plain values only, got", 2),
    ("defaults:\n  - mine\n", "defaults must not form a cycle, got mine; remove this entry", 3),
    (
        "defaults:\n  - override /algo: gspo\n  - quickstart\n",
        "defaults must list other files above the entries with override, got quickstart; move it above them",
        4,
    ),
    ("algo:\n  3: 4\n", "algo.3 must be a known key, got 4", 3),
    ("algo:\n  no: 4\n", "algo.no must be a known key, got 4", 3),
    ("algo: &a\n  mis: *a\n", "{file} must contain plain values only, got a mapping with an alias of itself", 1),
    ("custom: {a: " + "[" * 1000 + "\n", "{file} must be nested less deeply, got too many brackets", 1),
    ("data:\n  num_rollout: !!int x\n", '{file} must contain plain values only, got "invalid literal for int()', 2),
    ("data:\n  num_rollout: " + "9" * 5000 + "\n", '{file} must contain plain values only, got "Exceeds the limit', 2),
    ("algo: {}\n---\nalgo: {}\n", "{file} must be valid YAML, got", 3),
    (
        "defaults:\n  - quickstart\n  - override /on: cpu\n",
        "on must not be overridden in a file, got cpu; choose it on the command line",
        4,
    ),
    ("defaults:\n  - quikstart\n", "experiment must be one of its options, got quikstart; did you mean quickstart?", 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "message", "line"), FILE_CASES, ids=[text[:40] for text, *_ in FILE_CASES])
def test_errors_of_files_and_command_line_are_reported_together(
    text: str, message: str, line: int, folder: Path
) -> None:
    file = write(folder, f"# @package _global_\n{text}" if text != "- 1\n" else text)
    found = config_errors("experiment=mine", "optim.lr=-1", "train.sed=3", config_dir=folder)
    (about_file,) = [text for text in found if f"({file}:{line})" in text]
    assert (
        about_file.startswith(message.format(file=file) if message.startswith("{file}") else "")
        and message[6:] in about_file
    )
    assert sum(text.startswith(("optim.lr must be >= 0", "train.sed must be a known key")) for text in found) == 2


def test_several_invalid_files(folder: Path) -> None:
    file = write(folder, MINE.replace("tiny_qwen3", "tiny_qwen9") + "algo:\n  eps_clp: 1\n  eps_clip: x\n")
    other = write(folder, "eps_clip: [1\n", "algo/mine")
    found = config_errors("experiment=mine", "algo=mine", "batch.global_batch_size=3", config_dir=folder)
    assert [text.split(" ")[0] for text in found] == ["model", str(other), "algo.eps_clp", "algo.eps_clip"]
    assert f"({file}:3)" in found[0] and f"({other}:2)" in found[1]
    assert f"({file}:17)" in found[2] and f"({file}:18)" in found[3]


def test_rules_are_checked_despite_an_unknown_option(folder: Path) -> None:
    file = write(folder, MINE.replace("override /model: tiny_qwen3", "override /model: tiny_qwen9"))
    found = config_errors("experiment=mine", "batch.global_batch_size=3", config_dir=folder)
    assert [text.split(" ")[0] for text in found] == ["model", "batch.global_batch_size"]
    assert f"({file}:3)" in found[0]


def test_an_experiment_needs_the_package_line(folder: Path) -> None:
    file = write(folder, "algo:\n  eps_clip: 0.1\n")
    found = config_errors("experiment=mine", config_dir=folder)
    assert found == [
        f'{file} must have a line "# @package _global_", got "algo:"; files in experiment/ set keys of every group '
        f"({file}:1)"
    ]


def test_a_binary_file(folder: Path) -> None:
    (folder / "experiment" / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    (found,) = config_errors("experiment=mine", config_dir=folder)
    assert "mine.yaml must be a text file that contains YAML, got" in found


def test_a_file_with_a_byte_order_mark(folder: Path) -> None:
    file = write(folder, "\ufeff" + MINE)
    (found,) = config_errors("experiment=mine", config_dir=folder)
    assert found == rf'{file} must have no byte order mark, got "\ufeff"; save it as UTF-8 without BOM ({file}:1)'


def test_the_option_on_is_written_in_quotes(folder: Path) -> None:
    (folder / "experiment" / "mine.yaml").write_text(
        '# @package _global_\ndefaults:\n  - quickstart\n  - override /fault_tolerance: "on"\n'
    )
    assert load_config(["experiment=mine"], config_dir=folder).fault_tolerance.enabled


def test_an_option_may_start_from_another(folder: Path) -> None:
    write(folder, "defaults:\n  - gspo\n  - _self_\neps_clip: 0.7\n", "algo/wide")
    write(folder, "# @package _global_\ndefaults:\n  - quickstart\n  - _self_\nbatch:\n  rollout_batch_size: 4\n")
    config = load_config(["experiment=mine", "algo=wide"], config_dir=folder)
    assert (config.algo.advantage_estimator, config.algo.eps_clip) == ("gspo", 0.7)
    found = config_errors("experiment=mine", "algo=wide", "on=cpuu", config_dir=folder)
    assert len(found) == 1 and found[0].startswith("on must be one of its options, got cpuu; did you mean cpu?")


def test_a_rule_names_the_origin_of_both_values(folder: Path) -> None:
    file = write(folder, MINE + "algo:\n  use_rollout_logprobs: true\n")
    found = only_error(["experiment=mine", "algo.use_tis=true"], config_dir=folder)
    assert found.endswith(f"(command line; algo.use_rollout_logprobs: {file}:17)")
    assert only_error(["experiment=mine", "cluster.rollout_num_gpus=null"], config_dir=folder)
    (default,) = config_errors("experiment=mine", "algo.loss_type=custom_loss", config_dir=folder)
    assert default.endswith("(default; algo.loss_type: command line)")
    three = ("batch.rollout_batch_size=1", "batch.n_samples_per_prompt=3")
    derived = only_error(["experiment=mine", "cluster.actor_num_gpus_per_node=2", *three], folder)
    assert "(derived; " in derived and derived.endswith("cluster.actor_num_gpus_per_node: command line)")
    passed = only_error(["experiment=qwen3_4b_grpo", "sglang.pp_size=3"])
    assert passed.startswith("sglang.pp_size must be") and passed.endswith("got 3; set it to 1 (command line)")


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "--config-dir must name an existing folder" in only_error([], config_dir=tmp_path / "nothing")


def test_a_folder_without_groups(folder: Path) -> None:
    found = only_error([], config_dir=folder / "experiment")
    assert "--config-dir must name a folder that contains group folders" in found


def test_only_known_groups_can_be_selected(folder: Path) -> None:
    (folder / "odd").mkdir()
    write(folder, "x: 1\n", "odd/mine")
    assert "odd" not in ConfigFolders.find(folder).groups()
    assert only_error(["odd=mine"], config_dir=folder).startswith("odd must be a known key, got mine")


def test_a_file_with_the_name_of_an_option_is_rejected(folder: Path) -> None:
    own = ConfigFolders.find().find_file("algo/gspo")
    assert own is not None
    write(folder, own.read_text(encoding="utf-8"), "algo/gspo")
    assert load_config(["algo=gspo"], config_dir=folder).algo.eps_clip == 3e-4  # the same file, as in a copy of conf/
    file = write(folder, "advantage_estimator: gspo\neps_clip: 0.7\n", "algo/gspo")
    assert only_error(["algo=gspo"], config_dir=folder).startswith(f"algo=gspo must have a unique name, got {file}; ")


def test_files_that_include_each_other_are_reported_once(folder: Path) -> None:
    write(folder, "defaults:\n  - there\neps_clip: 0.7\n", "algo/here")
    file = write(folder, "defaults:\n  - here\neps_clip: 0.7\n", "algo/there")
    found = only_error(["algo=here"], config_dir=folder)
    assert found == f"defaults must not form a cycle, got here; remove this entry ({file}:2)"


def test_rules_are_checked_despite_a_dotted_name(folder: Path) -> None:
    write(folder, MINE + "algo.eps_clip: 0.1\n")
    found = config_errors("experiment=mine", "batch.global_batch_size=3", "algo.eps_clip=0.3", config_dir=folder)
    assert [text.split(" ")[0] for text in found] == ["algo.eps_clip", "batch.global_batch_size"]


def test_options_have_a_natural_order() -> None:
    names = ["tp16", "tp2", "a", "tp2_cp16", "10x", "tp2_cp4", "tp"]
    assert sorted(names, key=natural_order) == ["10x", "a", "tp", "tp2", "tp2_cp4", "tp2_cp16", "tp16"]
    assert ConfigFolders.find().groups()["checkpoint"][:4] == ["every_1", "every_20", "every_60", "every_100"]


@pytest.mark.slow
@pytest.mark.parametrize("written", ["1e3", "010", "on", "No", "1:30", "1_000", "0x1F", "2026-11-26", "true", "1.50"])
def test_a_text_has_the_characters_of_its_file(tmp_path: Path, written: str) -> None:
    values = f"run: {{name: {written}}}\ndata: {{prompt_files: [{written}]}}\n"
    values += f"train: {{env_vars: {{A: {written}, B: {written}}}}}\n"
    text = f"# @package _global_\ndefaults:\n  - quickstart\n{values}"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    config = load_config(["experiment=mine"], config_dir=tmp_path)
    texts = {"A": written, "B": written}
    assert (config.run.name, config.train.env_vars, config.data.prompt_files) == (written, texts, [written])
    # The command line replaces the value of the file.
    words = ["experiment=mine", "run.name=str(7)", "train.env_vars.A=int(8.0)"]
    config = load_config(words, config_dir=tmp_path)
    assert (config.run.name, config.train.env_vars) == ("7", {"A": "8", "B": written})
    # A mapping on the command line adds entries, and leaves the others as the file has them.
    config = load_config(["experiment=mine", "train.env_vars={A: 1, C: yes}"], config_dir=tmp_path)
    assert config.train.env_vars == {"A": "1", "B": written, "C": "yes"}
