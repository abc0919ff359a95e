"""A manifest for Kubernetes: a PyTorchJob of Kubeflow's Training Operator (`kubeflow.org/v1`), or a TrainJob of
Kubeflow Trainer (`trainer.kubeflow.org/v1alpha1`).

A JSON document is a YAML document, so it is written as JSON: no quoting rules to get wrong, and `kubectl apply -f`
takes it. Pods that are evicted are started again and go on with --resume; the run folder must be on a shared volume.
"""

from __future__ import annotations

import json
import re
from typing import Any

from megabatch.errors import ConfigError, nearest
from megabatch.launch.request import LaunchRequest, torchrun_words, train_words

__all__ = ["container_file", "kubernetes_manifest"]

KINDS = {
    "pytorchjob": ("kubeflow.org/v1", "PyTorchJob"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
}


def kubernetes_manifest(
    request: LaunchRequest, image: str, claim: str, mount: str = "/runs", kind: str = "pytorchjob", namespace: str = ""
) -> str:
    """The manifest; `claim` is the PersistentVolumeClaim that holds run folders and images, mounted at `mount`."""
    if kind not in KINDS:
        raise ConfigError(f"--kind '{kind}'; give {' or '.join(KINDS)}{nearest(kind, KINDS)}")
    for what, value in (("--name", request.name), ("--claim", claim)):
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", value):
            raise ConfigError(f"{what} '{value}' is no Kubernetes name; use small letters, digits and '-'")
    if not request.output.startswith(mount.rstrip("/") + "/"):
        raise ConfigError(f"--output '{request.output}' is not on the shared volume; give a folder under '{mount}'")
    metadata = {"name": request.name} | ({"namespace": namespace} if namespace else {})
    spec = _trainjob(request, image, claim, mount) if kind == "trainjob" else _pytorchjob(request, image, claim, mount)
    api, name = KINDS[kind]
    return json.dumps({"apiVersion": api, "kind": name, "metadata": metadata, "spec": spec}, indent=2) + "\n"


def _command(request: LaunchRequest) -> list[str]:
    """torchrun reads its world (PET_NNODES, PET_RDZV_ENDPOINT, ...) from the environment the operator makes."""
    return [request.python, *torchrun_words(request), "-m", "megabatch", *train_words(request)]


def _resources(request: LaunchRequest) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if request.gpus_per_node:
        limits["nvidia.com/gpu"] = request.gpus_per_node
    if request.cores_per_worker:
        limits["cpu"] = str(request.cores_per_worker * request.workers_per_node)
    return {"limits": limits} if limits else {}


def _volumes(claim: str) -> list[dict[str, Any]]:
    return [
        {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
        # Workers on one node exchange images and gradients through shared memory; 64 MB, the default, is too little.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _mounts(mount: str) -> list[dict[str, Any]]:
    return [{"name": "shared", "mountPath": mount}, {"name": "shm", "mountPath": "/dev/shm"}]


def _pytorchjob(request: LaunchRequest, image: str, claim: str, mount: str) -> dict[str, Any]:
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": image,
        "command": _command(request),
        "resources": _resources(request),
        "volumeMounts": _mounts(mount),
    }
    replica = {
        "restartPolicy": "OnFailure",
        "template": {
            "spec": {
                "terminationGracePeriodSeconds": request.grace_seconds + 30,
                "containers": [container],
                "volumes": _volumes(claim),
            }
        },
    }
    return {
        "nprocPerNode": str(request.workers_per_node),
        "elasticPolicy": {
            "minReplicas": request.nodes,
            "maxReplicas": request.nodes,
            "rdzvBackend": "c10d",
            "maxRestarts": 10,
        },
        "runPolicy": {"backoffLimit": 10, "cleanPodPolicy": "None"},
        "pytorchReplicaSpecs": {"Worker": {"replicas": request.nodes, **replica}},
    }


def _trainjob(request: LaunchRequest, image: str, claim: str, mount: str) -> dict[str, Any]:
    return {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": image,
            "command": _command(request),
            "numNodes": request.nodes,
            "numProcPerNode": request.workers_per_node,
            "resourcesPerNode": _resources(request),
        },
        "podTemplateOverrides": [
            {
                "targetJobs": [{"name": "node"}],
                "spec": {
                    "volumes": _volumes(claim),
                    "containers": [{"name": "node", "volumeMounts": _mounts(mount)}],
                },
            }
        ],
    }


def container_file(cuda: bool) -> str:
    """A container file for the image; build it in a folder that holds the source tree."""
    index = "" if cuda else " --index-url https://download.pytorch.org/whl/cpu"
    return f"""# Written by `megabatch launch kubernetes`. In the source tree: podman build -t IMAGE -f THIS_FILE .
FROM docker.io/library/python:3.11-slim
WORKDIR /opt/megabatch
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --no-cache-dir -c constraints.txt torch{index}
COPY megabatch ./megabatch
RUN pip install --no-cache-dir -c constraints.txt .
# Workers write as a user without rights; the shared volume must let that user write.
RUN useradd --create-home --uid 1000 worker
USER worker
ENTRYPOINT []
CMD ["megabatch", "doctor"]
"""
