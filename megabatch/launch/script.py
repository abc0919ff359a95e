"""Scripts that start torchrun on every machine: a batch script for Slurm, and one for a list of hosts over ssh.

Slurm: health check, torchrun on every node, stop in time, requeue until the run is finished. How a run survives its
time limit and preemption:

    Slurm  --USR1, grace_seconds before the limit-->  batch shell  --USR1-->  torchrun  -->  workers
    Slurm  --TERM, when preempted----------------------------------------->  torchrun  -->  workers
    workers finish their step, write a checkpoint, exit 0;  the shell sees a run that is not finished and requeues

`summary.json` says whether a run is finished. A job that fails is not requeued by the script: the same error would
come again.

ssh: torchrun on all hosts at once; when one fails, all are stopped. The machines need this Python at the same path,
key-based ssh, and the run folder on a shared disk. Nothing of the caller's environment travels along.
"""

from __future__ import annotations

import re

from megabatch.errors import ConfigError
from megabatch.launch.request import LaunchRequest, folder_of, plain, torchrun_words, train_words, word

__all__ = ["slurm_script", "ssh_script"]


def slurm_script(request: LaunchRequest, partition: str = "", account: str = "", extra: tuple[str, ...] = ()) -> str:
    """The text of an sbatch file; `extra` are further #SBATCH options as they are typed."""
    options = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        *(
            [f"--cpus-per-task={request.cores_per_worker * request.workers_per_node}"]
            if request.cores_per_worker
            else []
        ),
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        *([f"--partition={plain(partition, 'partition')}"] if partition else []),
        *([f"--account={plain(account, 'account')}"] if account else []),
        *([f"--time={plain(request.time_limit, 'time limit')}"] if request.time_limit else []),
        f"--signal=B:USR1@{request.grace_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--output={plain(folder_of(request) + '/' + request.name + '-%j.log', 'log file')}",
        *(plain(option, "--sbatch option") for option in extra),
    ]
    directives = "\n".join(f"#SBATCH {option}" for option in options)
    return _SLURM.format(
        directives=directives,
        python=word(request.python),
        output=word(request.output),
        torchrun=" ".join(torchrun_words(request)),
        health=_SLURM_HEALTH_CHECK if request.health_check else "",
        train=_train(request),
    )


def ssh_script(request: LaunchRequest, hosts: tuple[str, ...], port: int = 29500, directory: str = "") -> str:
    """The text of a bash script; the first host is the meeting point."""
    if len(hosts) != request.nodes or len(set(hosts)) != len(hosts):
        raise ConfigError(f"{len(hosts)} hosts ({', '.join(hosts)}) for {request.nodes} nodes; name each host once")
    for host in hosts:
        if not re.fullmatch(r"([A-Za-z_][-A-Za-z0-9_]*@)?[A-Za-z0-9][-A-Za-z0-9_.:]*", host):
            raise ConfigError(f"host '{host}' is no host name; give NAME or USER@NAME")
    first = hosts[0].rpartition("@")[2]
    world = f"--nnodes {request.nodes} --max-restarts 3 --rdzv-backend c10d"
    launcher = f"{word(request.python)} {' '.join(torchrun_words(request))} {world}"
    change = f"cd {word(directory)} && " if directory else ""
    doctor = f"{change}{launcher} --rdzv-id doctor --rdzv-endpoint {first}:{port} -m megabatch doctor"
    run = f"{change}exec {launcher} --rdzv-id train --rdzv-endpoint {first}:{port + 1} -m megabatch {_train(request)}"
    return _SSH.format(
        hosts=" ".join(word(host) for host in hosts),
        doctor=word(doctor),
        run=word(run),
        health='everywhere "$doctor"' if request.health_check else ":",
        output=word(request.output),
    )


def _train(request: LaunchRequest) -> str:
    return " ".join(word(one) for one in train_words(request))


_SLURM_HEALTH_CHECK = """
# A slow link or a missing rank is found in seconds here, in hours later. It stops the job.
srun --kill-on-bad-exit=1 "${torchrun[@]}" --rdzv-id "$SLURM_JOB_ID-$attempt-doctor" \\
  --rdzv-endpoint "$head:$port" -m megabatch doctor
"""

_SLURM = """#!/bin/bash
{directives}
# Written by `megabatch launch slurm`. Submit with: sbatch THIS_FILE
set -euo pipefail

python={python}
run={output}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
attempt=${{SLURM_RESTART_COUNT:-0}}
mkdir -p "$(dirname "$run")"

# One launcher per node; it waits for its workers' checkpoint as long as the job has time.
torchrun=("$python" {torchrun}
  --nnodes "$SLURM_NNODES" --max-restarts 3 --rdzv-backend c10d)
echo "job $SLURM_JOB_ID, attempt $attempt, $SLURM_NNODES nodes, first $head, run folder $run"
{health}
srun --kill-on-bad-exit=1 "${{torchrun[@]}}" --rdzv-id "$SLURM_JOB_ID-$attempt" --rdzv-endpoint "$head:$((port + 1))" \\
  -m megabatch {train} &
step=$!
# Near the time limit the shell alone is told; srun passes USR1 on to the launchers (at TERM it would kill them).
trap 'echo "told to stop"; kill -USR1 "$step" 2>/dev/null' USR1
# A job that is preempted: Slurm has told the launchers itself, the shell must live on to put the job back.
trap 'echo "preempted"' TERM
code=0
wait "$step" || code=$?
# A trapped signal ends `wait` early: wait for the checkpoint.
while kill -0 "$step" 2>/dev/null; do
  code=0
  wait "$step" || code=$?
done

if grep -q '"status": "finished"' "$run/summary.json" 2>/dev/null; then
  echo "the run is finished: $run"
elif grep -q '"status": "stopped"' "$run/summary.json" 2>/dev/null; then
  echo "stopped with a checkpoint; goes on when the job runs again"
  scontrol requeue "$SLURM_JOB_ID"
else
  echo "the run failed with exit code $code; look above, then: sbatch again, it resumes"
  exit "$(( code ? code : 1 ))"
fi
"""

_SSH = """#!/bin/bash
# Written by `megabatch launch ssh`. Run it where ssh reaches all hosts: bash THIS_FILE
set -euo pipefail
hosts=({hosts})
ssh=(ssh -tt -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15)
doctor={doctor}
train={run}

# The command on every host; output with the host's name; the first failure stops the others.
everywhere() {{
  local command=$1 pids=() code=0
  for host in "${{hosts[@]}}"; do
    # Not a pipe: the process to watch and to stop is ssh, not what labels its lines.
    "${{ssh[@]}}" "$host" "$command" </dev/null > >(sed -u "s/^/$host: /") 2>&1 &
    pids+=($!)
  done
  # A terminal (-tt) is gone with its ssh: the launchers get SIGHUP, write a checkpoint and stop.
  trap 'kill "${{pids[@]}}" 2>/dev/null || true' INT TERM
  local left=("${{pids[@]}}") still pid one
  while [ "${{#left[@]}}" -gt 0 ]; do
    still=()
    for pid in "${{left[@]}}"; do
      if kill -0 "$pid" 2>/dev/null; then
        still+=("$pid")
        continue
      fi
      one=0
      wait "$pid" || one=$?
      if [ "$one" -ne 0 ] && [ "$code" -eq 0 ]; then
        code=$one
        kill "${{pids[@]}}" 2>/dev/null || true
      fi
    done
    left=(${{still[@]+"${{still[@]}}"}})
    sleep 0.5
  done
  return "$code"
}}

{health}
everywhere "$train"
echo "run folder" {output}
"""
