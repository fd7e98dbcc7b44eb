"""The manifest for KubeRay: a ConfigMap with the command, and a RayJob that runs it on a Ray cluster of its pods."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from typing import Any

from rlscale.launch.documents import dump_yaml
from rlscale.launch.job import JobSpec, shell_words
from rlscale.launch.options import KubeRayOptions

SUFFIX = ".rayjob.yaml"

HEAD_CPUS, HEAD_GIB = 8, 32
"""Size of the head's pod: driver, rewards and Ray, no GPU."""

SCRIPT_FOLDER, SCRIPT = "/etc/rlscale-job", "run.sh"


def write_kuberay(job: JobSpec, options: KubeRayOptions, *, ray_version: str) -> str:
    """The text of the manifest: two documents.

    Args:
        ray_version: of the image.
    """
    documents = (_config_map(job, options), _ray_job(job, options, ray_version))
    return job.comment + "".join(f"---\n{dump_yaml(each)}" for each in documents)


def _metadata(job: JobSpec, options: KubeRayOptions, *, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": job.name}
    if options.namespace is not None:
        found["namespace"] = options.namespace
    return {**found, "labels": dict(labels)} if labels else found


def _config_map(job: JobSpec, options: KubeRayOptions) -> dict[str, Any]:
    # `ray job submit` and the submitter's shell would each change an argument with quotes or spaces; a file arrives as
    # it is.
    advice = "the pods need this environment variable; add it to a Secret and name that with --secret"
    checks = "".join(f': "${{{name}:?{advice}}}"\n' for name in job.env)
    script = f"set -u\ncd {shlex.quote(options.mount)}\n{checks}exec {shell_words(job.train_command)}\n"
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job, options), "data": {SCRIPT: script}}


def _ray_job(job: JobSpec, options: KubeRayOptions, ray_version: str) -> dict[str, Any]:
    auth = {"mode": "token"}
    if options.token_secret is not None:
        auth["secretName"] = options.token_secret
    labels = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue is not None else None
    spec: dict[str, Any] = {
        "entrypoint": f"bash {posixpath.join(SCRIPT_FOLDER, SCRIPT)}",
        # A retry gets a new cluster; the run resumes from its folder on the volume.
        "backoffLimit": options.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 3600,
        "submissionMode": "K8sJobMode",
        "rayClusterSpec": {
            "rayVersion": ray_version,
            # KubeRay passes the token of the Secret to all pods and to the submitter.
            "authOptions": auth,
            "headGroupSpec": {
                # No actor runs on the head: it has no GPU.
                "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
                "template": {"spec": _pod(options, "ray-head", cpus=HEAD_CPUS, gib=HEAD_GIB, script=job.name)},
            },
            "workerGroupSpecs": [_workers(job, options)],
        },
    }
    metadata = _metadata(job, options, labels=labels)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _workers(job: JobSpec, options: KubeRayOptions) -> dict[str, Any]:
    needs = job.needs
    pod = _pod(options, "ray-worker", cpus=needs.cpus, gib=needs.memory_gib, gpus=needs.gpus)
    if options.node_selector:
        pod["nodeSelector"] = dict(entry.split("=", 1) for entry in options.node_selector)
    if needs.gpus:
        pod["tolerations"] = [{"key": options.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]
    return {
        "groupName": "workers",
        "replicas": needs.num_nodes,
        "minReplicas": needs.num_nodes,
        "maxReplicas": needs.num_nodes,
        "rayStartParams": {"num-cpus": str(needs.ray_cpus), "num-gpus": str(needs.gpus)},
        "template": {"spec": pod},
    }


def _pod(
    options: KubeRayOptions, name: str, *, cpus: int, gib: int, gpus: int = 0, script: str | None = None
) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": str(cpus), "memory": f"{gib}Gi"}
    if gpus:
        resources[options.gpu_resource] = str(gpus)
    # Ray's object store and NCCL use shared memory; the default of a container, 64 MB, is too small for both.
    volumes: list[dict[str, Any]] = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(1, gib // 2)}Gi"}},
    ]
    mounts = [{"name": "shared", "mountPath": options.mount}, {"name": "memory", "mountPath": "/dev/shm"}]
    if script is not None:
        volumes.append({"name": "job", "configMap": {"name": script}})
        mounts.append({"name": "job", "mountPath": SCRIPT_FOLDER})
    container: dict[str, Any] = {
        "name": name,
        "image": options.image,
        "env": [{"name": "PYTHONPATH", "value": options.mount}],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": mounts,
    }
    if options.secret:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in options.secret]
    pod: dict[str, Any] = {"containers": [container], "volumes": volumes}
    if options.service_account is not None:
        pod["serviceAccountName"] = options.service_account
    return pod
