"""Cases of the rules about rewards, evaluation and partial runs; see `cases.CASES` for the columns."""

from rlscale.config import RewardType
from rlscale.config.groups.judge import RewardEngineKind
from tests.unit.config.rules.valid_config import SFT, SGLANG, Values

NAMED: Values = {"reward.type": None, "reward.functions": {"right": "math", "style": "my_rewards:style"}}
WEIGHTED: Values = {**NAMED, "reward.weights": {"right": 1.0}}

FROZEN: Values = {"sglang.config": "models.yaml"}
JUDGED: Values = {"reward.type": "judge", "reward.engine.num_gpus": 1}

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "judge_has_engines",
        {"reward.type": None, "reward.functions": {"tone": "judge"}},
        "reward.engine.num_gpus must be at least 1 with reward.functions.tone=judge, got 0; set it, e.g. "
        "reward.engine.num_gpus=1",
        JUDGED,
    ),
    (
        "reward_engines_are_used",
        {**WEIGHTED, "reward.functions": {"right": "math"}, "reward.engine.num_gpus": 2},
        "reward.engine.num_gpus must be 0 without a function that asks the engines, got 2; set it to 0",
        {**WEIGHTED, "reward.engine.num_gpus": 2},
    ),
    (
        "reward_engines_have_whole_gpus",
        {**JUDGED, "reward.engine.num_gpus": 5, "reward.engine.num_gpus_per_engine": 4},
        "reward.engine.num_gpus must be a multiple of reward.engine.num_gpus_per_engine=4, got 5; set it to 8",
        {**JUDGED, "reward.engine.num_gpus": 8, "reward.engine.num_gpus_per_engine": 4},
    ),
    (
        "reward_engines_fit_nodes",
        {**JUDGED, "reward.engine.num_gpus_per_engine": 12},
        "reward.engine.num_gpus_per_engine must be at most cluster.num_gpus_per_node=8, or a multiple of it, got 12",
        {**JUDGED, "reward.engine.num_gpus_per_engine": 16},
    ),
    (
        "frozen_models_are_in_a_file",
        {**SGLANG, "sglang.frozen_models": {"ref": {"num_gpus": 1}}},
        'sglang.frozen_models must be empty without sglang.config, got {"ref": {"num_gpus": 1}}',
        {**SGLANG, "sglang.frozen_models": {"ref": {"num_gpus": 1}}, "sglang.config": "models.yaml"},
    ),
    (
        "frozen_models_fit_nodes",
        {**SGLANG, **FROZEN, "sglang.frozen_models": {"ref": {"num_gpus": 12, "num_gpus_per_engine": 12}}},
        "sglang.config must have num_gpus_per_engine of at most cluster.num_gpus_per_node=8, or a multiple of it",
        {**SGLANG, **FROZEN, "sglang.frozen_models": {"ref": {"num_gpus": 16, "num_gpus_per_engine": 16}}},
    ),
    (
        "reward_engine_kind_is_set",
        {**JUDGED, "rollout.external": True},
        "reward.engine.kind must be set with external rollout engines, got null; set reward.engine.kind=sglang",
        {**JUDGED, "rollout.external": True, "reward.engine.kind": RewardEngineKind.sglang},
    ),
    (
        "embedded_reward_engines_are_small",
        {**JUDGED, "reward.engine.num_gpus_per_engine": 2},
        "reward.engine.num_gpus_per_engine must be 1 with the embedded engine, got 2; set it to 1",
        {**JUDGED, **SGLANG, "reward.engine.num_gpus_per_engine": 2, "reward.engine.is_embedding": True},
    ),
    (
        "embedded_reward_engines_are_small",
        {**JUDGED, "reward.engine.is_embedding": True},
        "reward.engine.is_embedding must be false with the embedded engine, got true",
        {"reward.engine.is_embedding": True},
    ),
    (
        "reward_models_do_not_judge",
        {**JUDGED, **SGLANG, "reward.engine.is_embedding": True},
        "reward.engine.is_embedding must be false with reward.type=judge, got true; set it to false, or replace",
        {**JUDGED, "reward.custom_path": "a:b", "reward.engine.is_embedding": True},
    ),
    (
        "judge_prompt_has_the_response",
        {**JUDGED, "reward.judge.prompt": "Rate {answer}"},
        "reward.judge.prompt must have only the placeholders {prompt}, {response} and {label}, got {answer}; write {{",
        {**JUDGED, "reward.judge.prompt": "Rate {{1}} {response}"},
    ),
    (
        "judge_prompt_has_the_response",
        {**JUDGED, "reward.judge.prompt": "Rate {response:d}"},
        "reward.judge.prompt must have only the placeholders {prompt}, {response} and {label}, got {response:d}; write",
        {**JUDGED, "reward.judge.prompt": "Rate {response}"},
    ),
    (
        "judge_prompt_has_the_response",
        {**JUDGED, "reward.judge.prompt": "Rate {prompt}"},
        "reward.judge.prompt must have the placeholder {response}, got Rate {prompt}; add it",
        {"reward.judge.prompt": "Rate {prompt}"},
    ),
    (
        "judge_prompt_has_the_response",
        {**JUDGED, "reward.judge.prompt": "Rate {response"},
        "reward.judge.prompt must be a template, got Rate {response; write {{ and }} for braces",
        JUDGED,
    ),
    (
        "judge_pattern_has_a_group",
        {**JUDGED, "reward.judge.pattern": "[0-9"},
        "reward.judge.pattern must be a regular expression, got [0-9; correct it: ",
        {**JUDGED, "reward.judge.pattern": "([0-9])"},
    ),
    (
        "judge_pattern_has_a_group",
        {**JUDGED, "reward.judge.pattern": "[0-9]"},
        "reward.judge.pattern must have a group for the number, got [0-9]; put parentheses around the number",
        {"reward.judge.pattern": "[0-9]"},
    ),
    (
        "judge_scores_have_a_range",
        {**JUDGED, "reward.judge.max_score": 0.0},
        "reward.judge.max_score must be above reward.judge.min_score=0, got 0.0; raise it",
        {**JUDGED, "reward.judge.max_score": 1.0},
    ),
    (
        "rehearsals_have_no_judge",
        {**JUDGED, "run.rehearsal": True},
        "reward.engine.num_gpus must be 0 with run.rehearsal, got 1; set it to 0 and reward.type=random",
        JUDGED,
    ),
    (
        "reward_functions_have_names",
        {"reward.functions": {"a-b": "math"}},
        "reward.functions must have names of letters, digits and underscores, got a-b; write e.g. a_b",
        WEIGHTED,
    ),
    (
        "reward_functions_exist",
        {"reward.functions": {"a": "deepscale"}},
        "reward.functions.a must be a built-in reward or package.module:name, got deepscale; did you mean deepscaler?",
        WEIGHTED,
    ),
    (
        "reward_functions_exist",
        {"reward.functions": {"a": "style py"}},
        "reward.functions.a must be a built-in reward or package.module:name, got style py; write",
        {"reward.functions": {"a": "a.b.c"}},
    ),
    (
        "reward_functions_exclude_other_rewards",
        {**WEIGHTED, "reward.type": "exact_match"},
        "reward.type must be null with reward.functions, got exact_match; set reward.type=null, and name it in "
        "reward.functions",
        WEIGHTED,
    ),
    (
        "reward_functions_exclude_other_rewards",
        {**WEIGHTED, "reward.custom_path": "a:b"},
        "reward.custom_path must be null with reward.functions, got a:b; set reward.custom_path=null",
        {"reward.type": "math", "reward.custom_path": "a:b"},
    ),
    (
        "reward_functions_exclude_groups",
        {**WEIGHTED, "reward.group": True},
        "reward.group must be false with reward.functions, got true; set reward.group=false",
        WEIGHTED,
    ),
    (
        "reward_functions_are_weighted",
        {**NAMED, "reward.functions": {"a": "math", "b": "dapo"}},
        "reward.weights must be set with reward.functions, got {}; set 'reward.weights={a: 1.0, b/score: 1.0}', or "
        "reward.key=a",
        {**NAMED, "reward.key": "style"},
    ),
    (
        "weighted_functions_exist",
        {**NAMED, "reward.weights": {"right": 1.0, "styl/tone": 1.0}},
        "reward.weights must name functions of right, style, got styl/tone; did you mean style?",
        {**NAMED, "reward.weights": {"right": 1.0, "style/tone": 1.0}},
    ),
    (
        "weighted_functions_exist",
        {**NAMED, "reward.key": "right/first"},
        "reward.key must name no value of reward.functions.right=math, which returns one number, got right/first; "
        "write right",
        {**NAMED, "reward.key": "right"},
    ),
    (
        "weighted_functions_exist",
        {"reward.functions": {"a": "dapo"}, "eval.interval": 1, "eval.reward_key": "a"},
        "eval.reward_key must name a value of reward.functions.a=dapo, which returns several, got a; write a/score",
        {"reward.functions": {"a": "dapo"}, "eval.interval": 1, "eval.reward_key": "a/acc"},
    ),
    (
        "remote_reward_has_a_url",
        {"reward.functions": {"a": "remote_rm"}},
        "reward.url must be set with reward.functions.a=remote_rm, got null",
        {"reward.functions": {"a": "remote_rm"}, "reward.url": "http://h"},
    ),
    (
        "reward_has_labels",
        {"data.label_key": None, "reward.functions": {"a": "random", "b": "f1"}},
        "data.label_key must be set with reward.functions.b=f1",
        {"data.label_key": None, "reward.functions": {"a": "random", "b": "a:b"}},
    ),
    (
        "group_rewards_exclude_evaluation",
        {"reward.group": True, "eval.interval": 5},
        "reward.group must be false with eval.interval=5, got true; set eval.interval=null",
        {"reward.group": True},
    ),
    (
        "group_reward_is_custom",
        {"reward.group": True},
        "reward.group must be false with a built-in reward, got true; remove it, or set reward.custom_path",
        {"reward.group": True, "reward.custom_path": "a:b"},
    ),
    (
        "remote_reward_has_a_url",
        {"reward.type": "boxed_remote_rm"},
        "reward.url must be set with reward.type=boxed_remote_rm, got null",
        {"reward.type": "boxed_remote_rm", "reward.url": "http://h"},
    ),
    (
        "dapo_reward_has_the_value",
        {"reward.type": "dapo", "reward.key": "pred"},
        "reward.key must be score or acc with reward.type=dapo, got pred; set reward.key=score",
        {"reward.type": "dapo", "reward.key": "acc"},
    ),
    (
        "reward_weights_have_an_effect",
        {"reward.custom_path": "a:b", "reward.weights": {"x": 0.0, "y": 0.0}},
        'reward.weights must have a weight other than 0, got {"x": 0.0, "y": 0.0}; set e.g. reward.weights.x=1.0',
        {"reward.custom_path": "a:b", "reward.weights": {"x": 0.0, "y": -1.0}},
    ),
    (
        "reward_url_is_a_url",
        {"reward.type": "math", "reward.url": "user:word@host/grade?api_key=abc"},
        "reward.url must be the URL of a server, http://<host>:<port>/<path> or https://..., got host/grade; write "
        "http://host/grade",
        {"reward.type": "math", "reward.url": "http://user:word@host/grade?api_key=abc"},
    ),
    (
        "remote_reward_has_a_url",
        {"reward.type": "remote_rm"},
        "reward.url must be set with reward.type=remote_rm, got null; set it to the URL of the server, e.g. "
        "reward.url=http://10.0.0.1:8000",
        {"reward.type": "remote_rm", "reward.url": "http://h"},
    ),
    (
        "remote_reward_has_a_url",
        {"reward.type": "remote_rm"},
        "reward.url must be set",
        {"reward.type": "remote_rm", "reward.custom_path": "a:b"},
    ),
    (
        "dapo_reward_has_a_key",
        {"reward.type": "dapo"},
        "reward.key must be set with reward.type=dapo, got null; set reward.key=score",
        {"reward.type": "dapo", "reward.key": "score"},
    ),
    (
        "dapo_reward_has_a_key",
        {"reward.type": "boxed_dapo"},
        "reward.key must be set with reward.type=boxed_dapo, got null; set reward.key=score",
        {"reward.type": "boxed_f1"},
    ),
    (
        "reward_url_is_a_url",
        {"reward.type": "remote_rm", "reward.url": "10.0.0.1:80"},
        "reward.url must be the URL of a server, http://<host>:<port>/<path> or https://..., got 10.0.0.1:80; write "
        "http://10.0.0.1:80",
        {"reward.type": "remote_rm", "reward.url": "https://rm"},
    ),
    (
        "reward_url_is_a_url",
        {"reward.type": "remote_rm", "reward.url": "http://u:secret@h:99999/score"},
        "reward.url must be the URL of a server, http://<host>:<port>/<path> or https://..., got http://h:99999/score; "
        "write e.g. http://10.0.0.1:8000/score",
        {"reward.type": "remote_rm", "reward.url": "http://10.0.0.1:8000/score"},
    ),
    (
        "wandb_host_is_a_url",
        {"logging.wandb.enabled": True, "logging.wandb.host": "wandb.local:8080"},
        "logging.wandb.host must be the URL of a server, http://<host>:<port> or https://..., got wandb.local:8080; "
        "write http://wandb.local:8080",
        {"logging.wandb.enabled": True, "logging.wandb.host": "http://wandb.local:8080"},
    ),
    (
        "single_rewards_have_no_key",
        {"reward.type": "math", "reward.key": "score"},
        "reward.key must be null with reward.type=math, got score; remove it; this reward returns a single number",
        {"reward.type": "math", "reward.key": "score", "reward.custom_path": "a:b"},
    ),
    (
        "single_rewards_have_no_key",
        {"reward.type": "math", "eval.reward_key": "score", "eval.interval": 1},
        "eval.reward_key must be null with reward.type=math, got score; remove it; this reward returns a single number",
        {"reward.type": "math", "eval.reward_key": "score"},
    ),
    (
        "reward_key_excludes_weights",
        {"reward.weights": {"a": 1.0}, "reward.key": "a", "reward.custom_path": "a:b"},
        "reward.key must be null with reward.weights, got a; set one of the two",
        {"reward.weights": {"a": 1.0}, "reward.custom_path": "a:b"},
    ),
    (
        "reward_weights_are_finite",
        {"reward.weights": {"a": float("inf")}, "reward.custom_path": "a:b"},
        "reward.weights must contain finite numbers, got ",
        {"reward.weights": {"a": -1.0}, "reward.custom_path": "a:b"},
    ),
    (
        "weighted_rewards_are_named",
        {"reward.weights": {"a": 1.0}, "reward.type": "math"},
        "reward.weights must be empty with reward.type=math, got ",
        {"reward.weights": {"a": 1.0}, "reward.type": "remote_rm", "reward.url": "http://h"},
    ),
    (
        "reward_is_set",
        {"reward.type": None},
        "reward.type must be set with reward.custom_path=null, got null; choose reward=exact_match or "
        "reward=math, or set reward.custom_path=<package.module:name>",
        {"reward.custom_path": "a.b:c"},
    ),
    ("reward_is_set", {"reward.type": None}, "set reward.custom_path", {**SFT, "reward.type": None}),
    (
        "reward_is_set",
        {"reward.type": None},
        "set reward.custom_path",
        {"reward.type": None, "sampling.custom_generate_function_path": "a:b"},
    ),
    (
        "zero_reward_has_a_teacher",
        {"reward.type": "zero"},
        "reward.type must not be zero without distillation, got zero; set algo.opd_kl_coef=1.0 and a teacher, or "
        "choose reward=exact_match or reward=math",
        {"reward.type": RewardType.zero, "algo.opd_kl_coef": 1.0, "model.teacher_url": "http://10.0.0.1:30000"},
    ),
    (
        "reward_has_labels",
        {"data.label_key": None},
        "data.label_key must be set with reward.type=exact_match",
        {"data.label_key": None, "reward.type": RewardType.random},
    ),
    (
        "reward_has_labels",
        {"data.label_key": None, "reward.type": "boxed_gpqa"},
        "data.label_key must be set with reward.type=boxed_gpqa",
        {"data.label_key": None, "reward.type": "boxed_ifbench"},
    ),
    (
        "reward_has_labels",
        {**SFT, "data.label_key": None, "eval.interval": 1},
        "data.label_key must be set with reward.type=exact_match",
        {**SFT, "data.label_key": None, "eval.interval": 1, "eval.label_key": "answer"},
    ),
    (
        "evaluation_has_data",
        {"eval.interval": 5},
        "eval.prompt_data must be set with eval.interval",
        {"eval.interval": 5, "eval.prompt_data": ["a", "b"]},
    ),
    (
        "eval_sets_are_pairs",
        {"eval.prompt_data": ["a", "b", "c"]},
        'eval.prompt_data must contain pairs of name and file, got ["a", "b", "c"]; write [name, file, name, file]',
        {"eval.prompt_data": ["b"]},
    ),
    (
        "eval_sets_are_pairs",
        {"eval.prompt_data": ["a", "b", "a", "c"]},
        'eval.prompt_data must give each set a unique name, got ["a", "b", "a", "c"]; rename a',
        {"eval.prompt_data": ["a", "b", "c", "b"]},
    ),
    (
        "eval_file_is_valid",
        {"eval.config": "/no/such/file.yaml"},
        "eval.config must name a readable YAML file, got /no/such/file.yaml",
        {"eval.config": None},
    ),
    (
        "stop_reward_needs_evaluation",
        {"eval.stop_reward": 0.5},
        "eval.interval must be set with eval.stop_reward=0.5, got null; set eval.interval=1, or eval.stop_reward=null",
        {"eval.stop_reward": 0.5, "eval.interval": 5},
    ),
    (
        "export_path_is_a_template",
        {"checkpoint.save_hf": "/x"},
        "checkpoint.save_hf must contain {rollout_id}, got /x",
        {"checkpoint.save_hf": "/x/{rollout_id}"},
    ),
    (
        "one_partial_run",
        {"debug.rollout_only": True, "debug.train_only": True},
        "debug.rollout_only must be false with debug.train_only, got true; keep one of them",
        {"debug.rollout_only": True},
    ),
    (
        "one_partial_run",
        {"debug.rollout_only": True, "debug.load_rollout_data": "d/{rollout_id}"},
        "debug.rollout_only must be false with debug.load_rollout_data",
        {"debug.load_rollout_data": "d/{rollout_id}"},
    ),
    (
        "train_only_has_samples",
        {"debug.train_only": True},
        "debug.load_rollout_data must be set with debug.train_only, got null",
        {"debug.train_only": True, "debug.load_rollout_data": "d/{rollout_id}"},
    ),
    ("train_only_has_samples", {"debug.train_only": True}, "or choose algo=sft", {"debug.train_only": True, **SFT}),
    (
        "rollout_only_excludes_sft",
        {"debug.rollout_only": True, **SFT},
        "debug.rollout_only must be false with algo.loss_type=sft_loss, got true",
        {"debug.rollout_only": True},
    ),
    (
        "profiled_rollouts_are_in_the_run",
        {"debug.profile_rollouts": [0, 500], "data.num_rollout": 20},
        "debug.profile_rollouts must be below data.num_rollout=20, got [0, 500]; the last rollout is 19; write numbers",
        {"debug.profile_rollouts": [0, 19], "data.num_rollout": 20},
    ),
    (
        "profiled_rollouts_are_in_the_run",
        {"debug.profile_rollouts": [0, -1]},
        "debug.profile_rollouts must contain numbers from 0, got [0, -1]; write numbers of rollouts, which count",
        {"debug.profile_rollouts": [0]},
    ),
    (
        "home_folders_exist",
        {"run.dir": "~no_such_user/runs"},
        "run.dir must begin with the home folder of a user of this machine, got ~no_such_user/runs; write the full",
        {"run.dir": "~/runs"},
    ),
    (
        "dump_files_differ",
        {"debug.save_train_data": "d/{rollout_id}", "debug.save_rollout_data": "d/{rollout_id}"},
        "debug.save_train_data must differ from debug.save_rollout_data, got d/{rollout_id}",
        {"debug.save_train_data": "t/{rollout_id}", "debug.save_rollout_data": "d/{rollout_id}"},
    ),
    (
        "dump_files_are_templates",
        {"debug.save_rollout_data": "/x.jsonl"},
        "debug.save_rollout_data must contain {rollout_id}, got /x.jsonl",
        {"debug.save_rollout_data": "/x/{rollout_id}.jsonl"},
    ),
    (
        "dump_files_are_templates",
        {"debug.load_rollout_data": "d.jsonl"},
        "debug.load_rollout_data must contain {rollout_id}, got d.jsonl",
        {"debug.load_rollout_data": "{rollout_id}.jsonl", "debug.save_train_data": "t/{rollout_id}"},
    ),
    (
        "checked_metric_has_a_threshold",
        {"ci.metric_checker_key": "eval/reward"},
        "ci.metric_checker_threshold must be set with ci.metric_checker_key=eval/reward, got null",
        {"ci.metric_checker_key": "eval/reward", "ci.metric_checker_threshold": 0.5},
    ),
    (
        "checked_metric_has_a_threshold",
        {"ci.metric_checker_threshold": 0.5},
        "ci.metric_checker_key must be set with ci.metric_checker_threshold=0.5, got null; name a metric",
        {},
    ),
    (
        "empty_run_evaluates",
        {"data.num_rollout": 0},
        "eval.interval must be set with data.num_rollout=0, got null; set eval.interval=1; a run without "
        "rollouts only evaluates",
        {"data.num_rollout": 0, "eval.interval": 1},
    ),
]
