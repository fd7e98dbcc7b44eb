"""Engines of the warm-up of a run with SGLang; the check of its interpreter starts a process."""

from pathlib import Path

from rlscale.config import load_config
from rlscale.driver.warmup import warmup_config
from tests.unit.config.interpreters import fake_interpreter


def test_servers_are_those_of_the_run(tmp_path: Path) -> None:
    python = f"sglang.python={fake_interpreter(tmp_path)}"
    overrides = ["rollout=sglang", python, "sglang.page_size=16", "router.policy=random"]
    nested = "sglang.cuda_graph_config={decode:{max_bs:8}}"
    config = load_config(["+experiment=quickstart", *overrides, nested, "cluster.rollout_num_gpus=2"])
    warmup = warmup_config(config)
    assert warmup is not None
    assert warmup.sglang == config.sglang and warmup.router.policy == "random"
    # Settings of unused servers do not change the warm-up.
    plain, more = (warmup_config(load_config(["+experiment=quickstart", *w])) for w in ([], ["sglang.page_size=16"]))
    assert plain is not None and more is not None and plain.run.dir == more.run.dir
