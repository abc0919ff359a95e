"""One compute thread for every test: several processes on few cores make each other slow otherwise."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
