"""Options of `rlscale-launch`, one dataclass per launcher. The docstring below a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

# `title` is the rule and `examples` the fix of the error for a wrong value (launch/parse_options.py).
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", title="have letters, digits, '.', '_' and '-' only", examples=["x"]),
]
KubernetesName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?$",
        title="have at most 47 lower-case letters, digits and '-'",
        examples=["rlscale"],
    ),
]
# The limit above is KubeRay's for the name of a job; that of other objects is Kubernetes'.
ObjectName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$",
        title="have at most 253 lower-case letters, digits, '-' and '.'",
        examples=["rlscale"],
    ),
]
Namespace = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
        title="have at most 63 lower-case letters, digits and '-'",
        examples=["rlscale"],
    ),
]
# Kubernetes' limits for labels.
_PREFIX, _LABEL = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?", r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
Variable = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        title="be the name of an environment variable, never its value",
        examples=["WANDB_API_KEY"],
    ),
]
Folder = Annotated[
    str,
    Field(
        pattern=r"^/[^\n\r\"\\%]*$",
        title="be an absolute path without '\"', '\\' and '%'",
        examples=["/shared/rlscale"],
    ),
]
Line = Annotated[
    str, Field(pattern=r"^[^\n\r]+$", title="be one line of shell commands", examples=["'module load cuda'"])
]
Image = Annotated[
    # Without "=", so that an override after a flag without a value is no image.
    str,
    Field(pattern=r"^[^\s=]+$", title="name an image", examples=["registry.example.com/rlscale:cuda"]),
]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of every launcher."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: KubernetesName | None = None
    """name of the job; default: made of run.name"""

    env: list[Variable] = field(default_factory=list)
    """name of an environment variable that the job needs, e.g. WANDB_API_KEY; its value is never written to the file;
    may be repeated
    """

    cpus: Count | None = None
    """CPUs of a node; default: of the plan"""

    memory: Count | None = None
    """memory of a node in GiB; default: of the plan"""

    hardware: Name | None = None
    """GPU that the memory is planned for, as in rlscale-plan; default: h100"""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(JobOptions):
    """Options of `rlscale-launch slurm`."""

    time: (
        Annotated[
            str,
            Field(
                pattern=r"^(\d+-)?\d+(:[0-5]\d){0,2}$",
                title="be a time limit of Slurm, [days-]hours:minutes:seconds",
                examples=["24:00:00"],
            ),
        ]
        | None
    ) = None
    """time limit, e.g. 24:00:00; default: that of the partition"""

    partition: Name | None = None
    """partition; default: that of the cluster"""

    account: Name | None = None
    """account to charge"""

    qos: Name | None = None
    """quality of service"""

    constraint: Annotated[str, Field(pattern=r"^[^\s\"'\\]+$", title="be a constraint of Slurm", examples=["h100"])] | (
        None
    ) = None
    """features that the nodes must have"""

    workdir: Folder | None = None
    """folder in which the job runs, which all nodes share; run folders and the log are below it; default: this one"""

    setup: list[Line] = field(default_factory=list)
    """line of shell commands to run first, e.g. 'module load cuda'; all nodes get the environment that it sets; may be
    repeated; default: activate the environment that this command runs in
    """

    image: Image | None = None
    """image to run in with Apptainer, e.g. /shared/rlscale.sif; default: none"""

    interface: Name | None = None
    """network interface that connects the nodes, e.g. ib0; default: that of the address of the node's name"""

    join_timeout: Count = 600
    """seconds to wait until all nodes have joined Ray; then the job fails and names those that are missing"""

    save_before: Count = 600
    """seconds before the time limit at which the run saves a checkpoint and requeues itself; must exceed one step"""


@dataclass(frozen=True, kw_only=True)
class KubeRayOptions(JobOptions):
    """Options of `rlscale-launch kuberay`."""

    image: Image
    """image of all pods; see docker/Dockerfile"""

    claim: ObjectName
    """PersistentVolumeClaim with access mode ReadWriteMany, for models, data and run folders"""

    mount: Folder = "/rlscale"
    """folder at which the claim is mounted, and in which the run starts"""

    namespace: Namespace | None = None
    """namespace; default: that of the context of kubectl"""

    secret: list[ObjectName] = field(default_factory=list)
    """Secret whose entries become environment variables; may be repeated"""

    token_secret: ObjectName | None = None
    """Secret with Ray's token in its entry auth_token; default: KubeRay creates one for the cluster of the job"""

    gpu_resource: Annotated[
        str, Field(pattern=r"^[a-z0-9./-]+$", title="be a resource", examples=["nvidia.com/gpu"])
    ] = "nvidia.com/gpu"
    """resource of the GPUs"""

    node_selector: list[
        Annotated[
            str,
            Field(
                pattern=rf"^{_PREFIX}{_LABEL}=({_LABEL})?$",
                title="be a label of Kubernetes, written as label=value",
                examples=["gpu=h100"],
            ),
        ]
    ] = field(default_factory=list)
    """label=value that the nodes of the GPUs must have; may be repeated"""

    queue: Namespace | None = None  # a value of a label
    """queue of Kueue"""

    service_account: ObjectName | None = None
    """service account of the pods"""

    retries: Annotated[int, Field(ge=0)] = 3
    """number of times that a failed run is started again on a new cluster, where it resumes"""


@dataclass(frozen=True, kw_only=True)
class SkyPilotOptions(JobOptions):
    """Options of `rlscale-launch skypilot`."""

    bucket: (
        Annotated[
            str,
            Field(
                pattern=r"^(s3|gs|r2|cos|oci|https)://\S+$", title="be the URL of a bucket", examples=["s3://my-runs"]
            ),
        ]
        | None
    ) = None
    """bucket for run folders, e.g. s3://my-runs, for jobs of one node; a job that is preempted resumes from it"""

    volume: KubernetesName | None = None
    """volume of SkyPilot for run folders, which all nodes share; this or --bucket is required"""

    mount: Folder = "/rlscale"
    """folder at which bucket or volume is mounted"""

    infra: Annotated[str, Field(pattern=r"^\S+$", title="be an infrastructure", examples=["aws/us-east-1"])] | None = (
        None
    )
    """cloud, region or Kubernetes context, e.g. aws/us-east-1; default: the cheapest that is enabled"""

    accelerator: Name | None = None
    """name of the GPU in SkyPilot; default: that of --hardware"""

    spot: bool = False
    """use spot instances"""

    image: Image | None = None
    """image, e.g. docker:registry.example.com/rlscale:cuda; default: install rlscale from the folder of --workdir"""

    workdir: Annotated[str, Field(pattern=r"^[^\n\r]+$", title="be a folder", examples=["."])] | None = None
    """folder that is copied to the nodes, e.g. with your reward; default: none with --image, else this one"""

    setup: list[Line] = field(default_factory=list)
    """line of shell commands to run on every node after its creation; may be repeated"""

    join_timeout: Count = 600
    """seconds to wait until all nodes have joined Ray; then the job fails and names those that are missing"""

    disk: Count | None = None
    """disk of a node in GB; default: that of SkyPilot"""
