"""A script that starts torchrun on a list of machines over ssh, watches all of them, and stops all when one fails.

The machines need this Python at the same path, key-based ssh, and the run folder on a shared disk. Nothing of the
caller's environment travels along.
"""

from __future__ import annotations

import re

from megabatch.errors import ConfigError
from megabatch.launch.request import LaunchRequest, torchrun_words, train_words, word

__all__ = ["ssh_script"]


def ssh_script(request: LaunchRequest, hosts: tuple[str, ...], port: int = 29500, directory: str = "") -> str:
    """The text of a bash script; the first host is the meeting point."""
    if len(hosts) != request.nodes or len(set(hosts)) != len(hosts):
        raise ConfigError(f"{len(hosts)} hosts ({', '.join(hosts)}) for {request.nodes} nodes; name each host once")
    for host in hosts:
        if not re.fullmatch(r"([A-Za-z_][-A-Za-z0-9_]*@)?[A-Za-z0-9][-A-Za-z0-9_.:]*", host):
            raise ConfigError(f"host '{host}' is no host name; give NAME or USER@NAME")
    first = hosts[0].rpartition("@")[2]
    train = " ".join(word(one) for one in train_words(request))
    torchrun = [
        *torchrun_words(request),
        "--nnodes",
        str(request.nodes),
        "--max-restarts",
        "3",
        "--rdzv-backend",
        "c10d",
    ]
    launcher = f"{word(request.python)} {' '.join(torchrun)}"
    change = f"cd {word(directory)} && " if directory else ""
    doctor = f"{change}{launcher} --rdzv-id doctor --rdzv-endpoint {first}:{port} -m megabatch doctor"
    run = f"{change}exec {launcher} --rdzv-id train --rdzv-endpoint {first}:{port + 1} -m megabatch {train}"
    return _TEMPLATE.format(
        hosts=" ".join(word(host) for host in hosts),
        doctor=word(doctor),
        run=word(run),
        health='everywhere "$doctor"' if request.health_check else ":",
        output=word(request.output),
    )


_TEMPLATE = """#!/bin/bash
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
