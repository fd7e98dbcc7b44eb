"""Group `sglang`: SGLang servers that the run starts."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class SglangConfig(ConfigGroup):
    """SGLang servers started by the run. Any argument of SGLang's own server is a key too, e.g. `sglang.page_size`."""

    passthrough_field = "server_args"

    python: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Interpreter that has SGLang installed, on every machine that hosts an engine. None: the "
            "running one, or where that has no SGLang the one that `bin/install-sglang-cpu` made in this checkout.",
        ),
    ] = None
    server_concurrency: Annotated[
        int,
        Field(
            gt=0,
            description="Samples in flight at one engine; further requests wait here, in their order. A request counts "
            "as many as it asks samples for.",
        ),
    ] = 512
    mem_fraction_static: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="Share of the device's memory for weights and cache. None: SGLang's choice; 0.3 on a CPU, "
            "whose memory is shared.",
        ),
    ] = None
    cuda_graph_bs: Annotated[
        list[int] | None,
        Field(description="Batch sizes for which CUDA graphs of the decode step are captured. None: SGLang's choice."),
    ] = None
    server_args: Annotated[
        dict[str, Any],
        Field(description="Further arguments of SGLang's server by name; set as `sglang.<name>`."),
    ] = field(default_factory=dict)
