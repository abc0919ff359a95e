"""What a script for a cluster needs to know, and scripts that start torchrun on every machine. Imports no torch.

Every text that goes into a script passes through `word` (shell) or `plain` (a scheduler's own lines): a name with a
space, a quote or a newline in it is quoted or refused, never pasted.

Slurm: health check, torchrun on every node, stop in time, requeue until the run is finished. How a run survives its
time limit and preemption:

    Slurm  --USR1, grace_seconds before the limit-->  batch shell  --USR1-->  torchrun  -->  workers
    Slurm  --TERM, when preempted----------------------------------------->  torchrun  -->  workers
    workers finish their step, write a checkpoint, exit 0;  the shell sees a run that is not finished and requeues

`summary.json` says whether a run is finished. A job that fails is not requeued by the script: the same error would
come again.

ssh: torchrun on all hosts at once; when one fails, all are stopped. The machines need this Python at the same path,
key-based ssh, and the run folder on a shared disk. Nothing of the caller's environment travels along.

Elastic runs: a lighthouse on the first host, and one `megabatch train --elastic HOST:PORT` on each; a host that fails
does not stop the others. The token of the run is made where the script runs, in a file that only its owner can read.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megabatch.comm.shape import parse_grid
from megabatch.errors import ConfigError
from megabatch.files import write_atomically
from megabatch.recipes import load_config


@dataclass(frozen=True)
class LaunchRequest:
    """A run on `nodes` machines with `workers_per_node` workers each, checked when it is made.

    gpus_per_node 0: workers compute on cores. grace_seconds: how long before its end a job is asked to stop.
    """

    recipe: str
    output: str
    nodes: int
    workers_per_node: int
    name: str = "megabatch"
    data: str = ""
    overrides: tuple[str, ...] = ()
    grid: str = ""
    gpus_per_node: int = 0
    cores_per_worker: int = 0  # 0: four for a worker with a GPU, which must be fed; else one
    time_limit: str = ""
    grace_seconds: int = 120
    python: str = "python"
    health_check: bool = True
    elastic: bool = False
    min_workers: int = 1  # of an elastic run

    def __post_init__(self) -> None:
        if self.gpus_per_node not in (0, self.workers_per_node):
            raise ConfigError(
                f"{self.gpus_per_node} GPUs and {self.workers_per_node} workers per node; "
                "give one worker per GPU, or no GPUs"
            )
        if not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,60}[A-Za-z0-9])?", self.name):
            raise ConfigError(f"name '{self.name}'; use letters, digits, '-', '_' and '.', at most 62 of them")
        if not self.output:
            raise ConfigError("--output is empty; give the run folder, on a disk that all machines share")
        # What cannot work is refused now, not hours later on the cluster. A file that only the cluster has, given by an
        # absolute path, cannot be checked.
        if not (self.recipe.endswith(".toml") and self.recipe.startswith("/") and not Path(self.recipe).exists()):
            config = load_config(self.recipe, list(self.overrides))
            comm, source = config.comm, config.data.source
            if source not in ("generated", "fashion-mnist") and not (self.data or config.data.path):
                raise ConfigError(
                    f"recipe '{self.recipe}' trains on images of kind '{source}' and no place is given; "
                    "add --data PATH, as the machines see it"
                )
            if self.elastic and (comm.sums != "exact" or comm.backend == "nccl"):
                raise ConfigError("elastic runs need comm.sums=exact and Gloo; set them so, or leave --elastic out")
        if self.elastic and self.gpus_per_node:
            raise ConfigError(f"{self.gpus_per_node} GPUs and --elastic; elastic runs compute on cores: leave one out")
        if self.elastic and self.min_workers > (most := self.nodes * self.workers_per_node):
            raise ConfigError(
                f"--elastic --min-workers {self.min_workers} on {most} workers never begins; ask for fewer"
            )
        if self.grid:
            parse_grid(self.grid).check_fits(self.nodes * self.workers_per_node)

    @property
    def cores_per_node(self) -> int:
        return (self.cores_per_worker or (4 if self.gpus_per_node else 1)) * self.workers_per_node

    def torchrun_words(self) -> list[str]:
        """torchrun on one machine: it hands the signals on and waits for its workers' checkpoint."""
        words = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.workers_per_node), "--signals-to-handle"]
        return [*words, "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout", str(self.grace_seconds)]

    def train_words(self) -> list[str]:
        """`train RECIPE ...` for the workers: always with --resume, which also starts a run that is new."""
        words = ["train", self.recipe, "--output", self.output, "--resume"]
        words += ["--data", self.data] if self.data else []
        words += ["--grid", self.grid] if self.grid else []
        return words + [word for override in self.overrides for word in ("--set", override)]

    def elastic_words(self) -> list[str]:
        """The end of `train RECIPE ...` on a host of an elastic run; the address of the lighthouse follows."""
        bounds = ["--min-workers", str(self.min_workers)]
        return [*self.train_words(), "--workers", str(self.workers_per_node), *bounds, "--elastic"]


def word(text: str) -> str:
    """One word of a shell command."""
    if "\0" in text or "\n" in text or "\r" in text:
        raise ConfigError(f"{text!r} has a line break in it, which no script can carry; give it without")
    return shlex.quote(text)


def plain(text: str, what: str) -> str:
    """A value on a scheduler's own line, where no quoting exists."""
    if not re.fullmatch(r"[-A-Za-z0-9_.,:/@%+=]+", text):
        raise ConfigError(
            f"{what} '{text}' has characters that a job script cannot carry; use letters, digits and -_.,:/@%+="
        )
    return text


@dataclass(frozen=True)
class Site:
    """What a Slurm site wants to know. setup: a shell file of modules and environments, sourced before anything runs.

    container: an image for `srun --container-image`, which sites with the pyxis plugin have.
    """

    partition: str = ""
    account: str = ""
    mail: str = ""
    setup: str = ""
    container: str = ""
    extra: tuple[str, ...] = ()  # further #SBATCH options as they are typed

    def directives(self) -> list[str]:
        named = {"partition": self.partition, "account": self.account, "mail-user": self.mail}
        found = [f"--{name}={plain(value, name)}" for name, value in named.items() if value]
        return found + (["--mail-type=END,FAIL,REQUEUE"] if self.mail else [])

    def srun_words(self, request: LaunchRequest) -> list[str]:
        if not self.container:
            return []
        places = dict.fromkeys([str(PurePosixPath(request.output).parent), *([request.data] if request.data else [])])
        if not all(place.startswith("/") for place in places):
            raise ConfigError(
                f"--container needs absolute paths, given {', '.join(places)}; give --output and --data from /"
            )
        mounts = ",".join(f"{place}:{place}" for place in places)
        return [f"--container-image={plain(self.container, '--container')}", f"--container-mounts={mounts}"]


def slurm_script(request: LaunchRequest, site: Site | None = None) -> str:
    """The text of an sbatch file."""
    site = site or Site()
    options = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={request.cores_per_node}",
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        *site.directives(),
        *([f"--time={plain(request.time_limit, 'time limit')}"] if request.time_limit else []),
        f"--signal=B:USR1@{request.grace_seconds}",
        "--requeue",
        *(["--no-kill"] if request.elastic else []),
        "--open-mode=append",
        f"--output={request.name}-%j.log",  # where sbatch is typed: a folder that exists, or Slurm drops the job
        *(plain(option, "--sbatch option") for option in site.extra),
    ]
    directives = "\n".join(f"#SBATCH {option}" for option in options)
    if request.elastic:
        train = " ".join(word(one) for one in request.elastic_words())
        start = _SLURM_ELASTIC.format(train=train, min_workers=request.min_workers, token=_TOKEN, address=_ADDRESS)
    else:
        health = _SLURM_HEALTH_CHECK if request.health_check else ""
        start = _SLURM_TORCHRUN.format(
            torchrun=" ".join(request.torchrun_words()), health=health, train=_train(request)
        )
    return _SLURM.format(
        directives=directives,
        setup=f"set +u\nsource {word(site.setup)}\nset -u\n" if site.setup else "",
        python=word(request.python),
        output=word(request.output),
        srun="".join(f" {word(one)}" for one in site.srun_words(request)),
        start=start,
    )


def ssh_script(request: LaunchRequest, hosts: tuple[str, ...], port: int = 29500, directory: str = "") -> str:
    """The text of a bash script; the first host is the meeting point."""
    if len(hosts) != request.nodes or len(set(hosts)) != len(hosts):
        raise ConfigError(f"{len(hosts)} hosts ({', '.join(hosts)}) for {request.nodes} nodes; name each host once")
    for host in hosts:
        if not re.fullmatch(r"([A-Za-z_][-A-Za-z0-9_]*@)?[A-Za-z0-9][-A-Za-z0-9_.:]*", host):
            raise ConfigError(f"host '{host}' is no host name; give NAME or USER@NAME")
    first = hosts[0].rpartition("@")[2]
    if request.elastic:
        return _ssh_elastic(request, hosts, port, directory)
    world = f"--nnodes {request.nodes} --max-restarts 3 --rdzv-backend c10d"
    launcher = f"{word(request.python)} {' '.join(request.torchrun_words())} {world}"
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


def _ssh_elastic(request: LaunchRequest, hosts: tuple[str, ...], port: int, directory: str) -> str:
    """The script of an elastic run over ssh; the lighthouse is on the first host."""
    change, python = f"cd {word(directory)} && " if directory else "", word(request.python)
    token = word(f"{request.output}.token")
    prepare = (
        f"{change}python={python}; MEGABATCH_TOKEN_FILE={token}; "
        f'mkdir -p "$(dirname {token})"; {_TOKEN}; head=$(hostname); {_ADDRESS}; echo "$address"'
    )
    start = f"{change}exec env MEGABATCH_TOKEN_FILE={token} {python} -m megabatch"
    return _SSH_ELASTIC.format(
        hosts=" ".join(word(host) for host in hosts),
        prepare=word(prepare.replace("\n", "; ")),
        lighthouse=word(f"{start} lighthouse --min-workers {request.min_workers} --bind"),
        train=word(f"{start} {' '.join(map(word, request.elastic_words()))}"),
        port=port,
        output=word(request.output),
    )


def hand_over(text: str, file: Path | None) -> None:
    """Print the text, or write the file and say so."""
    if file is None:
        print(text, end="")
        return
    write_atomically(file, text)
    print(f"written        {file}")


def _train(request: LaunchRequest) -> str:
    return " ".join(word(one) for one in request.train_words())


_SLURM_HEALTH_CHECK = """
# A slow link or a missing rank is found in seconds here, in hours later. It stops the job.
"${srun[@]}" --kill-on-bad-exit=1 "${torchrun[@]}" --rdzv-id "$SLURM_JOB_ID-$attempt-doctor" \\
  --rdzv-endpoint "$head:$port" -m megabatch doctor
"""

# Where `python`, `head` and MEGABATCH_TOKEN_FILE are set. Nobody but its owner can read the file; it is made once.
_TOKEN = (
    '[ -s "$MEGABATCH_TOKEN_FILE" ] || '
    """(umask 077; "$python" -c 'import secrets; print(secrets.token_hex(32))' > "$MEGABATCH_TOKEN_FILE")"""
)
# The address by which other hosts reach this one: on many a host its own name stands for the loopback address.
_ADDRESS = """address=$(getent ahostsv4 "$head" | awk '$1 !~ /^127[.]/ {print $1}' | sed -n 1p)
[ -n "$address" ] || address=$(hostname -I | awk '{print $1}')"""

_SLURM_TORCHRUN = """# One launcher per node; it waits for its workers' checkpoint as long as the job has time.
torchrun=("$python" {torchrun}
  --nnodes "$SLURM_NNODES" --max-restarts 3 --rdzv-backend c10d)
echo "job $SLURM_JOB_ID, attempt $attempt, $SLURM_NNODES nodes, first $head, run folder $run"
{health}
"${{srun[@]}}" --kill-on-bad-exit=1 "${{torchrun[@]}}" --rdzv-id "$SLURM_JOB_ID-$attempt" \\
  --rdzv-endpoint "$head:$((port + 1))" -m megabatch {train} &"""

_SLURM_ELASTIC = """# Whoever has the token may join the run.
export MEGABATCH_TOKEN_FILE="$run.token"
{token}
{address}
echo "job $SLURM_JOB_ID, attempt $attempt, $SLURM_NNODES nodes, lighthouse $address:$port, run folder $run"
"$python" -m megabatch lighthouse --bind "$address:$port" --min-workers {min_workers} &
lighthouse=$!
trap 'kill "$lighthouse" 2>/dev/null || true' EXIT

# A node that is lost does not end the others; they finish its steps.
"${{srun[@]}}" --no-kill --kill-on-bad-exit=0 --wait=0 "$python" -m megabatch {train} "$address:$port" &"""

_SLURM = """#!/bin/bash
{directives}
# Written by `megabatch launch slurm`. Submit with: sbatch THIS_FILE
set -euo pipefail
{setup}
python={python}
run={output}
# A step does not take the job's cores over by itself.
srun=(srun --cpus-per-task="$SLURM_CPUS_PER_TASK"{srun})
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
attempt=${{SLURM_RESTART_COUNT:-0}}
mkdir -p "$(dirname "$run")"

{start}
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
elif [ "$code" -eq 143 ] || grep -q '"status": "stopped"' "$run/summary.json" 2>/dev/null; then
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

_SSH_ELASTIC = """#!/bin/bash
# Written by `megabatch launch ssh --elastic`. Run it where ssh reaches all hosts: bash THIS_FILE
set -euo pipefail
hosts=({hosts})
ssh=(ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15)
prepare={prepare}
lighthouse={lighthouse}
train={train}

# On the first host: the token, in a file of mode 600, and the address of the lighthouse.
address=$("${{ssh[@]}}" "${{hosts[0]}}" "$prepare" </dev/null)
[[ $address =~ ^[0-9.]+$ ]] || {{ echo "no address of ${{hosts[0]}} that other hosts reach: '$address'" >&2; exit 1; }}
pids=()
# A terminal (-tt) is gone with its ssh: what runs there gets SIGHUP.
"${{ssh[@]}}" -tt "${{hosts[0]}}" "$lighthouse $address:{port}" </dev/null &
lighthouse_pid=$!
trap 'kill "$lighthouse_pid" "${{pids[@]}}" 2>/dev/null || true' EXIT
trap 'kill "${{pids[@]}}" 2>/dev/null || true' INT TERM
for host in "${{hosts[@]}}"; do
  "${{ssh[@]}}" -tt "$host" "$train $address:{port}" </dev/null > >(sed -u "s/^/$host: /") 2>&1 &
  pids+=($!)
done
# A host that fails does not stop the others; the run is good when one of them ends well.
code=1
for index in "${{!pids[@]}}"; do
  if wait "${{pids[index]}}"; then code=0; else echo "${{hosts[index]}} ended with exit code $?"; fi
done
[ "$code" -eq 0 ] && echo "run folder" {output}
exit "$code"
"""
