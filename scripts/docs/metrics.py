"""Writes the reference page of the metrics: meaning and healthy range of each name."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlscale.observe.metrics.metric_names import METRICS

NO_RANGE = "no range; compare with your other runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSection:
    """A heading of the page, the metrics with one of the prefixes, and their healthy ranges.

    Example:
        MetricSection(title="Rewards", prefixes=("reward/",), default="no range", ranges={"reward/std": "above 0"})
    """

    title: str
    prefixes: tuple[str, ...]
    default: str = NO_RANGE  # the range of a name that has none in `ranges`
    ranges: dict[str, str] = field(default_factory=dict)


SECTIONS: tuple[MetricSection, ...] = (
    MetricSection(
        title="Rewards",
        prefixes=(
            "reward/",
            "reward_category/",
            "passrate/",
            "rollout/raw_reward",
            "rollout/rewards",
            "rollout/zero_std",
            "rollout/error_cat/",
        ),
        ranges={
            "reward/mean": "rises within the first tens of rollouts; between 0.1 and 0.9 of its maximum at the "
            "start, so that groups have right and wrong samples",
            "reward/std": "above 0; 0: nothing to learn from",
            "reward/flat_groups": "below 0.5; near 1 the gradient is 0: easier or harder prompts, more samples "
            "per prompt, `algo=dapo`",
            "passrate/pass@<k>": "rises with k; equal for all k: the samples of a prompt are alike, raise the "
            "temperature",
            "rollout/zero_std/count_<reward>": "few groups; as `reward/flat_groups`",
        },
    ),
    MetricSection(
        title="Responses",
        prefixes=(
            "response_len/",
            "truncated/",
            "rollout/response_len",
            "rollout/total_lengths",
            "rollout/truncated",
            "rollout/repetition_frac",
        ),
        ranges={
            "response_len/mean": "changes slowly; a rise that the reward does not follow: `algo.overlong_buffer_len`",
            "response_len/max": "at `rollout.max_response_len` in some rollouts; in all: raise it",
            "truncated/ratio": "below 0.1; a cut response rarely has its answer: raise "
            "`rollout.max_response_len`, or `algo.overlong_filter=true`",
            "rollout/truncated": "below 0.1",
            "rollout/truncated_ratio": "below 0.1",
            "rollout/repetition_frac": "below 0.05; above: lower `optim.lr`, or `algo.use_kl_loss=true`",
        },
    ),
    MetricSection(
        title="Policy and optimiser",
        prefixes=(
            "train/loss",
            "train/grad_norm",
            "train/lr",
            "train/pg_",
            "train/ratio_mean",
            "train/kl",
            "train/teacher_kl",
            "train/entropy",
            "train/mtp_loss",
            "train/critic_",
            "train_epoch_",
            "rollout/return",
            "rollout/teacher_kl",
            "rollout/kl",
            "rollout/entropy",
            "rollout/padding",
            "rollout/log_probs",
            "rollout/rollout_log_probs",
            "rollout/ref_log_probs",
            "rollout/teacher_log_probs",
            "rollout/advantages",
            "rollout/returns",
            "rollout/values",
        ),
        ranges={
            "train/loss": "near 0 with advantages relative to a group, and no sign of progress; falls only with "
            "`algo=sft`",
            "train/grad_norm": "within a factor of ten of its median; a lasting rise comes before a collapse: "
            "lower `optim.lr`. 0: see `reward/flat_groups`",
            "train/lr": "follows the schedule of `optim`",
            "train/pg_clipfrac": "0 with one optimiser step per rollout, else below 0.2; above: fewer steps per "
            "rollout or a lower `optim.lr`",
            "train/pg_clipfrac_dual": "below 0.01",
            "train/ratio_mean": "1 with one optimiser step per rollout, else 0.95 to 1.05",
            "train/kl": "0 with one optimiser step per rollout, else below 0.02",
            "train/kl_loss": "rises slowly from 0; a jump: lower `optim.lr` or raise `algo.kl_loss_coef`",
            "train/teacher_kl": "falls towards 0",
            "rollout/teacher_kl": "falls towards 0",
            "train/critic_value_error": "falls; compare with the variance of the rewards",
            "train_epoch_<n>/<name>": "as `train/<name>`; `kl` and `pg_clipfrac` rise with n",
            "rollout/kl": "rises slowly from 0",
            "train/entropy": "falls slowly with the reward; near 0 while the reward is low: the policy no "
            "longer explores (a larger `algo.eps_clip_high`, `algo.entropy_coef`); a lasting rise: text without "
            "meaning, lower `optim.lr`",
            "train/mtp_loss": "as low as after pre-training; a rise: engines accept fewer drafts",
            "rollout/entropy": "as `train/entropy`",
            "rollout/padding": "below 0.3; above: `batch.use_dynamic_batch_size=true`",
            "rollout/log_probs": "equal to `rollout/rollout_log_probs` within `logprob_diff/mean`",
            "rollout/rollout_log_probs": "equal to `rollout/log_probs` within `logprob_diff/mean`",
            "rollout/ref_log_probs": "equal to `rollout/log_probs` in the first rollout, then below it",
            "rollout/advantages": "near 0 with estimators that compare samples",
            "rollout/values": "approaches `rollout/returns`; far from it: `critic.num_critic_only_steps`",
        },
    ),
    MetricSection(
        title="Trainer and engine",
        prefixes=("logprob_diff/", "train/tis_", "train/decoupled_", "train/mis_", "train/routes/", "train/opsm_"),
        ranges={
            "logprob_diff/mean": "below `debug.logprob_diff_warn`: 1e-4 in float32, 0.05 in bfloat16. Here "
            "about 5e-7 in float32 with the embedded engine. Above: dtype, kernels or weights of trainer and "
            "engine differ",
            "logprob_diff/max": "no limit for one token; steady. A jump with a steady mean is one unlikely token",
            "logprob_diff/k1": "near 0, either sign",
            "logprob_diff/k3": "below 1e-3 in bfloat16",
            "logprob_diff/stale_mean": "larger than `logprob_diff/mean`, because the weights differ; steady",
            "train/tis_mean": "0.95 to 1.05",
            "train/tis_clipfrac": "below 0.05; above: trainer and engine differ, see `logprob_diff/mean`",
            "train/decoupled_mean": "0.95 to 1.05",
            "train/decoupled_clipfrac": "below 0.05",
            "train/mis_ratio": "0.95 to 1.05",
            "train/mis_weight": "0.95 to 1.05",
            "train/mis_clipfrac": "below 0.05",
            "train/mis_rejectfrac": "below 0.1",
            "train/mis_vetofrac": "below 0.1",
            "train/routes/replayed": "1 with an engine that records its experts",
            "train/routes/differing": "near 0 in float32; in bfloat16 it rises with `logprob_diff/mean`",
            "train/opsm_maskfrac": "below 0.1",
        },
    ),
    MetricSection(
        title="Staleness and weights",
        prefixes=("staleness/", "queue/", "weights/", "buffer/"),
        ranges={
            "staleness/mean": "0 without `rollout.max_staleness`, else at most it",
            "staleness/max": "at most `rollout.max_staleness`; the run enforces it",
            "staleness/dropped_groups": "0; above: work of the engines is lost, lower `rollout.max_staleness`",
            "queue/age_s": "below one step",
            "queue/length": "0 or 1",
            "weights/version": "rises by 1 with each update",
            "buffer/age_s_<mean/max>": "a few steps",
        },
    ),
    MetricSection(
        title="Evaluation",
        prefixes=("eval/",),
        ranges={
            "eval/reward_mean": "rises with `reward/mean`; falls while that rises: the policy exploits the "
            "reward or has learnt its prompts",
            "eval/<set>/reward_ci_<low/high>": "a step is a gain only where intervals do not overlap; narrower "
            "with more prompts",
            "eval/<set>/truncated_share": "below 0.1; above: raise `eval.max_response_len`",
            "eval/<set>/failed_share": "absent",
            "eval/loss": "falls, then rises once the model has learnt its examples by heart",
            "eval/<set>/num_samples": "prompts times samples each",
        },
    ),
    MetricSection(
        title="Failures",
        prefixes=("trajectories/", "trajectory/retries"),
        ranges={
            "trajectories/failed/<cause>": "absent",
            "trajectories/failed_share": "absent or below 0.01; above `sampling.max_failed_share` the run stops",
            "trajectory/retries": "absent or few",
            "trajectories/dropped/<filter>": "below half of the samples, else most of the generation is lost",
        },
    ),
    MetricSection(
        title="Agents",
        prefixes=("agent/", "multi_turn/", "trajectory/forks", "trajectory/conversations"),
        ranges={
            "agent/turns_<mean/max>": "mean below `agent.max_turns`; equal to it: the policy does not end",
            "agent/tool_rejected_share": "falls towards 0",
            "agent/tool_failed_share": "below 0.01; above: the tool, not the policy",
            "agent/continued": "any",
            "agent/restarted": "far below the trajectories of a rollout; above: their tokens are generated twice",
            "trajectory/forks": "0; above: `rlscale-check-template`",
            "trajectory/conversations": "1 without sub-agents",
        },
    ),
    MetricSection(
        title="Time",
        prefixes=("time/", "throughput/", "driver/", "trajectory/"),
        ranges={
            "time/sync_s": "below a tenth of `time/step_s`; above: another `train.weight_channel`",
            "time/save_s": "below the time between two saves by far",
            "time/trainer_wait_s": "near 0; above: engines are the limit, give them more GPUs",
            "time/rollout_wait_s": "near 0; above: the trainer is the limit",
            "time/rollout_s": "with `time/train_s` most of the step; its share shows what more GPUs would help",
            "throughput/tokens_per_s": "steady for equal lengths; `rlscale-plan` prints a bound",
            "throughput/mfu": "not measured on GPUs yet. On a busy CPU above 1, because the measured rate of "
            "the device is low then",
            "driver/loop_lag_s_<mean/max>": "mean below 0.1; above: blocking code in a function of yours",
            "trajectory/<queue/generate/tool/grade>_s_<mean/max>": "maximum below a few times the mean, else "
            "stragglers make the rollout wait",
        },
    ),
)

_INTRODUCTION = """# Metrics

Every metric of `metrics.jsonl`, of trackers and of the report, with the range in which a healthy run is. `<...>` stands
for several names. [Read a run folder](../how-to/run-folder.md#metricsjsonl) explains the file.

Ranges are for training against a group baseline (GRPO and similar). The difference of logprobs in float32 is that of
runs on a CPU; the others are rules of thumb, which no run of this project has measured with a large model on GPUs. They
say where to start reading, not when to stop a run: a value that leaves its range slowly while the held-out reward rises
is fine.
"""


def make_metrics_page() -> str:
    """The page: one table for each section, in which every metric has a row."""
    tables = (f"## {section.title}\n\n{_table(section)}" for section in SECTIONS)
    return "\n".join((_INTRODUCTION, *tables))


def section_of(name: str) -> MetricSection:
    """The section of a metric: that with the longest matching prefix."""
    found = [(len(prefix), section) for section in SECTIONS for prefix in section.prefixes if name.startswith(prefix)]
    assert found, f"{name} must have a section in scripts/docs/metrics.py, got none; add its prefix to one"
    return max(found, key=lambda pair: pair[0])[1]


def _table(section: MetricSection) -> str:
    rows = (
        # A name in angle brackets would be a tag.
        ("`" + name + "`", meaning.replace("<", "&lt;"), section.ranges.get(name, section.default))
        for name, meaning in METRICS.items()
        if section_of(name) is section
    )
    # A bar would end the cell.
    lines = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n".join(("| name | meaning | healthy |", "|---|---|---|", *lines, ""))
