"""One Ray for all jobs of a sweep, which run in processes of this machine (`hydra/launcher=ray`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import ray

from rlscale.cluster.cluster_address import VARIABLE, cluster_address
from rlscale.cluster.process_reaper import MARK
from rlscale.cluster.ray_session import bundle_resource, environment, ray_session
from rlscale.cluster.shared_engines import engine_host
from rlscale.config import Device, RunConfig
from rlscale.config.rules import shares_base
from rlscale.plan.placement import Layout, build_layout, engine_layout


@contextmanager
def share_ray(configs: Sequence[RunConfig], num_jobs: int) -> Iterator[int]:
    """Joins the Ray cluster that the jobs name, or starts Ray on this machine.

    Jobs that name no cluster find it by `RAY_ADDRESS`, which is set inside.

    Args:
        configs: of the jobs, at least one.
        num_jobs: jobs at a time; 0 if that is open.

    Gives the number of jobs that fit at a time, by the largest one.

    Raises:
        ConfigError: Ray cannot be reached, or has fewer GPUs than the largest job needs.
    """
    needs = count_needs(configs)
    cluster = configs[0].cluster
    starts_on_cpu = cluster_address(cluster.ray_address) is None and cluster.device == Device.cpu
    if starts_on_cpu:
        # Slots replace GPUs, so there are as many as the jobs need; cores limit their number.
        cores = os.cpu_count() or 1
        at_once = num_jobs or max(1, min(len(configs), cores // needs.per_job))
        largest = _slots(needs.shared + at_once * needs.per_job)
    else:
        # The largest job must fit with the engines that it shares.
        largest = max((build_layout(config) for config in configs), key=lambda layout: layout.num_gpus)
    with ray_session(cluster, largest) as session:
        session.wait()
        address: str = ray.get_runtime_context().gcs_address
        with environment({VARIABLE: address}), _unmarked():
            if not starts_on_cpu:
                resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
                at_once = (int(resources.get(bundle_resource(cluster), 0)) - needs.shared) // needs.per_job
            at_once = max(1, at_once)
            with engine_host(needs.num_adapters * (num_jobs or at_once)) if needs.num_adapters else nullcontext():
                yield at_once


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """GPUs, or slots on a CPU, and adapters of the jobs of a sweep."""

    per_job: int  # of the largest job, without engines that it shares
    shared: int  # of all engines that jobs share
    num_adapters: int  # versions that a job keeps in a shared engine, at most; 0: no job shares engines


def count_needs(configs: Sequence[RunConfig]) -> Needs:
    """The needs of jobs, of which those with `train.lora.shared_base` share engines."""
    layouts = [build_layout(config) for config in configs]
    sharing = [(config, layout) for config, layout in zip(configs, layouts, strict=True) if shares_base(config)]
    own = [
        (replace(layout, num_engines=0) if shares_base(config) else layout).num_gpus
        for config, layout in zip(configs, layouts, strict=True)
    ]
    # By all settings of model and engines. Which bases are equal is known only when the jobs have loaded their models.
    bases = {
        repr((config.model, config.rollout, config.train.dtype, config.checkpoint.load)): engine_layout(layout)
        for config, layout in sharing
    }
    return Needs(
        per_job=max(own),
        shared=sum(layout.num_gpus for layout in bases.values()),
        num_adapters=max((config.rollout.max_staleness + 1 for config, _ in sharing), default=0),
    )


@contextmanager
def _unmarked() -> Iterator[None]:
    """Keeps the reaper of this session away from the processes that joblib starts inside.

    Its resource tracker outlives the session, and each job has a reaper for what it starts.
    """
    mark = os.environ.pop(MARK, None)
    try:
        yield
    finally:
        if mark is not None:
            os.environ[MARK] = mark


def _slots(number: int) -> Layout:
    """A layout with as many slots."""
    return Layout(num_trainers=number, num_engines=0, gpus_per_engine=1, colocate=False, gpus_per_node=number)
