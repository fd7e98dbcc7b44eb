"""Launch of every engine process of an uncut run, as a file."""

import json
from pathlib import Path

from rlscale.config import Device, RunConfig
from rlscale.driver.engines import build_launch
from rlscale.engines.launch_plan import plan_engines, rehearsed_report
from rlscale.plan.placement import build_layout
from rlscale.rehearsal.rehearsal_launch import describe_process


def write_launch_plan(config: RunConfig, file: Path) -> None:
    """Writes every engine process of a run on equal, empty nodes whose addresses are invented.

    Args:
        config: resolved, of the whole run.
    """
    layout = build_layout(config)
    launch = build_launch(config, model_path=str(config.model.hf_checkpoint or config.model.build), num_threads=1)
    report = rehearsed_report(layout, on_gpus=config.cluster.device == Device.cuda)
    engines = plan_engines(launch, layout, report)
    records = [[describe_process(each.launch, each.place) for each in processes] for processes in engines]
    file.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
