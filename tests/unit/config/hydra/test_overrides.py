"""Overrides of a command line: every problem is reported at once, with a fix."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.config import KlType, load_config
from rlscale.config.hydra.overrides import parse_command_line
from rlscale.config.hydra.sweep.expand import all_jobs, job_problems
from rlscale.config.hydra.sweep.job_launcher import user_overrides
from rlscale.config.keys import keys
from rlscale.config.load import load_config_with_notes
from tests.unit.config.config_errors import config_errors, only_error

GROUPS = {"algo": ["grpo", "gspo"], "experiment": ["quickstart"], "on": ["cpu"]}

CASES = [
    ("batch.rollout_batch_size=0x10", "got 0x10; write batch.rollout_batch_size=16 (command line)"),
    ("--experiment=quickstart", "did you mean experiment=quickstart? (command line)"),
    ("--config-name=quickstart", "did you mean experiment=quickstart? (command line)"),
    ("--config-path=mine", "write --config-dir <folder> (command line)"),
    ("reward=my_reward.py:score", "did you mean reward.custom_path=my_reward.py:score? options: boxed_exact_match"),
    ("train.env_vars=FOO=1", "got FOO=1; write train.env_vars.FOO=1 (command line)"),
    ("algo.eps_clp=0.1", "algo.eps_clp must be a known key, got 0.1; did you mean algo.eps_clip? (command line)"),
    ("eps_clip=0.1", "eps_clip must be a known key, got 0.1; did you mean algo.eps_clip? (command line)"),
    ("optim.eps_clip=1", "optim.eps_clip must be a known key, got 1; did you mean algo.eps_clip? (command line)"),
    (
        "algo=gspoo",
        "algo must be one of its options, got gspoo; did you mean gspo? options: cispo, dapo, dr_grpo,",
    ),
    (
        "batch.micro_batch_size=abc",
        "batch.micro_batch_size must be an integer, got abc; remove it to use the default, 1",
    ),
    (
        "batch.micro_batch_size=1.5",
        "batch.micro_batch_size must be an integer, got 1.5; remove it to use the default, 1",
    ),
    (
        "batch.micro_batch_size=true",
        "batch.micro_batch_size must be an integer, got true; remove it to use the default, 1",
    ),
    ("algo.use_tis=maybe", "algo.use_tis must be true or false, got maybe; remove it to use the default, false"),
    (
        "train.dtype=float3",
        "train.dtype must be one of bfloat16|float32, got float3; did you mean float32? (command line)",
    ),
    ("algo.eps_clip_c=1", "algo.eps_clip_c must be > 1, got 1.0; remove it to use the default, null"),
    ("rollout.temperature=0", "rollout.temperature must be > 0, got 0.0; remove it to use the default, 1.0"),
    (
        "optim.lr=inf",
        "optim.lr must be a finite number, got Infinity; remove it to use 0.0005, from",
    ),
    ("run.name=", 'run.name must not be empty, got ""; remove it to use the default, null'),
    (
        "optim.lr=1e-5,1e-4",
        "optim.lr must have one value in a single run, got 1e-5,1e-4; add -m to run one job per value (command line)",
    ),
    # Advice must be accepted when it is typed.
    ("algoo=grpo,gspo", "algoo must be a known group, got grpo,gspo; did you mean algo=grpo? options: "),
    ("algoo=gspoo", "algoo must be a known group, got gspoo; did you mean algo=gspo? options: "),
    ("algoo=mine", "algoo must be a known group, got mine; did you mean algo? options: "),
    ("data.num_rollout=1.000", "got 1.0; write data.num_rollout=1 or data.num_rollout=1000 (command line)"),
    ("data.num_rollout=1.500", "got 1.5; write data.num_rollout=1500 (command line)"),
    ("data.num_rollout=1.000.000", "got 1.000.000; write data.num_rollout=1000000 (command line)"),
    ("bf16=true", "bf16 must be a known key, got true; did you mean train.dtype=bfloat16? (command line)"),
    ("bf16=false", "bf16 must be a known key, got false; did you mean train.dtype? (command line)"),
    ("--bf16", "got --bf16; did you mean megatron.bf16=true? (command line)"),
    ("--position-embedding-type=rope", "; remove it: the model's config.json has it (command line)"),
    # The name is wrong in a sweep, too.
    ("learning_rate=1e-5,1e-4", "learning_rate must be a known key, got 1e-5,1e-4; did you mean optim.lr?"),
    (
        "reward.custom_path=/home/me/my_reward.py:score",
        "package.module:name, got /home/me/my_reward.py:score; write e.g. reward.custom_path=my_reward.py:score in the",
    ),
    (
        "data.prompt_data=x.jsonl@[0:100]",
        "data.prompt_data must be in quotes, because some of its characters have a special meaning on a command "
        "line, got "
        "x.jsonl@[0:100]; write 'data.prompt_data=\"x.jsonl@[0:100]\"' (command line)",
    ),
    ("rollout.stop=[</s>]", "got [</s>]; write 'rollout.stop=[\"</s>\"]' (command line)"),
    ("rollout.stop=</s>", "must be a list of strings or null, got </s>; write 'rollout.stop=[\"</s>\"]'"),
    ("rollout.stop=[a,,b]", "write 'rollout.stop=[a,b]'"),
    (
        "rollout.stop_token_ids=[1,2",
        "got [1,2; write 'rollout.stop_token_ids=[1,2]'",
    ),
    ("rollout.stop_token_ids=3", "must be a list of integers or null, got 3; write rollout.stop_token_ids=[3]"),
    ("eval.prompt_data=aime", "must be a list of strings or null, got aime; write eval.prompt_data=[aime]"),
    ("run.name='abc", "run.name must close the quote ', got 'abc; write 'run.name=\"abc\"'"),
    ("data.apply_chat_template_kwargs.a=[1", "must close the bracket [, got [1; write"),
    ("data.apply_chat_template_kwargs=3", "must be a mapping, got 3; write data.apply_chat_template_kwargs.<name>="),
    ("algo.eps_clip=[1", "algo.eps_clip must be a number, got [1; remove it to use the default, 0.2"),
    ("algo.eps_clip=${", "algo.eps_clip must be a number, got ${; remove it to use the default, 0.2"),
    ("algo.eps_clip==0.1", "algo.eps_clip must be a number, got =0.1; write algo.eps_clip=0.1"),
    ("algo.eps_clip:0.1", "must be written as key=value, got algo.eps_clip:0.1; did you mean algo.eps_clip=0.1?"),
    ("algo.eps_clip =0.1", 'must have no space next to its name, got "algo.eps_clip =0.1"; write algo.eps_clip=0.1'),
    ("algo =gspo", 'algo must have no space next to its name, got "algo =gspo"; write algo=gspo'),
    ("algo=[gspo", "algo must be one of its options, got [gspo; did you mean gspo?"),
    ("=3", "=3 must be written as key=value, got =3; write <group>.<key>=<value> or"),
    ("batch.micro_batch_size=1e3", "must be an integer, got 1000.0; write batch.micro_batch_size=1000"),
    ("batch.micro_batch_size=null", "must be an integer, got null; remove it to use the default, 1"),
    ("run.name=a,b", "add -m to run one job per value, or write 'run.name=\"a,b\"'"),
    ("algo=GSPO", "algo must be one of its options, got GSPO; did you mean gspo?"),
    ("algo=gspo.yaml", "algo must be one of its options, got gspo.yaml; did you mean gspo?"),
    ("gspo", "gspo must be written as key=value, got gspo; did you mean algo=gspo?"),
    ("quikstart", "did you mean experiment=quickstart?"),
    ("experment=quickstart", "experment must be a known group, got quickstart; did you mean experiment=quickstart?"),
    (
        "algo.custom_tis_function_path=foo",
        "must be written as package.module:name, got foo; write e.g. algo.custom_tis_function_path=",
    ),
    ("algo.mis=3", "algo.mis must be set one key at a time, got 3; set one of its keys, e.g. algo.mis."),
    (
        "algo.eps_clip=${oc.env:NO_SUCH}",
        "must refer to an environment variable that is set, got ${oc.env:NO_SUCH}; set NO_SUCH, or write "
        "${oc.env:NO_SUCH,<value>}",
    ),
    (
        "algo.eps_clip=${algo.kl_coeff}",
        "refer to a key that exists, got ${algo.kl_coeff}; did you mean ${algo.kl_coef}?",
    ),
    ("algo.eps_clip=${algo.eps_clip}", "algo.eps_clip must not refer to itself, got ${algo.eps_clip}"),
    (
        "algo.eps_clip=${foo:1}",
        "must use a known resolver, not foo, got ${foo:1}; known resolvers: oc.",
    ),
    ("algo.eps_clip=${train.dtype}", "algo.eps_clip must refer to a value that is a number, got ${train.dtype}"),
    ("hydra.run.dr=x", "hydra.run.dr must be a key of Hydra, got x; did you mean hydra.run.dir? (command line)"),
    ("hydra/launcher=basc", "hydra/launcher must be one of its options, got basc; did you mean basic? options: basic"),
    ("hydra.run.dir=[x", "hydra.run.dir must close the bracket [, got [x"),
    ("qwen3_4b_grpo", "did you mean experiment=qwen3_4b_grpo?"),
    ("--rollout-batch-size=8", "did you mean batch.rollout_batch_size=8?"),
    ("--rollout-temperature=1", "did you mean rollout.temperature=1?"),
    ("run=3", "run must be set one key at a time, got 3"),
    ("modle=tiny_qwen3", "modle must be a known group, got tiny_qwen3; did you mean model=tiny_qwen3?"),
    ("algo@optim=grpo", "algo must be selected without a package"),
    ("~algo.eps_clip", "algo.eps_clip must not be deleted, got ~algo.eps_clip; set it to its default"),
    ("algo={a: 1}", 'algo must be one of its options, got {"a": 1}'),
    ("batch.micro_batch_size=${batch.foo}", "batch.micro_batch_size must refer to a key that exists"),
    ("hydra.foo=3", "hydra.foo must be a key of Hydra, got 3"),
    ("", '"" must be written as key=value, got ""; write <group>.<key>=<value> or'),
    (" ", '" " must be written as key=value, got " "; write <group>.<key>=<value> or'),
    ("data.num_rollout=9223372036854775808", "data.num_rollout must fit into 64 bits, got 9223372036854775808; remove"),
    ("rollout.stop_token_ids=[9223372036854775808]", "must fit into 64 bits, got [9223372036854775808]; remove it"),
    ("algo.eps_clip=choice(0.1,0.2", "must close the bracket (, got choice(0.1,0.2; write 'algo.eps_clip=choice("),
]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "message"), CASES, ids=[word for word, _ in CASES])
def test_one_error_is_reported_once(word: str, message: str) -> None:
    found = only_error([word])
    assert message in found
    assert "append" not in found and "+" not in found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optim.lr=", "1e-5"), 'must have no space around its =, got "optim.lr= 1e-5"; write optim.lr=1e-5'),
        (("optim.lr", "=1e-5"), 'must have no space around its =, got "optim.lr =1e-5"; write optim.lr=1e-5'),
        (("optim.lr", "=", "1e-5"), 'must have no space around its =, got "optim.lr = 1e-5"; write optim.lr=1e-5'),
        (("algo", "=", "gspo"), 'algo must have no space around its =, got "algo = gspo"; write algo=gspo'),
        (("optim.lr=", "1e"), "optim.lr must be a number or null, got 1e;"),
        (("algo.eps_clip=", "0,1"), "have one value in a single run, got 0,1; write algo.eps_clip=0.1"),
        (("optim.lr=1e-5 algo=gspo",), "must be a separate argument, got"),
    ],
)
def test_overrides_that_a_shell_divides_or_joins_are_one_error(words: tuple[str, ...], message: str) -> None:
    (problem,) = parse_command_line([*words, "data.num_rollout=1"], GROUPS).problems
    assert message in str(problem)


def test_an_empty_value_before_another_override_stays_empty() -> None:
    line = parse_command_line(["model.hf_checkpoint=", "algo=gspo"], GROUPS)
    assert line.problems == [] and "algo=gspo" in line.overrides


def test_all_errors_are_reported_together() -> None:
    found = config_errors(
        "algo.eps_clp=1", "algo=gspoo", "optim.lr=x", "cluster.actor_num_nodes=0", "batch.global_batch_size=50"
    )
    assert [text.split(" ")[0] for text in found] == [
        "algo.eps_clp",
        "algo",
        "optim.lr",
        "cluster.actor_num_nodes",
        "batch.global_batch_size",
    ]


@pytest.mark.slow
def test_errors_in_overrides_of_hydra_are_reported_with_the_others() -> None:
    found = config_errors(
        "hydra.foo=3", "hydra.run.dr=4", "algo.eps_clp=3", "optim.lr=-1", "batch.global_batch_size=50"
    )
    assert [text.split(" ")[0] for text in found] == [
        "algo.eps_clp",
        "hydra.foo",
        "hydra.run.dr",
        "optim.lr",
        "batch.global_batch_size",
    ]


def test_consequences_of_an_error_are_not_reported() -> None:
    # Without the misspelt key the batch sizes do not agree; that is not a second error.
    assert "did you mean" in only_error(["batch.rollout_batch_sze=3", "batch.global_batch_size=50"])
    assert "experiment must be one of" in only_error(["experiment=quikstart"])
    assert "train must be one of" in only_error(["experiment=qwen3_4b_grpo", "train=fdsp"])
    assert "modle must be a known group" in only_error(["modle=hf", "model.warmup_experiment=null"])


def test_a_quoted_value_is_used_unchanged() -> None:
    assert load_config(['data.prompt_data="x.jsonl@[0:100]"']).data.prompt_data == "x.jsonl@[0:100]"
    assert load_config(['checkpoint.save_hf="e/{rollout_id}"']).checkpoint.save_hf == "e/{rollout_id}"


def test_plus_signs_are_optional() -> None:
    words = ["experiment=quickstart", "on=cpu", "algo.eps_clip=0.3"]
    plain, plus = load_config(words), load_config(["+experiment=quickstart", "+on=cpu", "++algo.eps_clip=0.3"])
    assert plain.run.name == plus.run.name
    assert plain.run.overrides == words


def test_entries_of_a_mapping_may_have_any_name() -> None:
    words = ["data.apply_chat_template_kwargs.enable_thinking=false", "data.apply_chat_template_kwargs.a={b: 1}"]
    assert load_config(words).data.apply_chat_template_kwargs == {"enable_thinking": False, "a": {"b": 1}}


def test_types_are_those_of_the_dataclass() -> None:
    config = load_config(["run.name=123", "optim.lr=1", "algo.kl_loss_type=k2", "rollout.stop_token_ids=[1,2]"])
    assert (config.run.name, config.optim.lr) == ("123", 1.0)
    assert config.algo.kl_loss_type is KlType.k2
    assert config.rollout.stop_token_ids == [1, 2]


def test_a_value_may_refer_to_another() -> None:
    assert load_config(["batch.log_probs_max_tokens_per_gpu=${batch.max_tokens_per_gpu}"]).batch == load_config().batch


def test_the_last_override_of_a_key_wins() -> None:
    assert load_config(["algo.eps_clip=0.1", "algo.eps_clip=0.3"]).algo.eps_clip == 0.3
    words = ["experiment=qwen3_4b_grpo", "algo=gspo", "experiment=quickstart", "algo=cispo"]
    config = load_config(words)
    assert (config.run.experiment, config.algo.advantage_estimator) == ("quickstart", "cispo")


def test_the_default_experiment_is_the_quickstart() -> None:
    line = parse_command_line(["algo=gspo"], GROUPS)
    assert (line.overrides, line.experiment) == (["+experiment=quickstart", "algo=gspo"], "quickstart")


def test_overlays_follow_the_experiment() -> None:
    line = parse_command_line(["on=cpu", "algo=gspo", "experiment=quickstart"], GROUPS)
    assert line.overrides == ["+experiment=quickstart", "algo=gspo", "+on=cpu"]


def test_several_values_need_a_sweep() -> None:
    assert parse_command_line(["algo=grpo,gspo", "algo.eps_clip=0.1,0.2"], GROUPS, multirun=True).problems == []
    wrong = parse_command_line(["algo=grpo,gspoo", "algo.eps_clip=0.1,x"], GROUPS, multirun=True).problems
    assert [problem.value for problem in wrong] == ["gspoo", "x"]


@pytest.mark.slow
def test_null_selects_no_option() -> None:
    assert load_config(["logging=null"]) != load_config(["logging=plain"])
    assert load_config(["algo=null"]).algo == load_config().algo
    assert "model.hf_checkpoint must be set with model.build=null" in only_error(
        ["~model", "model.warmup_experiment=null"]
    )
    line = parse_command_line(["experiment=null", "on=null", "algo=null"], GROUPS)
    assert (line.overrides, line.experiment, line.problems) == (["~algo"], None, [])
    assert any("batch.rollout_batch_size must be set" in text for text in config_errors("experiment=null"))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.apply_chat_template_kwargs.a=${foo}", "data.apply_chat_template_kwargs.a must refer to a key"),
        ("data.apply_chat_template_kwargs={b: {c: '${optim.lrr}'}}", "did you mean ${optim.lr}?"),
        ("rollout.stop=[a,'${oc.env:NO_SUCH}']", "rollout.stop must refer to an environment variable"),
        ("rollout.stop=['???']", "rollout.stop must be set, not ???"),
        ("data.apply_chat_template_kwargs.a=???", "data.apply_chat_template_kwargs.a must be set, not ???"),
        (
            "data.apply_chat_template_kwargs={a: '${data.apply_chat_template_kwargs.b}', b: {c: '${nope}'}}",
            "data.apply_chat_template_kwargs.a must refer to a key that exists",
        ),
    ],
)
def test_entries_of_mappings_and_lists_refer_to_existing_keys(word: str, message: str) -> None:
    assert message in only_error([word])


def test_only_the_invalid_entry_of_a_mapping_is_shown() -> None:
    message = only_error(["train.env_vars.TOKEN=hidden", "train.env_vars.OTHER=${oc.env:NO_SUCH}"])
    assert message.startswith("train.env_vars.OTHER must refer") and "hidden" not in message


WORDS = [
    "1",
    "abc",
    "[1,2]",
    "{a: 1}",
    "null",
    "true",
    "",
    "'x'",
    "${foo}",
    "1,2",
    "range(1,3)",
    "${",
    "[",
    "a=b",
    '"',
    "nan",
]
NAMES = [*keys(), *GROUPS, "run", "foo", "a.b", "", "hydra.job.name", "algo.", ".", "data.apply_chat_template_kwargs.a"]


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (("optim.lr=1e-4", "optim.lr=1e-5"), "optim.lr is given 2 times; the last one is used"),
        (("hydra/launcher=joblib",), "hydra/launcher has no effect without -m"),
        (("hydra.run.dir=/tmp/x",), "hydra.run.dir has no effect; the folder of a run is run.dir"),
        (("algo=gspo", "algo=grpo", "+algo=gspo"), "algo is given 3 times; the last one is used"),
        (("~algo",), "~algo selects no option, so its keys have their defaults; algo=null says the same"),
    ],
)
@pytest.mark.slow
def test_what_has_no_effect_is_a_warning(overrides: tuple[str, ...], warning: str) -> None:
    assert warning in load_config_with_notes(overrides, to_run=False).warnings


def test_several_trackers_are_a_list_of_options() -> None:
    logging = load_config(["logging=[wandb,tensorboard]", "logging.wandb.mode=offline"]).logging
    assert logging.wandb.enabled and logging.tensorboard.enabled


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "+", "++", "~", "--"]), st.sampled_from(NAMES), st.sampled_from(WORDS)),
        max_size=3,
    )
)
@settings(max_examples=40, deadline=None)
def test_any_invalid_override_is_a_problem(words: list[tuple[str, str, str]]) -> None:
    found = config_errors(*(f"{sign}{name}={value}" for sign, name, value in words))
    assert all(" must " in problem for problem in found)
    # Not "Error" alone: the default of agent.policy_errors has names of exceptions.
    of_hydra = ("append", "Could not", "full_key", "KeyError", "AttributeError", "ValidationError", "Exception:")
    assert not any(text in problem for problem in found for text in of_hydra)


@pytest.mark.parametrize("typed", ["1e3", "1_000", "0x10", "true", "FALSE", "1.50", "nan", "-0", "1e-07"])
def test_a_text_has_the_characters_that_were_typed(typed: str) -> None:
    config = load_config([f"run.name={typed}", f"train.env_vars.A={typed}", f"data.prompt_files=[a, {typed}]"])
    assert (config.run.name, config.train.env_vars, config.data.prompt_files) == (typed, {"A": typed}, ["a", typed])
    words = [f"train.env_vars={{A: {typed}, B: 'x, y', C: \"2\"}}", f"eval.prompt_data=[{typed},'a,b']"]
    config = load_config(words)
    assert config.train.env_vars == {"A": typed, "B": "x, y", "C": "2"}
    assert config.eval.prompt_data == [typed, "a,b"]


def test_the_result_of_a_function_is_no_text() -> None:
    config = load_config(["run.name=str(1)", "train.env_vars.A=int(3.0)", "data.prompt_files=sort([b,a])"])
    assert (config.run.name, config.train.env_vars, config.data.prompt_files) == ("1", {"A": "3"}, ["a", "b"])


def test_the_texts_of_a_sweep_have_the_characters_that_were_typed() -> None:
    line = parse_command_line(["logging.wandb.group=1e3,x,010", "run.name=1_0"], GROUPS, multirun=True)
    assert line.overrides[1:] == ['++logging.wandb.group="1e3",x,010', '++run.name="1_0"']


@pytest.mark.parametrize(
    "typed", ["choice(1e3, x,1_0)", "tag(a,b,choice(1e3,x,1_0))", "shuffle(choice( 1e3,x,1_0 ))", "shuffle(1e3,x,1_0)"]
)
def test_the_texts_of_a_sweep_with_a_function_have_the_characters_that_were_typed(typed: str) -> None:
    line = parse_command_line([f"run.name={typed}"], GROUPS, multirun=True)
    jobs = [user_overrides(job) for job in all_jobs(line)]
    assert sorted(load_config(job).run.name for job in jobs) == ["1_0", "1e3", "x"]


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        (
            "optim.lr=range(1,10,1e-9)",
            "have at most 10000 values in a sweep, got range(1,10,1e-9); write a larger step",
        ),
        ("data.num_rollout=range(0,10001)", "have at most 10000 values in a sweep"),
        ("optim.lr=range(0,inf,0.1)", "have at most 10000 values in a sweep"),
        ("optim.lr=range(0,nan,0.1)", "have at most 10000 values in a sweep"),
        ("data.num_rollout=range(1,4,0)", "have at most 10000 values in a sweep"),
        ("data.num_rollout=shuffle(range(1,1000000000))", "have at most 10000 values in a sweep"),
        ("data.num_rollout=range(4,1)", "have at least one value in a sweep, got range(4,1); correct the ends"),
    ],
)
def test_a_sweep_that_nobody_waits_for_is_not_enumerated(word: str, rule: str) -> None:
    (problem,) = parse_command_line([word], GROUPS, multirun=True).problems
    assert f"{word.partition('=')[0]} must {rule}" in str(problem)


def test_the_combinations_of_a_sweep_are_counted() -> None:
    line = parse_command_line([f"{key}=range(1,101)" for key in ("train.seed", "rollout.seed")], GROUPS, multirun=True)
    assert job_problems(line) == []
    line = parse_command_line(["algo=grpo,gspo", "train.seed=range(1,5002)"], GROUPS, multirun=True)
    (problem,) = job_problems(line)
    assert str(problem).startswith(
        "a sweep must have at most 10000 jobs, one for each combination of values, got 10002 for algo, train.seed; list"
    )
