"""Builds the fake device and loads it. Import this before torch: torch looks up its CUDA hooks once, when it starts."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
_BUILD_SECONDS = 120.0


def build(compiler: str, torch_folder: Path) -> Path:
    """The compiled fake device, built once for this source, this user and this torch."""
    made_of = SOURCE.read_bytes() + str(torch_folder).encode() + (torch_folder / "version.py").read_bytes()
    folder = Path(tempfile.gettempdir()) / f"megabatch-fake-device-{hashlib.sha256(made_of).hexdigest()[:16]}"
    library = folder / "device.so"
    if library.exists():
        return library
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        fresh = Path(place) / library.name
        libraries = torch_folder / "lib"
        command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(SOURCE)]
        command += ["-o", str(fresh), f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
        subprocess.run(command, check=True, timeout=_BUILD_SECONDS)
        fresh.replace(library)
    return library


def load() -> None:
    """Make this process believe in a CUDA device."""
    assert "torch" not in sys.modules, "the fake device must be loaded before torch"
    compiler, torch = shutil.which("g++"), importlib.util.find_spec("torch")
    assert compiler is not None, "the fake device needs g++"
    assert torch is not None
    assert torch.origin is not None
    ctypes.CDLL(str(build(compiler, Path(torch.origin).parent)), mode=ctypes.RTLD_GLOBAL)
