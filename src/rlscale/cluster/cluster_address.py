"""The Ray cluster that a run connects to, from its config or the environment. Does not import Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rlscale.config.groups.cluster import LOCAL_RAY

AUTO = "auto"
KEY, VARIABLE = "cluster.ray_address", "RAY_ADDRESS"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterAddress:
    """Address of a running cluster, and the key or environment variable that names it."""

    address: str
    source: str = KEY


def cluster_address(given: str | None) -> ClusterAddress | None:
    """The cluster that a run connects to; None: it starts Ray itself.

    Args:
        given: `cluster.ray_address`, which takes precedence over the environment variable. `auto` stands for the
            variable if it is set, as in Ray.
    """
    variable = os.environ.get(VARIABLE) or None
    if variable is not None and given in (None, AUTO):
        found = ClusterAddress(address=variable, source=VARIABLE)
    elif given is not None:
        found = ClusterAddress(address=given)
    else:
        return None
    return None if found.address == LOCAL_RAY else found
