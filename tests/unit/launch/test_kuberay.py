"""The manifest of KubeRay: valid by the definitions of KubeRay and Kubernetes, readable, without secrets.

The definitions are those of the two projects (tests/data/third_party). An unknown field is an error, as for `kubectl`.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlscale.launch.kuberay import SCRIPT, write_kuberay
from rlscale.launch.node_needs import NodeNeeds
from rlscale.launch.options import KubeRayOptions
from tests.unit.launch.jobs import make_job

THIRD_PARTY = Path(__file__).parents[2] / "data" / "third_party"
KUBERNETES = json.loads((THIRD_PARTY / "kubernetes_v1.34_pod.json").read_text())

METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "maxLength": 47, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


OPTIONS = KubeRayOptions(image="registry/rlscale:cuda", claim="data")
EVERYTHING = KubeRayOptions(
    image="registry/rlscale:cuda",
    claim="data",
    mount="/mnt/data",
    namespace="research",
    secret=["keys", "more"],
    token_secret="ray-token",
    gpu_resource="amd.com/gpu",
    node_selector=["gpu=h100", "zone="],
    queue="team",
    service_account="runner",
    retries=0,
)


def documents(options: KubeRayOptions, *overrides: str, **values: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    text = write_kuberay(make_job(*overrides, **values), options, ray_version="2.60.0")
    config_map, ray_job = yaml.safe_load_all(text)
    return config_map, ray_job


def forbid_unknown(schema: Any) -> None:
    """Makes an unknown field an error, as `kubectl` does; Kubernetes itself would drop it."""
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            forbid_unknown(value)
    elif isinstance(schema, list):
        for value in schema:
            forbid_unknown(value)


def definition_of_ray_jobs() -> dict[str, Any]:
    """KubeRay's definition of a RayJob, which contains that of a pod."""
    schema: dict[str, Any] = json.loads(gzip.decompress((THIRD_PARTY / "kuberay_v1.6.2_rayjob.json.gz").read_bytes()))
    forbid_unknown(schema)
    schema["properties"]["metadata"] = METADATA  # the definition leaves it to the API server
    return schema


RAY_JOB = definition_of_ray_jobs()
CONFIG_MAP = {"$ref": "#/$defs/io.k8s.api.core.v1.ConfigMap", "$defs": KUBERNETES["$defs"]}


def violations(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Messages of all errors in `document`; empty when it matches the schema."""
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("options", [OPTIONS, EVERYTHING])
@pytest.mark.parametrize("gpus", [0, 8])
def test_the_documents_match_their_schemas(options: KubeRayOptions, gpus: int) -> None:
    needs = NodeNeeds(num_nodes=2, gpus=gpus, cpus=8, memory_gib=16, is_whole=False, slots=max(gpus, 2))
    config_map, ray_job = documents(options, needs=needs, env=("WANDB_API_KEY",))
    assert violations(ray_job, RAY_JOB) == []
    assert violations(config_map, CONFIG_MAP) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "backoffLimit"), "three"),
        (("spec", "entrypont"), "x"),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "password"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "volumes", 0, "claim"), "data"),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers"), None),
    ],
)
def test_the_schema_finds_a_mistake(path: tuple[Any, ...], value: Any) -> None:
    _, ray_job = documents(OPTIONS)
    place: Any = ray_job
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert len(violations(ray_job, RAY_JOB)) == 1


def test_pods_have_gpus_volume_shared_memory_and_secrets() -> None:
    _, ray_job = documents(EVERYTHING)
    cluster = ray_job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "68", "memory": "512Gi", "amd.com/gpu": "8"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/mnt/data", "/dev/shm"}
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}, {"secretRef": {"name": "more"}}]
    assert pod["nodeSelector"] == {"gpu": "h100", "zone": ""}
    assert pod["serviceAccountName"] == "runner"
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    assert ray_job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert "amd.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_volumes_and_mounts_belong_together() -> None:
    config_map, ray_job = documents(OPTIONS)
    cluster = ray_job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        names = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == names
    volumes = cluster["headGroupSpec"]["template"]["spec"]["volumes"]
    assert volumes[-1]["configMap"]["name"] == config_map["metadata"]["name"]


def test_the_token_is_a_secret_that_the_file_does_not_contain() -> None:
    text = write_kuberay(make_job(), OPTIONS, ray_version="2.60.0")
    assert yaml.safe_load_all(text)
    _, ray_job = documents(OPTIONS)
    assert ray_job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert "RAY_AUTH_TOKEN" not in text


def test_the_script_is_readable_and_kept_exactly() -> None:
    text = write_kuberay(make_job("a='b\nc'"), OPTIONS, ray_version="2.60.0")
    assert f"  {SCRIPT}: |\n" in text
    config_map, _ = documents(OPTIONS, "a='b\nc'", "d=\r\x07")
    assert "'a='\"'\"'b\nc'\"'\"''" in config_map["data"][SCRIPT]
    assert "'d=\r\x07'" in config_map["data"][SCRIPT]
