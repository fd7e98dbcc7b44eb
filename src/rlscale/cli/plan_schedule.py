"""Part `--schedule` of `rlscale-plan`: simulates the choices of the rollout loop for given response lengths."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlscale.config import EngineKind, RunConfig
from rlscale.errors import ConfigError, Problem
from rlscale.plan.plan import Plan
from rlscale.plan.rollout_simulation import EngineCosts, SimulatedLoop, SimulatedTime
from rlscale.plan.schedule_comparison import compare_schedules, find_partial_settings

FLAG = "--schedule"
COSTS_FLAG = "--engine-costs"


def read_lengths(path: str) -> list[list[int]]:
    """Response lengths of each prompt, from lines of JSON: `{"length": 120}` or `{"lengths": [120, 340]}`.

    Raises:
        ConfigError: the file cannot be read, or a line has another form.
    """
    try:
        lines = Path(os.path.expanduser(path)).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise _error("name a readable file", path, f"{text}; give the path of a JSONL file of lengths") from error
    prompts = [_lengths_of(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise _error("name a file with lengths", f"{path}, which is empty", 'write lines such as {"length": 120}')
    return prompts


def _lengths_of(line: str, place: str) -> list[int]:
    try:
        value: Any = json.loads(line)
    except ValueError:
        value = None
    found: Any = None
    if isinstance(value, dict):
        found = value.get("lengths", [value["length"]] if "length" in value else None)
    is_valid = isinstance(found, list) and found and all(type(each) is int and each > 0 for each in found)
    if not is_valid:
        rule = "have lines with positive lengths in tokens"
        raise _error(rule, f"{line[:60]} in {place}", 'write {"length": 120}, or {"lengths": [120, 340]} for a prompt')
    return list(found)


def parse_costs(text: str) -> EngineCosts:
    """Costs of an engine from `name=value` pairs with commas between them; names without a value keep their default.

    Example:
        parse_costs("step_of_one=0.4,request=0.3")

    Raises:
        ConfigError: an unknown name, or a value that is out of range.
    """
    costs, names = EngineCosts(), [each.name for each in fields(EngineCosts)]
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        is_valid = name in names and 0 <= number < float("inf") and (name != "step_of_one" or 0 < number <= 1)
        if not is_valid:
            rule = f"have decoding steps of {', '.join(names)}, of which step_of_one is above 0 and at most 1"
            fix = "write step_of_one=0.8,request=0.2,prefill=1"
            raise _problem(COSTS_FLAG, rule, pair or "nothing", fix)
        costs = replace(costs, **{name: number})
    return costs


def simulate_plan(config: RunConfig, plan: Plan, prompts: list[list[int]], costs: EngineCosts) -> dict[str, Any]:
    """Settings of the loop of a resolved config, and the result of each choice by its name.

    Raises:
        ConfigError: the run starts no engines, so that their slots are not known.
    """
    engines = plan.layout.num_decode_engines
    if plan.engine is None or not engines:
        raise _error("be used with engines that the run starts", "none", "choose rollout=embedded or rollout=sglang")
    is_embedded = config.rollout.engine == EngineKind.embedded
    loop = SimulatedLoop(
        num_groups=config.batch.rollout_batch_size,
        num_samples=config.batch.n_samples_per_prompt,
        num_slots=engines * (config.rollout.num_slots if is_embedded else config.sglang.server_concurrency),
        wave=config.sampling.over_sampling_batch_size,
        max_versions=config.sampling.max_weight_versions,
        max_staleness=config.rollout.max_staleness,
        costs=costs,
    )
    found = compare_schedules(loop, prompts)
    best = find_partial_settings(loop, prompts)
    plain = found["plain"].steps_per_rollout

    def row(time: SimulatedTime) -> dict[str, float]:
        return asdict(time) | {"ratio": plain / time.steps_per_rollout}

    settings = {
        "over_sampling_batch_size": best.over_sampling_batch_size,
        "max_weight_versions": best.max_weight_versions,
    }
    return {
        "slots": loop.num_slots,
        "requests_per_slot": loop.requests_per_slot,
        "staleness": loop.max_staleness,
        "prompts": len(prompts),
        "engine_costs": asdict(costs),
        "choices": {name: row(time) for name, time in found.items()},
        "fastest_partial_rollout": settings | row(best.time),
    }


def print_schedules(
    config: RunConfig, plan: Plan, path: str, *, costs: EngineCosts, as_json: bool, width: int | None
) -> None:
    """Prints the comparison of all choices, as a table or as JSON."""
    prompts = read_lengths(path)
    found = simulate_plan(config, plan, prompts, costs)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    title = (
        f"{found['slots']} slots, {found['requests_per_slot']:.3g} requests per slot, "
        f"rollout.max_staleness={found['staleness']}, lengths of {found['prompts']} prompts"
    )
    table = Table("choice", "decoding steps per rollout", "busy slots", "speed relative to plain", title=title)
    best = found["fastest_partial_rollout"]
    for name, each in {**found["choices"], "partial_rollout, fastest": best}.items():
        table.add_row(name, f"{each['steps_per_rollout']:,.0f}", f"{each['busy_share']:.0%}", f"{each['ratio']:.2f} x")
    table.caption = (
        f"fastest: sampling=partial sampling.over_sampling_batch_size={best['over_sampling_batch_size']} "
        f"sampling.max_weight_versions={best['max_weight_versions']}"
    )
    Console(highlight=False, width=width).print(table)


def _error(rule: str, value: str, fix: str) -> ConfigError:
    return _problem(FLAG, rule, value, fix)


def _problem(flag: str, rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=flag, rule=rule, value=value, fix=fix)])
