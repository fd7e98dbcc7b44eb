"""Group `cluster`: nodes, GPUs and their assignment."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


class Device(StrEnum):
    """Devices of trainer and engines."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class DistributedBackend(StrEnum):
    """Backends of torch.distributed."""

    nccl = "nccl"
    gloo = "gloo"


class OffloadMode(StrEnum):
    """Offload methods of the trainer."""

    tms = "tms"
    move = "move"


LOCAL_RAY = "local"
"""Value of `cluster.ray_address` for the Ray that the run starts, whatever the environment names. Ray has it, too."""


@dataclass(kw_only=True)
class ClusterConfig(ConfigGroup):
    """Nodes and GPUs. On a CPU, a GPU is one unit of a Ray resource of the run, so the same numbers apply."""

    # Trainer and engines.
    actor_num_nodes: Annotated[int, Field(gt=0)] = 1
    """Number of nodes of the trainer."""

    actor_num_gpus_per_node: Annotated[int, Field(gt=0)] = 8
    """Number of trainer GPUs per node; one rank per GPU."""

    rollout_num_gpus: Annotated[int | None, Field(ge=0)] = None
    """Total number of GPUs of all engines. None: the number of trainer GPUs with `cluster.colocate`; required
    otherwise.
    """

    rollout_max_num_gpus: Annotated[int | None, Field(gt=0)] = None
    """Maximum total number of GPUs of all engines. While the Ray cluster has free GPUs, e.g. of nodes that join,
    further engines are started there and get requests once they hold the current weights; they leave when their node
    drains or dies. None: `cluster.rollout_num_gpus`, so that the number of engines is fixed.
    """

    rollout_num_gpus_per_engine: Annotated[int, Field(gt=0)] = 1
    """Number of GPUs per engine: a divisor of `cluster.num_gpus_per_node`, or a multiple of it. An engine has a server
    process on each of its nodes. Prefill and decode groups in the file of `sglang.config` may have different sizes,
    `num_gpus_per_engine`; this key is then the size of a group that has none.
    """

    num_gpus_per_node: Annotated[int, Field(gt=0)] = 8
    """Number of GPUs that a node has. With `cluster.colocate` on fewer GPUs of each node, the default follows
    `cluster.actor_num_gpus_per_node`: shared GPUs are assigned node by node.
    """

    colocate: bool = False
    """Trainer and engines share the same GPUs and are offloaded alternately. false: each has its own GPUs."""

    # Processes and devices.
    distributed_backend: DistributedBackend = DistributedBackend.nccl
    """torch.distributed backend of the trainer and of the weight sync. `nccl` falls back to `gloo` without CUDA."""

    distributed_timeout_minutes: Annotated[int, Field(gt=0)] = 10
    """Timeout of a collective, in minutes."""

    device: Device = Device.auto
    """Device of trainer and engines. `auto`: `cuda` if an NVIDIA driver is found or `cluster.ray_address` is set, else
    `cpu`.
    """

    spin_threads: bool = False
    """On a CPU: let the threads of an operator spin for up to 0.2 ms before they sleep. Makes steps of small models
    faster on an idle machine, and several times slower on a busy one. No effect with CUDA, or with
    `rollout.max_staleness` above 0: trainer and engines then share the cores.
    """

    ray_address: Annotated[str | None, Field(min_length=1)] = None
    """Address of the Ray cluster to connect to, e.g. `10.0.0.1:6379`; `auto`: the one that `ray start` started on this
    machine. None: the environment variable `RAY_ADDRESS`, else the run starts Ray on this machine. `local`: the run
    starts Ray even if `RAY_ADDRESS` is set.
    """

    # Critic.
    critic_num_nodes: Annotated[int | None, Field(gt=0)] = None
    """Number of nodes of a critic on separate GPUs. None: `cluster.actor_num_nodes`. If
    `cluster.critic_num_gpus_per_node` is None too, the critic shares the GPUs of the policy.
    """

    critic_num_gpus_per_node: Annotated[int | None, Field(gt=0)] = None
    """Number of separate critic GPUs per node. None: `cluster.actor_num_gpus_per_node`. If `cluster.critic_num_nodes`
    is None too, the critic shares the GPUs of the policy.
    """

    # Offload.
    offload: bool = False
    """Sets both `cluster.offload_train` and `cluster.offload_rollout`."""

    offload_train: bool | None = None
    """Offload the trainer from the GPU during generation, and keep only one of policy, critic, reference and teacher on
    the GPU at a time. None: true with `cluster.colocate` or with a critic on the GPUs of the policy, else false.
    """

    offload_rollout: bool | None = None
    """Release the weights and KV cache of the engines during training. None: same as `cluster.colocate`."""

    offload_train_mode: OffloadMode = OffloadMode.tms
    """Offload method of the trainer. `tms`: torch_memory_saver pauses the memory of all models at once. `move`: tensors
    are copied to host memory and back, and models are also offloaded individually during training. `tms` falls back to
    `move` without CUDA.
    """
