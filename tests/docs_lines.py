"""The lines of `rlscale-train` in the docs: those that a nightly test runs, and why the others are only composed."""

import re
import shlex
from pathlib import Path

from tests.test_docs import PAGES, blocks

SIZES = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
)
QUICKSTART = (
    *("batch.rollout_batch_size=4", "batch.n_samples_per_prompt=4", "eval.interval=null", "eval.stop_reward=null"),
    *("model.warmup_experiment=null", *SIZES, "model.head_dim=16"),
)
"""The quickstart, small enough for a test. Each line keeps what it is about."""
TWO, FIVE = ("data.num_rollout=2",), ("data.num_rollout=5",)
HEADS = ("model.num_key_value_heads=2",)
WEIGHTS = ("train.weight_folder={folder}/weights",)

RUNS: dict[str, tuple[str, ...]] = {
    r"algo=rloo optim\.lr=1e-4": (*QUICKSTART, *TWO),
    r"model=tiny_qwen3_moe": (*QUICKSTART, *TWO),
    r"model=tiny_qwen3_moe algo\.use_rollout_routing_replay=true": (*QUICKSTART, *TWO),
    r"rollout\.weight_precision=(fp8|int4) algo\.use_tis=true": (*QUICKSTART, *TWO),
    r"\+experiment=quickstart optim\.name=muon .*": (*QUICKSTART, *TWO),
    r"\+experiment=quickstart train\.lora\.rank=8 .*": (*QUICKSTART, *TWO),
    r"\+experiment=quickstart train\.true_on_policy_mode=true": (*QUICKSTART, *TWO),
    r"\+experiment=quickstart algo=ppo data\.num_rollout=60": (*QUICKSTART, *TWO),
    r"\+experiment=quickstart checkpoint\.save_interval=5": (*QUICKSTART, *FIVE),
    r"run\.dir=runs/look data\.num_rollout=5 debug\.dump_details=details": QUICKSTART,
    r"data\.num_rollout=5 'debug\.profile_rollouts=\[0,3\]'": QUICKSTART,
    r"rollout=scripted rollout\.script_path=my_script:answer .*": ("batch.rollout_batch_size=4",),
    r"reward\.custom_path=my_reward:score 'reward\.weights=.*": (*QUICKSTART, *TWO),
    r"experiment=quickstart sandbox\.kind=subprocess .*": (*QUICKSTART, *TWO),
    r"rollout\.max_staleness=1": (*QUICKSTART, *TWO),
    r"rollout\.sampling_params\.repetition_penalty=1\.05 .*": (*QUICKSTART, *TWO),
    r"logging=tensorboard": (*QUICKSTART, *TWO),
    r"logging=tensorboard logging\.tensorboard\.dir=.*": (*QUICKSTART, *TWO, "logging.tensorboard.dir={folder}/boards"),
    r"'logging=\[wandb,tensorboard\]' logging\.wandb\.mode=offline": (*QUICKSTART, *TWO),
    r"cluster\.actor_num_gpus_per_node=2 cluster\.rollout_num_gpus=2 cluster\.colocate=true .*": (*QUICKSTART, *TWO),
    r"cluster\.actor_num_gpus_per_node=2 fsdp\.context_parallel_size=2 .*": (*QUICKSTART, *HEADS, *TWO),
    r"train=megatron cluster\.actor_num_gpus_per_node=2 .*": (*QUICKSTART, *HEADS, *TWO),
    r"train=megatron megatron\.before_train_step_hook_path=.*": (*QUICKSTART, *TWO),
    r"train\.weight_channel=shared_memory": (*QUICKSTART, *TWO),
    r"train\.weight_channel=delta train\.weight_folder=.*": (*QUICKSTART, *TWO, *WEIGHTS),
    r"algo\.loss_type=custom_loss .*": (*QUICKSTART, *TWO),
    r"algo\.custom_advantage_function_path=.*": (*QUICKSTART, *TWO),
    r"algo\.use_tis=true algo\.custom_tis_function_path=.*": (*QUICKSTART, *TWO),
    r"algo\.custom_reducer_function_path=.*": (*QUICKSTART, *TWO),
    r"train\.rollout_data_postprocess_path=.*": (*QUICKSTART, *TWO),
    r"experiment=quickstart_warmup": ("batch.rollout_batch_size=8", *TWO),
    r"\+experiment=quickstart_vision ('|train=megatron ).*": (
        "batch.rollout_batch_size=4",
        "eval.interval=null",
        "eval.stop_reward=null",
    ),
    r"model=tiny_qwen3_agent agent\.environment_path=my_game.*": ("batch.rollout_batch_size=2", *TWO),
    r"model=tiny_qwen3_agent 'agent\.tools=.*": (
        "batch.rollout_batch_size=2",
        "eval.interval=null",
        "eval.stop_reward=null",
        *TWO,
    ),
}
"""Arguments of a line -> the overrides that shorten its run. `{folder}` is the working folder."""

BY_TESTS: dict[str, str] = {
    r"reward\.custom_path=my_reward:score data\.num_rollout=50 .*": "tests/integration/test_tutorial.py",
    r"agent\.function_path=my_agent:agent .*": "tests/integration/test_agent_tutorial.py",
    r"'agent\.command=\[python,my_program.*": "tests/integration/test_agent_tutorial.py",
    r"experiment=(calculator|framework_agent|two_agents)": "tests/integration/test_agent_examples.py",
    r"experiment=framework_agent agent\.function_path=null .*": "tests/integration/test_url_agents.py",
    r"experiment=\S+ on=(rehearsal|\[qwen3_4b,rehearsal\])": "tests/integration/test_rehearsal.py",
    r"buffer\.url=.*": "tests/integration/test_buffer.py",
    r"\+experiment=quickstart algo\.opd_kl_coef=1\.0 model\.teacher_url=.*": "tests/integration/test_teachers.py",
    r"\+experiment=quickstart gateway\.enabled=true .*": "tests/integration/test_gateway.py",
    r"-m (batch\.num_steps_per_rollout=1,2|algo=grpo,rloo) optim\.lr=.*": "tests/integration/test_parallel_sweeps.py",
    r"-m (hydra/launcher=(joblib|ray) .*)?algo=grpo,rloo train\.seed=1,2": "tests/integration/test_parallel_sweeps.py",
    r"-m hydra/launcher=ray optim\.lr=.* train\.lora\.shared_base=true": "tests/integration/test_shared_engines.py",
    r"-m hydra/sweeper=optuna .*": "tests/integration/test_sweeps.py",
    r"rollout=sglang( sglang\.page_size=.*)?": "tests/integration/test_sglang.py",
    r"rollout=sglang cluster\.rollout_num_gpus=.*": "tests/integration/test_sglang.py",
    r"rollout=sglang train\.lora\.rank=8 .* train\.lora\.sync=adapter .*": "tests/integration/test_lora.py",
    r"cluster\.rollout_num_gpus=2 router\.use_middleware_router=true .*": "tests/integration/test_middleware_router.py",
    r"rollout=external .*": "tests/integration/test_external.py",
    r"\+experiment=quickstart_vision": "tests/integration/test_vision.py",
    r"model=tiny_qwen3_agent agent\.url=.*": "tests/integration/test_url_agents.py",
    r"-sc install=.*": "tests/unit/cli/test_config.py",
    r"--help|\+experiment=qwen3_4b_grpo --cfg job": "tests/test_docs_commands.py",
}
"""Arguments of a line -> the file of a test that runs the same, with another size or model."""

GPUS = "needs GPUs and weights of several GB; the checks of the configuration are run, and it can be rehearsed"
COMPOSED: dict[str, str] = {
    r"\+?experiment=qwen3_\w+\b(?! on=rehearsal| --cfg).*": GPUS,
    r"experiment=calculator on=qwen3_4b|experiment=sft": GPUS,
    r"experiment=null model=qwen3_4b .*": GPUS,
    r"-m hydra/launcher=submitit_slurm .*": GPUS + "; tests/cluster has Slurm",
    r"train=megatron model=hf model\.hf_checkpoint=(XiaomiMiMo|/models/gpt-oss).*": GPUS,
    r"reward=judge .*": GPUS + "; tests/integration/test_judge.py runs judges",
    r"\+experiment=quickstart algo\.opd_kl_coef=1\.0 (algo\.opd_kl=full )?model\.teacher_load=.*": GPUS,
    r"\+experiment=quickstart algo\.opd_kl_coef=1\.0 'data\.teacher_by_source=.*": "needs rows with a source "
    "and two servers; tests/integration/test_teachers.py runs one",
    r"--config-dir .*": "names a file of the reader, which tests/test_docs_commands.py writes",
    r"data\.num_rollout=5 'debug\.load_rollout_data=.*": "reads what the line before it wrote; "
    "tests/integration/test_parts.py runs both",
    r"on=ray_cluster .*|.*-- .*": "needs a cluster; tests/cluster has several nodes",
    r"reward\.type=null 'reward\.functions=.*": "names a function that the page does not define",
    r"experiment=quickstart sandbox\.kind=(docker|fusion) .*": "needs Docker, or a server of sandboxes",
    r"experiment=quickstart agent\.tools=.*": "the quickstart's model has no template for tools",
    r"logging=wandb .*": "needs an account of Weights & Biases",
    r"model=tiny_qwen3_agent agent\.environment_path=rlscale\.agents\..*": "needs the log of an earlier "
    "run, or a server of environments; tests/unit/agents has both",
    r"model=tiny_qwen3_agent 'agent\.mcp_servers=.*": "starts a server of the page; tests/ranks/agents has MCP",
}
"""Arguments of a line -> the reason why it is only composed, with all checks of the configuration."""


def lines() -> dict[str, Path]:
    """The arguments of every line of a shell block, as they are typed -> the page."""
    found: dict[str, Path] = {}
    for page in PAGES:
        typed = blocks(page, "bash")
        # In a session with output, commands have a prompt.
        typed += [re.sub(r"^[^$].*\n|^\$ ", "", each, flags=re.M) for each in map(_joined, blocks(page, "console"))]
        for line in (line for block in map(_joined, typed) for line in block.splitlines()):
            text = " ".join(re.sub(r"(^|\s{2,})#.*", "", line).split())
            if "rlscale-train " in text:
                found.setdefault(text.partition("rlscale-train ")[2], page)
    return found


def _joined(block: str) -> str:
    return block.replace("\\\n", " ")


def overrides_of(line: str, folder: Path) -> list[str]:
    """The words of a line that is run, with what shortens its run."""
    short = next(values for pattern, values in RUNS.items() if re.fullmatch(pattern, line))
    return [*shlex.split(line), *(value.replace("{folder}", str(folder)) for value in short)]
