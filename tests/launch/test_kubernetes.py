"""Manifests: the fields that the operators' own definitions name, with the right types and values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megabatch.errors import ConfigError
from megabatch.launch.kubernetes import container_file, kubernetes_manifest
from tests.launch.test_request import request

WANTED = request(output="/runs/a", gpus_per_node=4, cores_per_worker=2, overrides=("train.epochs=1",))

# What we know of the operators' definitions, as far as used: kubeflow.org_pytorchjobs.yaml (training-operator v1) and
# trainer.kubeflow.org_trainjobs.yaml (trainer v2). A type, or a table of fields; [x] is a list of x.
CONTAINER = {"name": str, "image": str, "command": [str], "resources": {"limits": dict}, "volumeMounts": [dict]}
PYTORCHJOB = {
    "nprocPerNode": str,
    "elasticPolicy": {"minReplicas": int, "maxReplicas": int, "rdzvBackend": str, "maxRestarts": int},
    "runPolicy": {"backoffLimit": int, "cleanPodPolicy": str},
    "pytorchReplicaSpecs": {
        "Worker": {
            "replicas": int,
            "restartPolicy": str,
            "template": {
                "spec": {"terminationGracePeriodSeconds": int, "containers": [CONTAINER], "volumes": [dict]},
            },
        }
    },
}
TRAINJOB = {
    "runtimeRef": {"name": str},
    "trainer": {
        "image": str,
        "command": [str],
        "numNodes": int,
        "numProcPerNode": int,
        "resourcesPerNode": {"limits": dict},
    },
    "podTemplateOverrides": [
        {
            "targetJobs": [{"name": str}],
            "spec": {"volumes": [dict], "containers": [{"name": str, "volumeMounts": [dict]}]},
        }
    ],
}


def check(value: Any, schema: Any, where: str = "spec") -> None:
    if isinstance(schema, type):
        assert type(value) is schema, where
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for index, one in enumerate(value):
            check(one, schema[0], f"{where}[{index}]")
    else:
        assert set(value) == set(schema), where
        for name, inner in schema.items():
            check(value[name], inner, f"{where}.{name}")


def manifest(kind: str = "pytorchjob", **given: Any) -> Any:
    return json.loads(kubernetes_manifest(WANTED, "registry/x:1", "runs", kind=kind, **given))


def test_a_pytorchjob() -> None:
    made = manifest(namespace="team")
    assert (made["apiVersion"], made["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert made["metadata"] == {"name": "megabatch", "namespace": "team"}
    check(made["spec"], PYTORCHJOB)
    worker = made["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == made["spec"]["elasticPolicy"]["maxReplicas"] == 2
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "cpu": "8"}
    assert container["command"][-7:] == ["train", "demo", "--output", "/runs/a", "--resume", "--set", "train.epochs=1"]
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes


def test_a_trainjob() -> None:
    made = manifest("trainjob")
    assert (made["apiVersion"], made["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    check(made["spec"], TRAINJOB)
    assert (made["spec"]["trainer"]["numNodes"], made["spec"]["trainer"]["numProcPerNode"]) == (2, 4)


@pytest.mark.parametrize(
    ("given", "claim"), [({"name": "Has_Capitals"}, "runs"), ({}, "no claim"), ({"output": "/elsewhere/a"}, "runs")]
)
def test_what_a_cluster_would_refuse_is_refused_here(given: dict[str, Any], claim: str) -> None:
    values = {"output": "/runs/a"} | given
    with pytest.raises(ConfigError):
        kubernetes_manifest(request(**values), "x", claim)


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="give pytorchjob or trainjob; did you mean 'trainjob'"):
        kubernetes_manifest(WANTED, "image", "runs", kind="trainjobs")


def test_the_container_file_installs_the_package() -> None:
    for cuda in (True, False):
        text = container_file(cuda)
        assert text.splitlines()[1].startswith("FROM ")
        assert ("whl/cpu" in text) is not cuda
        assert "USER worker" in text
