"""A batch script for Slurm: health check, torchrun on every node, stop in time, requeue until the run is finished.

How a run survives its time limit and preemption:

    Slurm  --USR1, grace_seconds before the limit-->  batch shell  --USR1-->  torchrun  -->  workers
    Slurm  --TERM, when preempted----------------------------------------->  torchrun  -->  workers
    workers finish their step, write a checkpoint, exit 0;  the shell sees a run that is not finished and requeues

`summary.json` says whether a run is finished. A job that fails is not requeued by the script: the same error would
come again.
"""

from __future__ import annotations

from megabatch.launch.request import LaunchRequest, folder_of, plain, torchrun_words, train_words, word

__all__ = ["slurm_script"]


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
    train = " ".join(word(one) for one in train_words(request))
    return _TEMPLATE.format(
        name=request.name,
        directives=directives,
        python=word(request.python),
        output=word(request.output),
        torchrun=" ".join(torchrun_words(request)),
        health=_HEALTH if request.health_check else "",
        train=train,
    )


_HEALTH = """
# A slow link or a missing rank is found in seconds here, in hours later. It stops the job.
srun --kill-on-bad-exit=1 "${torchrun[@]}" --rdzv-id "$SLURM_JOB_ID-$attempt-doctor" \\
  --rdzv-endpoint "$head:$port" -m megabatch doctor
"""

_TEMPLATE = """#!/bin/bash
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
