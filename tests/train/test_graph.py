"""Passes held by graphs, with a tape in the place of a CUDA graph: operations are recorded once and played again.

As with a real graph nothing of the host is played: no Python, no branch, no number that was not in a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megabatch
from megabatch.comm import exact
from megabatch.comm.hook import GradientHook
from megabatch.errors import ConfigError
from megabatch.train import components as components_module
from megabatch.train import entry
from megabatch.train import graph as graph_module
from megabatch.train import trainer as trainer_module
from megabatch.train.buckets import Bucketed
from megabatch.train.components import Components, build_components
from megabatch.train.graph import PassGraphs, check_can_capture, kinds_of
from tests.system.runs import rows_of, small_config

pytestmark = pytest.mark.filterwarnings("ignore:Grad strides do not match")  # of images with one channel


class Tape(TorchDispatchMode):
    """Records operations with the tensors they get and make. What they write into is put back at the end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            for tensor in given:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._made and storage._cdata not in self._before:
                    self._before[storage._cdata] = storage, storage.clone()
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        shared = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in shared]
        self._made |= {tensor.untyped_storage()._cdata for tensor in fresh}
        self._operations.append((func, args, kwargs, made if fresh else []))
        return result

    def capture(self, action: Callable[[], Tensor]) -> Tensor:
        with self:
            result = action()
        for storage, before in self._before.values():
            storage.copy_(before)
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, made in self._operations:
                again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for old, new in zip(made, again, strict=bool(made)):
                    old.copy_(new)


@contextmanager
def graphs_on_the_host(monkeypatch: pytest.MonkeyPatch, use: bool, tapes: list[Tape]) -> Iterator[None]:
    """Runs with buckets, and without compiled helper and threads, as on a device; with graphs if wanted."""

    def build(*args: Any, **options: Any) -> Components:
        components = build_components(*args, **options)
        plain = components.ddp
        components.ddp = nn.parallel.DistributedDataParallel(
            Bucketed(components.network), gradient_as_bucket_view=True, bucket_cap_mb=0.02
        )
        components.ddp.register_comm_hook(None, components.exposed.hook)
        del plain
        if use:
            components.graphs = PassGraphs(list(components.network.parameters()), torch.device("cpu"), make_tape)
        return components

    def make_tape() -> Tape:
        tapes.append(Tape())
        return tapes[-1]

    def at_once(self: GradientHook, work: Callable[[], None], buffer: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        work()
        future.set_result(buffer)
        return future

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "build_components", build)
        patch.setattr(components_module, "build_components", build)
        patch.setattr(GradientHook, "_in_thread", at_once)
        patch.setattr(exact, "_helper", lambda: None)
        patch.setattr(graph_module, "EAGER_STEPS", 4)
        yield


CASES = {
    "exact sums": (),
    "floats": ("comm.sums=float",),
    "one ghost a step": ("train.global_batch_size=8",),
    "stages in bf16": ("train.global_batch_size=0:16 0.6:40 1:8", "train.precision=bf16"),
    "audits": ("train.audit_every_steps=7",),
    "noise scale": ("batch_control.measure_every_steps=5",),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_graphs_has_the_bits_of_one_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config("train.max_steps=14", "optimizer.lr_factor=0.3", *CASES[name])
    losses, tapes = [], list[Tape]()
    for use in (False, True):
        folder = tmp_path / str(use)
        with graphs_on_the_host(monkeypatch, use, tapes):
            megabatch.train(config, output=folder)
        losses.append([(row["loss"], row["top1"], row["gradient_norm"]) for row in rows_of(folder)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 14
    assert 0 < len(tapes) <= 4


def test_a_number_of_the_host_in_a_pass_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    config = small_config("train.max_steps=14")
    right, losses = torch.nn.functional.cross_entropy, []
    for use in (False, True):
        calls = count()

        def uneven(*args: Any, calls: Iterator[int] = calls, **kwargs: Any) -> Tensor:
            return right(*args, **kwargs) * (1.0 + 0.01 * (next(calls) % 5))

        with graphs_on_the_host(monkeypatch, use, []), monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "cross_entropy", uneven)
            megabatch.train(config, output=tmp_path / str(use))
        losses.append([row["loss"] for row in rows_of(tmp_path / str(use))])
    assert losses[0] != losses[1]


def test_graphs_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cuda_graph is for CUDA devices, this worker computes on cpu"):
        megabatch.train(small_config("train.cuda_graph=true"), output=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"train\.compile and train\.cuda_graph"):
        small_config("train.cuda_graph=true", "train.compile=true")
    check_can_capture(torch.device("cuda"), 1)


def test_a_step_with_a_new_kind_of_pass_is_made_without_graphs_three_times() -> None:
    """A batch that grows later brings passes that have never run. A step runs by graphs as a whole or not at all."""
    graphs = PassGraphs([], torch.device("cpu"))
    small, large = torch.Size([8, 16, 16, 3]), torch.Size([8, 32, 32, 3])

    def taken(*steps: tuple[int, torch.Size, bool]) -> list[bool]:
        return [graphs.take_step(kinds_of(*step)) for step in steps]

    one, two, three = ((count, small, False) for count in (1, 2, 3))
    assert taken(*[one] * 14) == [False] * 12 + [True] * 2
    assert taken(*[two] * 4) == [False] * 3 + [True]
    assert taken(three, one, three, two, three, three) == [False, True, False, True, False, True]
    assert taken(*[(3, large, False)] * 4) == [False] * 3 + [True]
    assert taken(*[(1, small, True)] * 4) == [False] * 3 + [True]  # an idle rank
    assert not graphs.take_step(kinds_of(*one), is_watched=True)


@dataclass
class Streams:
    """Stands in for the streams of a device: which one is the present one, and who waits for whom."""

    present: str = "the caller's"
    waits: list[tuple[str, str]] = field(default_factory=list)

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.waits.append((name, other.name)))

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.present = self.present, stream.name
        try:
            yield
        finally:
            self.present = before

    def set(self, stream: SimpleNamespace) -> None:
        self.present = stream.name


@pytest.mark.parametrize("fails", [False, True])
def test_training_with_graphs_leaves_its_caller_on_the_stream_of_before(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, on = Streams(), list[str]()

    def train(*_: object, **__: object) -> SimpleNamespace:
        on.append(streams.present)
        if fails:
            raise ConfigError("no")
        return SimpleNamespace(run=dict)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams.stream(streams.present))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: streams.stream("own"))
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.set)
    monkeypatch.setattr(entry, "choose_device", lambda *_: (torch.device("cuda", 0), "gloo"))
    monkeypatch.setattr(components_module, "choose_kernels", lambda *_: None)
    monkeypatch.setattr(trainer_module, "Trainer", train)
    with pytest.raises(ConfigError) if fails else nullcontext():
        megabatch.train(small_config("train.cuda_graph=true"), output=tmp_path / "run")
    assert on == ["own"]
    assert streams.present == "the caller's"
    assert streams.waits == [("own", "the caller's"), *([] if fails else [("the caller's", "own")])]


def test_what_cannot_be_captured_is_told_in_one_line() -> None:
    def refuse(self: Any, action: Any) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    graphs = PassGraphs([], torch.device("cpu"), type("Refusing", (), {"capture": refuse}))
    kind = graph_module.PassKind(torch.Size([1]), True, True, False)
    with pytest.raises(
        ConfigError, match=r"cannot be captured.*not permitted.*set\s+train\.cuda_graph=false"
    ) as caught:
        graphs.run(kind, torch.ones(1), torch.ones(1), 1.0, lambda *_: torch.ones(2))
    assert "\n" not in str(caught.value)
