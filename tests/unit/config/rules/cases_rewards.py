"""Cases of the rules about rewards, evaluation and partial runs; see `cases.CASES` for the columns."""

from rlscale.config import RewardType
from tests.unit.config.rules.valid_config import SFT, Values

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "group_rewards_exclude_evaluation",
        {"reward.group": True, "eval.interval": 5},
        "reward.group must be false with eval.interval=5, got true; set eval.interval=null",
        {"reward.group": True},
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
        "reward_url_has_a_scheme",
        {"reward.type": "remote_rm", "reward.url": "10.0.0.1:80"},
        "reward.url must begin with http:// or https://, got 10.0.0.1:80; write http://10.0.0.1:80",
        {"reward.type": "remote_rm", "reward.url": "https://rm"},
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
        "reward_is_set",
        {"reward.type": None},
        "reward.type must be set with reward.custom_path=null, got null; choose reward=exact_match or "
        "reward=math, or set reward.custom_path=<package.module:name>",
        {"reward.custom_path": "a.b:c"},
    ),
    ("reward_is_set", {"reward.type": None}, "set reward.custom_path", {**SFT, "reward.type": None}),
    (
        "reward_has_labels",
        {"data.label_key": None},
        "data.label_key must be set with reward.type=exact_match",
        {"data.label_key": None, "reward.type": RewardType.random},
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
        "eval.stop_reward must be null without eval.interval, got 0.5",
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
