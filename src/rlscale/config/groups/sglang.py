"""Group `sglang`: SGLang servers started by the run."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class SglangConfig(ConfigGroup):
    """SGLang servers started by the run. Any SGLang server argument is also a key, e.g. `sglang.page_size`.

    Arguments that rlscale sets, or that cannot work in a run, are refused with the reason.
    """

    passthrough_field = "server_args"

    python: Annotated[str | None, Field(min_length=1)] = None
    """Python interpreter with SGLang installed, on every machine with an engine. None: the running interpreter if it
    has SGLang, else the one installed by `bin/install-sglang-cpu` in this checkout.
    """

    config: Annotated[str | None, Field(min_length=1)] = None
    """YAML file with several models, in slime's form: name, model, GPUs and server arguments of each. The model whose
    weights are updated is the policy: it sets `cluster.rollout_num_gpus`, `cluster.rollout_num_gpus_per_engine` and
    `sglang.<argument>`. `reward.engine.name` names another one. Each further one has its own engines, which keep their
    weights, and user code asks it by its name: `judge.model(name)`, `session.model(name)`. None: these keys alone.
    """

    frozen_models: dict[str, Any] = field(default_factory=dict)
    """The further models of `sglang.config` by name, each with keys of `reward.engine`. Set by the file."""

    server_groups: dict[str, Any] = field(default_factory=dict)
    """Prefill and decode servers of the policy, if the file of `sglang.config` separates them: `prefill` and `decode`,
    each with `num_gpus`, `server_args`, the arguments that only its servers have, and `num_gpus_per_engine` if their
    engines have different sizes. Set by the file. Empty: every engine does both.
    """

    server_concurrency: Annotated[int, Field(gt=0)] = 512
    """Maximum number of samples in flight per engine; further requests wait in order in the client. A request counts as
    the number of samples it requests.
    """

    mem_fraction_static: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Fraction of device memory for weights and KV cache. None: chosen by SGLang; 0.3 on a CPU."""

    cuda_graph_bs: list[int] | None = None
    """Batch sizes for which CUDA graphs of the decode step are captured. None: chosen by SGLang."""

    server_args: dict[str, Any] = field(default_factory=dict)
    """Further SGLang server arguments by name. Set them as `sglang.<name>`."""
