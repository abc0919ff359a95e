"""What the machine at hand offers to this process: its cores, and its compiler for the C helpers of the package.

A helper is compiled when it is first wanted (about a second, a C compiler is all it needs) and cached in the user's
cache folder under the hash of its source, so that installing needs no compiler and a new version builds it anew.
`MEGABATCH_NATIVE=0` turns all helpers off. Everything works without them, to the same bits.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from megabatch.files import default_cache, lock, write_atomically

# Contracting a * b + c into one rounding would change results in the last bit.
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off")
_LIBRARIES = ("-lm", "-lpthread", "-ldl")
_BUILD_SECONDS = 120.0


def host_name() -> str:
    """Name of this host; `MEGABATCH_HOST` overrides it where hosts share a name, as network namespaces do."""
    return os.environ.get("MEGABATCH_HOST") or socket.gethostname()


def usable_cores(shared_by: int = 1) -> int:
    """Cores that this process may run on: those of its affinity mask where the system has one, else all.

    shared_by: processes that share them; each gets at least one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // shared_by)


def processor_name() -> str:
    """The kind of processor as the system names it; where it does not, the kind of machine."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def build(source: Path) -> Path:
    """The compiled helper, built in the cache unless this very source has been built there; OSError says why not."""
    if os.environ.get("MEGABATCH_NATIVE", "1") == "0":
        raise OSError("MEGABATCH_NATIVE is 0")
    if sys.maxsize < 2**32 or sys.byteorder != "little":
        raise OSError("the helper is for little-endian 64-bit machines")
    folder = default_cache() / "native"
    made_of = source.read_bytes() + " ".join(_FLAGS).encode() + platform.machine().encode()
    helper = folder / f"{source.stem}-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if helper.exists():
        return helper
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc, clang) was found")
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "lock", _BUILD_SECONDS):
        if not helper.exists():
            _compile(compiler, source, helper)
    return helper


def _compile(compiler: str, source: Path, helper: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        fresh = Path(place) / helper.name
        command = [compiler, *_FLAGS, "-o", str(fresh), str(source), *_LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
        if done.returncode != 0:
            raise OSError(f"{compiler} could not compile {source.name}: {' '.join(done.stderr.split())[:300]}")
        write_atomically(helper, fresh.read_bytes())
