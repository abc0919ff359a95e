"""What surrounds the steps, on the fake device: evaluation, checkpoints, and a loop that is not the trainer's."""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch.schedule.clock import Clock
from megabatch.train import evaluate as evaluate_module
from megabatch.train.branch import copied
from megabatch.train.components import Components, no_buffer_sync
from megabatch.train.evaluate import evaluate
from megabatch.train.state import RunState, take_state, whole_state
from tests.accelerator.fake_cuda import CUDA, steady
from tests.accelerator.watch import Notes, Watch, fresh_notes

OPTIMIZERS = sys.modules[torch.optim.Optimizer.__module__]


def evaluation(components: Components, watch: Watch) -> Notes:
    """All passes. Counts that are read would not add up."""
    with fresh_notes(watch) as notes, patch.object(evaluate_module, "_evaluation"):
        evaluate([components.network], components.val_source, components.config, components.normalise)
    return notes


def statistics_without_batches(components: Components, watch: Watch) -> Notes:
    """Statistics of the weights as they are, on a rank that has no batch: it talks with the others all the same."""
    with fresh_notes(watch) as notes:
        megabatch.exact_statistics(components.network, [])
    return notes


def checkpoint(components: Components, watch: Watch) -> Notes:
    """The state of a run copied for the writer, and loaded again; fake tensors cannot be copied deeply."""
    state = RunState(Clock(100, 1000))
    with fresh_notes(watch) as notes, patch.object(OPTIMIZERS, "deepcopy", lambda value: value):
        saved = copied(whole_state(components, state))
        take_state(components, state, saved)
    assert all(parameter.is_cuda for parameter in components.network.parameters())
    assert all(value.is_cuda for one in components.optimizer.state.values() for value in one.values())
    return notes


def own_loop(components: Components, watch: Watch) -> Notes:
    """A stranger's loop: the hook over a grid, LARS, statistics of ghost batches and the noise scale."""
    model = components.network
    ddp = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True, **no_buffer_sync())
    steady(ddp)
    with megabatch.ProcessGrid.build("2x4") as grid:
        state, hook = megabatch.gradient_hook(grid, "torus")
        noise = megabatch.NoiseScale(ddp.parameters())
        ddp.register_comm_hook(None, noise.hook(state, hook))
        optimizer = megabatch.LARS(megabatch.parameter_groups(model), lr=0.1, weight_decay=1e-4)
        statistics = megabatch.GhostStatistics(model, momentum=0.1)
        size, channels = components.config.data.image_size, components.train_source.channels
        images = torch.zeros(16, channels, size, size, device=CUDA)
        labels = torch.zeros(16, dtype=torch.int64, device=CUDA)
        for _ in range(4):
            with fresh_notes(watch) as notes:
                optimizer.zero_grad()
                noise.begin_step()
                with statistics.ghost(), torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = F.cross_entropy(ddp(images), labels)
                loss.backward()
                noise.after_backward(16, 1 / 8)
                noise.end_step()
                optimizer.step()
                statistics.after_step()
        state.close()
    return notes
