"""The memory of a recipe counted before anything is paid for: a pass with fake tensors under torch's memory tracker.

Fake tensors have shapes and no memory, so the largest ghost batch takes seconds on any machine. Kernels of a device may
want workspace besides, and its allocator leaves gaps: both are left to the reserve that the verdict counts with.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from megabatch.config import Config
from megabatch.errors import ConfigError, MegabatchError, first_line
from megabatch.plan.memory import Memory, of_state, passes_of
from megabatch.train.components import DTYPES, build_network
from megabatch.train.feed import open_images

_CLASSES, _CHANNELS = 1000, 3  # where the images are not there yet


def count_memory(config: Config, world_size: int) -> Memory:
    """What a worker needs, one of `world_size`."""
    try:
        source, _ = open_images(config)
        classes, channels = source.num_classes, source.channels
    except MegabatchError:
        classes, channels = _CLASSES, _CHANNELS
    network = _fake_network(config, classes, channels)
    parameters = sum(p.numel() for p in network.parameters())
    fixed = sum(4 * p.numel() for p in network.parameters()) + sum(b.nbytes for b in network.buffers())
    peak = _peak_bytes(config, network, channels)
    state = of_state(config, parameters, passes_of(config, world_size), 0)
    return of_state(config, parameters, passes_of(config, world_size), peak - fixed - state.casts)


def device_memory() -> int:
    """Bytes of the device at hand; 0 without one."""
    return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else 0


def _fake_network(config: Config, classes: int, channels: int) -> nn.Module:
    """The network with tensors that have no memory."""
    meta = torch.device("meta")
    try:
        with meta:
            return build_network(config, classes, channels, meta)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"model '{config.model.name}' cannot be built without memory: {first_line(error)}") from error


def _peak_bytes(config: Config, network: nn.Module, channels: int) -> int:
    """Bytes at the largest moment of a forward and backward pass, without gradients that buckets hold already."""
    train, size, dtype = config.train, config.data.image_size, DTYPES[config.train.precision]
    with FakeTensorMode():
        for module in network.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    fake = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype)
                    module._parameters[name] = nn.Parameter(fake, p.requires_grad)
            for name, b in module._buffers.items():
                if b is not None:
                    module._buffers[name] = torch.empty_strided(b.shape, b.stride(), dtype=b.dtype)
        images = torch.zeros(train.ghost_batch_size, channels, size, size)
        if train.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.zeros(train.ghost_batch_size, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(network, images, labels)
        with tracker:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                logits = network(images)
            F.cross_entropy(logits.float(), labels).backward()
        parts = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    kinds = {str(kind).rpartition(".")[2]: value for kind, value in parts.items()}
    return int(kinds["Total"] - kinds["GRAD"])
