"""Group `cluster`: nodes, GPUs and who gets which."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


class Device(StrEnum):
    """Where tensors live."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class DistributedBackend(StrEnum):
    """Backends of torch.distributed."""

    nccl = "nccl"
    gloo = "gloo"


class OffloadMode(StrEnum):
    """Ways to free a GPU of the trainer's tensors."""

    tms = "tms"
    move = "move"


@dataclass(kw_only=True)
class ClusterConfig(ConfigGroup):
    """Resources. On a CPU a GPU is one unit of a Ray resource made for the run, so the same figures work."""

    actor_num_nodes: Annotated[int, Field(gt=0, description="Nodes of the trainer.")] = 1
    actor_num_gpus_per_node: Annotated[
        int, Field(gt=0, description="GPUs of the trainer on each of its nodes; one rank per GPU.")
    ] = 8
    rollout_num_gpus: Annotated[
        int | None,
        Field(
            ge=0,
            description="GPUs of all engines together. None: as many as the trainer with `cluster.colocate`; must be "
            "set without it.",
        ),
    ] = None
    rollout_num_gpus_per_engine: Annotated[int, Field(gt=0, description="GPUs of one engine.")] = 1
    num_gpus_per_node: Annotated[int, Field(gt=0, description="GPUs a node has.")] = 8
    colocate: Annotated[
        bool, Field(description="Trainer and engines take turns on the same GPUs; false gives each its own.")
    ] = False
    distributed_backend: Annotated[
        DistributedBackend,
        Field(description="Collectives of the trainer and of the weight sync. `nccl` becomes `gloo` without CUDA."),
    ] = DistributedBackend.nccl
    distributed_timeout_minutes: Annotated[
        int, Field(gt=0, description="Time a collective may take before the run fails, in minutes.")
    ] = 10
    device: Annotated[
        Device,
        Field(
            description="Device of trainer and engines. `auto`: `cuda` where an NVIDIA driver is found or "
            "`cluster.ray_address` is set, else `cpu`."
        ),
    ] = Device.auto
    spin_threads: Annotated[
        bool,
        Field(
            description="On a CPU, have the threads of an operator spin for a moment, up to 0.2 ms, before they sleep "
            "until the others are done. Small models take less time for a step on a machine that does nothing else, "
            "and several times as long beside other work."
        ),
    ] = False
    ray_address: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Ray cluster to attach to, e.g. `10.0.0.1:6379`. None: `RAY_ADDRESS`, else one is started.",
        ),
    ] = None
    critic_num_nodes: Annotated[
        int | None,
        Field(
            gt=0,
            description="Nodes of a critic with GPUs of its own. None: `cluster.actor_num_nodes`; where "
            "`cluster.critic_num_gpus_per_node` is not given either, it is on the policy's GPUs.",
        ),
    ] = None
    critic_num_gpus_per_node: Annotated[
        int | None,
        Field(
            gt=0,
            description="GPUs of its own that the critic has on each of its nodes. None: "
            "`cluster.actor_num_gpus_per_node`; where `cluster.critic_num_nodes` is not given either, it is on the "
            "policy's GPUs.",
        ),
    ] = None
    offload: Annotated[bool, Field(description="Sets both `cluster.offload_train` and `cluster.offload_rollout`.")] = (
        False
    )
    offload_train: Annotated[
        bool | None,
        Field(
            description="Free the GPU of the trainer's tensors while engines generate, and have policy, critic, "
            "reference and teacher take turns on it. None: true with `cluster.colocate` or a critic on the "
            "policy's GPUs, else false."
        ),
    ] = None
    offload_rollout: Annotated[
        bool | None,
        Field(
            description="Have engines give back the memory of weights and cache while the trainer works. None: as "
            "`cluster.colocate`."
        ),
    ] = None
    offload_train_mode: Annotated[
        OffloadMode,
        Field(
            description="How the trainer's tensors leave the GPU. `tms`: their memory is paused by "
            "torch_memory_saver, all at once. `move`: they are copied to the host and back, and the models take turns "
            "during training, too. `tms` becomes `move` without CUDA."
        ),
    ] = OffloadMode.tms
