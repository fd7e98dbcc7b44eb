"""Writes the guides for users of slime, verl and TRL from the tables of rlscale-migrate.

`python -m scripts.docs.migration_pages docs/how-to`
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from rlscale.config.keys import find_key, keys
from rlscale.config.library_limits import LIMITS
from rlscale.config.problems import show
from rlscale.config.serialize import flatten
from rlscale.migration.argument_tables import TableRow, read_defaults, read_table
from rlscale.migration.foreign_arguments import Project
from rlscale.migration.migrate import migrate

EXAMPLE = """\
--hf-checkpoint /models/Qwen3-4B
--prompt-data /data/dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
--rm-type math --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192
--rollout-temperature 1 --global-batch-size 256 --balance-data --use-dynamic-batch-size --max-tokens-per-gpu 9216
--eval-interval 20 --eval-prompt-data aime /data/aime-2024.jsonl --n-samples-per-eval-prompt 16
--eval-max-response-len 16384 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
--eps-clip 0.2 --eps-clip-high 0.28 --lr 1e-6 --weight-decay 0.1 --adam-beta2 0.98 --disable-grpo-std-normalization
--train-backend fsdp --gradient-checkpointing --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate
--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --save-interval 20 --use-wandb
"""
"""Flags of slime for an example run on one node."""

NAMES = {Project.slime: "slime", Project.verl: "verl", Project.trl: "TRL"}

INTRODUCTIONS = {
    Project.slime: """\
`rlscale-migrate` translates a launch script, with the scripts that it sources, or a Python launcher
([how to](migrate.md)). This page has the tables that it uses. Keys are in groups, and all backends share one set of
keys. This command of slime

```console
$ python train.py \\
{flags}
```

is this command of rlscale, where `experiment=null` starts from defaults only:

```bash
rlscale-train experiment=null {overrides}
```

## Syntax of values

| slime | rlscale |
|---|---|
| `--name value` | `group.name=value`; the tables below list the groups |
| `--flag` | `group.flag=true` |
| `--disable-flag`, `--no-flag` | `group.flag=false`: there are no negative keys |
| `--name a b c` | `group.name=[a,b,c]` |
| `--name '{{"a": 1}}'` | `group.name={{a: 1}}`, quoted for the shell |
| `--sglang-<argument> value` | `sglang.<argument>=value`, dashes as underscores: any SGLang server argument |
| a Megatron argument | `megatron.<field>=value`: any field of TransformerConfig and OptimizerConfig |
| a Megatron argument that other backends share | a separate key: `optim.*`, `model.*`, `checkpoint.*` |
| model arguments, e.g. from `scripts/models/*.sh` | an option of `model`, e.g. `model=qwen3_4b` |
| `train_async.py` instead of `train.py` | `rollout.max_staleness=1` or more ([how to](staleness.md)) |
| a shell script with its variables | an experiment file with interpolations, `${{oc.env:NUM_GPUS,8}}` |
| `ray job submit ... -- python3 train.py` | the same command with `rlscale-train` ([how to](ray-cluster.md)) |

A slime flag on the command line is an error that suggests the key: `--rollout-batch-size 32` prints "did you mean
batch.rollout_batch_size=32?".
""",
    Project.verl: """\
`rlscale-migrate` translates a launch script, a command line, or the resolved configuration of a run
([how to](migrate.md)). This page has the tables that it uses.

Some keys count differently:

- `ppo_mini_batch_size` counts prompts; `batch.global_batch_size` counts samples, `rollout.n` times as many.
- A training step of verl is one rollout, so `total_training_steps` is `data.num_rollout`.
- The loss is a mean over tokens by default, the clip has a dual clip of 3 (`clip_ratio_c`), and Adam's second beta is
  0.999. rlscale has other defaults, so `rlscale-migrate` writes these values.
- Evaluations are greedy unless `val_kwargs.do_sample` is true.
- A file of prompts has the answer in `reward_model.ground_truth`; the reward is chosen by `data_source`, as with
  `data.reward_by_source`.
""",
    Project.trl: """\
`rlscale-migrate` translates a `GRPOConfig` from a Python script, a YAML or JSON file, or a command line
([how to](migrate.md)). This page has the tables that it uses.

Some arguments count differently:

- `per_device_train_batch_size` counts samples of one process. A step has that many, times
  `gradient_accumulation_steps`, times the processes, which accelerate knows and a `GRPOConfig` does not:
  `rlscale-migrate --set NUM_PROCESSES=8`.
- A rollout has `generation_batch_size` samples, `batch.rollout_batch_size` counts its prompts.
- `max_steps`, `save_steps` and `eval_steps` count optimiser steps, their keys rollouts.
- A reward function of TRL gets a whole batch, one of rlscale a single sample ([how to](rewards.md)).
""",
}

HEADINGS = {
    "drop": "Not needed",
    "config": "Read from the model's `config.json`",
    "lost": "Without a counterpart",
    "secret": "Secrets",
}


def make_page(project: Project) -> str:
    """The text of the guide of one project."""
    name = NAMES[project]
    introduction = INTRODUCTIONS[project]
    if project is Project.slime:
        flags = "\n".join(f"    {line} \\" for line in EXAMPLE.splitlines()).removesuffix(" \\")
        overrides = _wrap([shlex.quote(override) for override in example_overrides()])
        introduction = introduction.format(flags=flags, overrides=overrides)
    parts = [
        "<!-- Generated by `python -m scripts.docs.migration_pages docs/how-to` from src/rlscale/migration/tables. -->",
        f"# From {name} to rlscale",
        introduction.rstrip(),
        "## Every argument",
        '"Refused" means that the key exists and that its library cannot do this in a run.',
    ]
    rows = list(read_table(project).values())
    groups = list(dict.fromkeys(key.group for key in keys().values()))
    of_libraries = [row.key.partition(".")[0] for row in rows if row.key]
    for group in dict.fromkeys([*groups, *of_libraries]):
        own = [_row(row) for row in rows if row.key.partition(".")[0] == group and "." in row.key and group]
        if own:
            title = f"### [`{group}`](../reference/{group}.md)"
            parts.append("\n".join([title, "", f"| {name} | rlscale | default | |", "|---|---|---|---|", *own]))
    if alone := [_row(row) for row in rows if row.key and "." not in row.key]:
        table = [f"| {name} | rlscale | default | |", "|---|---|---|---|", *alone]
        parts.append("\n".join(["### Outside of groups", "", *table]))
    parts += _others(rows, name)
    parts += _defaults(project, name)
    return "\n\n".join(parts) + "\n"


def example_overrides() -> list[str]:
    """The example as overrides: what rlscale-migrate writes for it, without options."""
    found = migrate(shlex.split(EXAMPLE))
    nested = yaml.safe_load(found.yaml)
    asked = {place.key for place in found.places.values()}
    options = [pair for each in nested.pop("defaults", []) for pair in each.items()]
    selected = [f"{group.removeprefix('override /')}={option}" for group, option in options]
    values = [(path, value) for path, value in flatten(nested) if path in asked]
    return [*selected, *(f"{path}={_text(value)}" for path, value in values)]


def _text(value: object) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def _row(row: TableRow) -> str:
    key = find_key(row.key)
    inverse = row.conversion in ("false", "not", "advantages")
    value = "=false" if inverse else "=true" if key is not None and key.type is bool else ""
    default = ""
    if key is not None:
        default = "required" if key.required else f"`{show(json.loads(json.dumps(key.default, default=str)))}`"
    notes = [row.note] if row.note else []
    if (limit := LIMITS.get(row.key)) is not None:
        notes.append(f"refused: {limit.reason}")
    return f"| `{row.argument}` | `{row.key}{value}` | {default} | {'; '.join(notes)} |"


def _others(rows: Sequence[TableRow], name: str) -> Iterator[str]:
    """Tables of the arguments without a key."""
    without = [row for row in rows if not row.key]
    for conversion, heading in HEADINGS.items():
        own = [f"| `{row.argument}` | {row.note} |" for row in without if row.conversion == conversion]
        if own:
            yield "\n".join([f"### {heading}", "", f"| {name} | |", "|---|---|", *own])
    other = [row for row in without if row.conversion not in HEADINGS]
    if other:
        lines = [f"| `{row.argument}` | {row.note} |" for row in other]
        yield "\n".join(["### Depends on the value", "", f"| {name} | |", "|---|---|", *lines])


def _defaults(project: Project, name: str) -> Iterator[str]:
    """Defaults that differ, which `rlscale-migrate` writes."""
    lines = [
        f"| `{default.key}={default.value}` | {default.backend or 'each'} | {default.reason} |"
        for default in read_defaults(project)
    ]
    if lines:
        yield "\n".join(
            ["## Defaults that differ", "", f"| value of {name} | `train.backend` | |", "|---|---|---|", *lines]
        )


def _wrap(overrides: Sequence[str], *, width: int = 110) -> str:
    lines = ["\\\n   "]
    for override in overrides:
        if len(lines[-1]) + len(override) > width:
            lines.append("   ")
        lines[-1] += f" {override}"
    return " \\\n".join(lines)


def write_pages(folder: Path) -> None:
    """Writes the guides into a folder."""
    for project in Project:
        (folder / f"from-{project}.md").write_text(make_page(project), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the guides into the folder that is the only argument."""
    parser = argparse.ArgumentParser(prog="python -m scripts.docs.migration_pages", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="e.g. docs/how-to")
    write_pages(parser.parse_args(argv).folder)


if __name__ == "__main__":
    main()
