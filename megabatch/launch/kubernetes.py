"""A manifest for Kubernetes: a PyTorchJob of Kubeflow's Training Operator (`kubeflow.org/v1`), or a TrainJob of
Kubeflow Trainer (`trainer.kubeflow.org/v1alpha1`).

A JSON document is a YAML document, so it is written as JSON: no quoting rules to get wrong, and `kubectl apply -f`
takes it. Pods that are evicted are started again and go on with --resume; the run folder must be on a shared volume.

An elastic run needs no operator: a Service and a Deployment for the lighthouse, and a Job with a pod for each node. The
token is a Secret, written into a file of its own, so that the manifest can be shown to others.
"""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Any

from megabatch.errors import ConfigError, nearest
from megabatch.files import write_once
from megabatch.launch.script import LaunchRequest, word

KINDS = {
    "pytorchjob": ("kubeflow.org/v1", "PyTorchJob"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
}


def kubernetes_manifest(
    request: LaunchRequest,
    image: str,
    claim: str,
    mount: str = "/runs",
    kind: str = "pytorchjob",
    namespace: str = "",
    memory: str = "",
) -> str:
    """The manifest; `claim` is the PersistentVolumeClaim that holds run folders and images, mounted at `mount`."""
    if kind not in KINDS:
        raise ConfigError(f"--kind '{kind}'; give {' or '.join(KINDS)}{nearest(kind, KINDS)}")
    _check_names(request, claim, mount)
    metadata = {"name": request.name} | ({"namespace": namespace} if namespace else {})
    make = _trainjob if kind == "trainjob" else _pytorchjob
    spec = make(request, image, claim, mount, _resources(request, memory))
    api, name = KINDS[kind]
    return json.dumps({"apiVersion": api, "kind": name, "metadata": metadata, "spec": spec}, indent=2) + "\n"


def elastic_manifest(
    request: LaunchRequest, image: str, claim: str, mount: str = "/runs", namespace: str = "", memory: str = ""
) -> str:
    """Lighthouse and workers of an elastic run. Exit code 2 is a mistake of the user: it ends the job."""
    _check_names(request, claim, mount)
    name, port = f"{request.name}-lighthouse", 29510
    label, space = {"app": name}, {"namespace": namespace} if namespace else {}
    # Kubernetes itself puts the pod's address in place of $(POD_IP).
    shows_token = {"name": "MEGABATCH_TOKEN_FILE", "value": "/token/token"}
    token_mount = {"name": "token", "mountPath": "/token", "readOnly": True}
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    serve = ["lighthouse", "--bind", f"$(POD_IP):{port}", "--min-workers", str(request.min_workers)]
    module = [request.python, "-m", "megabatch"]
    lighthouse = {
        "name": "lighthouse",
        "image": image,
        "command": [*module, *serve],
        "env": [address, shows_token],
        "volumeMounts": [token_mount],
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}},
    }
    worker = {
        "name": "worker",
        "image": image,
        "command": _after_doctor(request, [*module, *request.elastic_words(), f"{name}:{port}"]),
        "env": [shows_token],
        "resources": _resources(request, memory),
        "volumeMounts": [*_mounts(mount), token_mount],
    }
    token = {"name": "token", "secret": {"secretName": f"{request.name}-token"}}
    pod = {
        "restartPolicy": "Never",  # the job makes a new pod
        "terminationGracePeriodSeconds": request.grace_seconds + 30,
        "containers": [worker],
        "volumes": [*_volumes(claim), token],
    }
    job = {
        "parallelism": request.nodes,
        "completions": request.nodes,
        "backoffLimit": 100,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": "worker", "operator": "In", "values": [2]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": label},
        "template": {"metadata": {"labels": label}, "spec": {"containers": [lighthouse], "volumes": [token]}},
    }
    service = {"selector": label, "ports": [{"port": port, "targetPort": port}]}
    items = [
        {"apiVersion": api, "kind": kind, "metadata": {"name": own, **space}, "spec": spec}
        for api, kind, own, spec in (
            ("v1", "Service", name, service),
            ("apps/v1", "Deployment", name, deployment),
            ("batch/v1", "Job", request.name, job),
        )
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n"


def write_secret(request: LaunchRequest, file: Path, namespace: str = "") -> None:
    """Write a Secret with a new token into a file that only its owner can read; one that is there stays."""
    metadata = {"name": f"{request.name}-token"} | ({"namespace": namespace} if namespace else {})
    data = {"token": secrets.token_hex(32)}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}
    if write_once(file, json.dumps(secret)):
        print(f"written        {file}: the token of the run, keep it secret")
    else:
        print(f"was there      {file}: the token of before")


def _check_names(request: LaunchRequest, claim: str, mount: str) -> None:
    for what, value in (("--name", request.name), ("--claim", claim)):
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", value):
            raise ConfigError(f"{what} '{value}' is no Kubernetes name; use small letters, digits and '-'")
    if not request.output.startswith(mount.rstrip("/") + "/"):
        raise ConfigError(f"--output '{request.output}' is not on the shared volume; give a folder under '{mount}'")


def _command(request: LaunchRequest) -> list[str]:
    """torchrun reads its world (PET_NNODES, PET_RDZV_ENDPOINT, ...) from the environment the operator makes."""
    return _after_doctor(
        request, [request.python, *request.torchrun_words(), "-m", "megabatch", *request.train_words()]
    )


def _after_doctor(request: LaunchRequest, command: list[str]) -> list[str]:
    """Every pod examines its machine first: a missing device or a broken install shows in its log at once.

    The operator's variables of the world are taken away, or `doctor` would wait for the others.
    """
    if not request.health_check:
        return command
    world = " ".join(f"-u {name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    script = f'env {world} {word(request.python)} -m megabatch doctor && exec "$@"'
    return ["/bin/sh", "-c", script, "sh", *command]


def _resources(request: LaunchRequest, memory: str) -> dict[str, Any]:
    """Cores and memory are always asked for: a pod that asks for nothing is the first to be evicted."""
    memory = memory or f"{(16 if request.gpus_per_node else 4) * request.workers_per_node}Gi"
    if not re.fullmatch(r"[1-9][0-9]{0,6}(Mi|Gi|Ti)", memory):
        raise ConfigError(f"--memory '{memory}' is no size; give a number and Mi, Gi or Ti, for example 64Gi")
    limits: dict[str, Any] = {"memory": memory}
    if request.gpus_per_node:
        limits["nvidia.com/gpu"] = request.gpus_per_node
    return {"requests": {"cpu": str(request.cores_per_node), "memory": memory}, "limits": limits}


def _volumes(claim: str) -> list[dict[str, Any]]:
    return [
        {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
        # Loader processes hand images over in shared memory; 64 MB, the default, is too little.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _mounts(mount: str) -> list[dict[str, Any]]:
    return [{"name": "shared", "mountPath": mount}, {"name": "shm", "mountPath": "/dev/shm"}]


def _pytorchjob(
    request: LaunchRequest, image: str, claim: str, mount: str, resources: dict[str, Any]
) -> dict[str, Any]:
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": image,
        "command": _command(request),
        "resources": resources,
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


def _trainjob(request: LaunchRequest, image: str, claim: str, mount: str, resources: dict[str, Any]) -> dict[str, Any]:
    return {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": image,
            "command": _command(request),
            "numNodes": request.nodes,
            "numProcPerNode": request.workers_per_node,
            "resourcesPerNode": resources,
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
RUN pip install --no-cache-dir -c constraints.txt ".[elastic]"
# Workers write as a user without rights; the shared volume must let that user write.
RUN useradd --create-home --uid 1000 worker
USER worker
ENTRYPOINT []
CMD ["megabatch", "doctor"]
"""
