"""Manifests: the fields that the operators' own definitions name, with the right types and values."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megabatch.errors import ConfigError
from megabatch.launch.kubernetes import container_file, elastic_manifest, kubernetes_manifest, write_secret
from tests.launch.test_script import request

WANTED = request(output="/runs/a", gpus_per_node=4, cores_per_worker=2, overrides=("train.epochs=1",))

# What we know of the operators' definitions, as far as used: kubeflow.org_pytorchjobs.yaml (training-operator v1) and
# trainer.kubeflow.org_trainjobs.yaml (trainer v2). A type, or a table of fields; [x] is a list of x.
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "resources": {"requests": dict, "limits": dict},
    "volumeMounts": [dict],
}
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
        "resourcesPerNode": {"requests": dict, "limits": dict},
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
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"nvidia.com/gpu": 4, "memory": "64Gi"},
    }
    assert container["command"][-7:] == ["train", "demo", "--output", "/runs/a", "--resume", "--set", "train.epochs=1"]
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes


def test_a_trainjob() -> None:
    made = manifest("trainjob")
    assert (made["apiVersion"], made["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    check(made["spec"], TRAINJOB)
    assert (made["spec"]["trainer"]["numNodes"], made["spec"]["trainer"]["numProcPerNode"]) == (2, 4)


def test_an_elastic_run_has_a_lighthouse_a_job_and_a_secret_of_its_own(tmp_path: Path) -> None:
    wanted = request(output="/runs/a", elastic=True, min_workers=2)
    made = json.loads(elastic_manifest(wanted, "registry/x:1", "runs", namespace="team"))
    service, deployment, job = made["items"]
    assert [one["kind"] for one in made["items"]] == ["Service", "Deployment", "Job"]
    assert {one["metadata"]["namespace"] for one in made["items"]} == {"team"}
    pods = deployment["spec"]["template"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == pods["metadata"]["labels"]
    (lighthouse,) = pods["spec"]["containers"]
    assert lighthouse["command"][3:] == ["lighthouse", "--bind", "$(POD_IP):29510", "--min-workers", "2"]
    assert lighthouse["env"][0]["name"] == "POD_IP"
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (2, 2)
    pod = job["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    assert worker["command"][-6:] == [
        *("--workers", "4", "--min-workers", "2", "--elastic", f"{service['metadata']['name']}:29510")
    ]
    assert {one["name"] for one in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}

    file = tmp_path / "a.secret.json"
    write_secret(wanted, file, "team")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = json.loads(file.read_text())
    token = secret["stringData"]["token"]
    assert len(token) == 64
    assert secret["metadata"]["name"] == pod["volumes"][-1]["secret"]["secretName"]
    write_secret(wanted, file)
    assert json.loads(file.read_text())["stringData"]["token"] == token
    assert token not in json.dumps(made)


@pytest.mark.parametrize(
    ("given", "claim"), [({"name": "Has_Capitals"}, "runs"), ({}, "no claim"), ({"output": "/elsewhere/a"}, "runs")]
)
def test_what_a_cluster_would_refuse_is_refused_here(given: dict[str, Any], claim: str) -> None:
    values = {"output": "/runs/a"} | given
    with pytest.raises(ConfigError):
        kubernetes_manifest(request(**values), "x", claim)


@pytest.fixture(scope="module")
def schemas() -> Any:
    """Kubernetes' own schemas, as far as a cluster has them by itself; the operators' kinds are not among them."""
    return pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")


@pytest.mark.filterwarnings("ignore")
def test_kubernetes_itself_would_take_every_object(schemas: Any, tmp_path: Path) -> None:
    elastic = request(output="/runs/a", elastic=True, min_workers=2)
    objects = json.loads(elastic_manifest(elastic, "registry/x:1", "runs", namespace="team"))["items"]
    write_secret(elastic, tmp_path / "secret.json", "team")
    objects.append(json.loads((tmp_path / "secret.json").read_text()))
    template = manifest()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    objects.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker"}, **template})
    assert [one["kind"] for one in objects] == ["Service", "Deployment", "Job", "Secret", "Pod"]
    for one in objects:
        schemas.validate(one, schemas.latest_version(), strict=True)
    objects[1]["spec"]["template"]["spec"]["containers"][0]["resurces"] = {}
    with pytest.raises(schemas.ValidationError, match="resurces"):
        schemas.validate(objects[1], schemas.latest_version(), strict=True)


@pytest.mark.parametrize("code", [0, 3])
def test_every_pod_examines_its_machine_before_it_trains(tmp_path: Path, code: int) -> None:
    python, said = tmp_path / "python", tmp_path / "said"
    python.write_text(f'#!/bin/sh\necho "$RANK $*" >> {said}\n[ "$3" != doctor ] || exit {code}\n')
    python.chmod(0o755)
    wanted = request(output="/runs/a", python=str(python))
    elastic = request(output="/runs/a", python=str(python), elastic=True)
    jobs = json.loads(elastic_manifest(elastic, "x", "runs"))["items"][2]
    commands = [
        json.loads(kubernetes_manifest(wanted, "x", "runs", kind="trainjob"))["spec"]["trainer"]["command"],
        jobs["spec"]["template"]["spec"]["containers"][0]["command"],
    ]
    for command, first in zip(commands, ("-m torch.distributed.run", "-m megabatch train"), strict=True):
        done = subprocess.run(command, env={"PATH": os.environ["PATH"], "RANK": "7"}, check=False)
        lines = said.read_text().splitlines()
        assert (done.returncode, lines[0]) == (code, " -m megabatch doctor")  # alone, whatever the operator says
        assert len(lines) == (1 if code else 2)
        assert code or lines[1].startswith(f"7 {first}")
        said.unlink()
    kept = kubernetes_manifest(request(output="/runs/a", health_check=False), "x", "runs")
    assert "doctor" not in kept


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="give pytorchjob or trainjob; did you mean 'trainjob'"):
        kubernetes_manifest(WANTED, "image", "runs", kind="trainjobs")


def test_the_container_file_installs_the_package() -> None:
    for cuda in (True, False):
        text = container_file(cuda)
        assert text.splitlines()[1].startswith("FROM ")
        assert ("whl/cpu" in text) is not cuda
        assert "USER worker" in text


def test_every_pod_asks_for_cores_and_memory() -> None:
    made = json.loads(elastic_manifest(request(output="/runs/a", elastic=True), "x", "runs", memory="6Gi"))
    pods = [one["spec"]["template"]["spec"] for one in made["items"][1:]]
    asked = [container["resources"]["requests"] for pod in pods for container in pod["containers"]]
    assert asked == [{"cpu": "1", "memory": "512Mi"}, {"cpu": "4", "memory": "6Gi"}]
    assert all({"cpu", "memory"} == set(one) for one in asked)
    for wrong in ("64", "64GB", "0Gi", "-1Gi", "1Gi x"):
        with pytest.raises(ConfigError, match="--memory"):
            manifest(memory=wrong)
