"""Runs an example of `megabatch.integrations` under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.system.runs import REPOSITORY


def losses_of_example(name: str, *options: str) -> list[float]:
    """The losses that the example prints, on two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, f"examples/{name}", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
