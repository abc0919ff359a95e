"""Plain values between ranks: they arrive whole, checked and bounded, and nothing is ever unpickled."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch.comm import messages
from megabatch.comm.messages import broadcast, broadcast_bytes, gather
from megabatch.errors import CommunicationError
from tests.ranks import run_ranks


def exchange(rank: int) -> list[Any]:
    names = gather("x" * rank * 1000, str)  # of different lengths, one of them empty
    numbers = gather([1.5 * rank, None], list[float | None])
    table = gather({"rank": rank, "text": "caf\u00e9 \0"}, dict[str, Any])
    return [
        [len(name) for name in names],
        numbers,
        [one["rank"] for one in table] + [table[0]["text"]],
        broadcast("from 0" if rank == 0 else "not looked at", str),
        broadcast_bytes(bytes(range(256)) * 300 if rank == 0 else None) == bytes(range(256)) * 300,
        broadcast_bytes(b"" if rank == 0 else None),
        broadcast_bytes(None),
    ]


def test_every_rank_gets_what_was_sent() -> None:
    expected = [
        [0, 1000, 2000],
        [[0.0, None], [1.5, None], [3.0, None]],
        [0, 1, 2, "caf\u00e9 \0"],
        *("from 0", True, b"", None),
    ]
    assert run_ranks(3, exchange) == [expected] * 3
    assert run_ranks(1, exchange)[0][3:] == ["from 0", True, b"", None]


def send_rubbish(rank: int) -> list[str]:
    """Rank 1 sends, in the way of `gather`, what `gather` would not; rank 0 says what it thinks of it."""
    said = []
    pickled = pickle.dumps(print)
    for content, claimed in ((b'["a"]', 5), (b"not json", 8), (b"[" * 5000, 5000), (pickled, len(pickled)), (b"", -3)):
        if rank == 1:
            sizes = torch.tensor([0, claimed])
            dist.all_reduce(sizes)
            if claimed < 0:
                continue
            padded = torch.zeros(max(sizes.tolist()), dtype=torch.uint8)
            padded[:claimed] = torch.tensor(list(content), dtype=torch.uint8)
            dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)
        else:
            with pytest.raises(CommunicationError) as refused:
                gather("a", str)
            said.append(str(refused.value))
    return said


def test_what_is_of_another_type_or_no_json_is_refused_and_named() -> None:
    said = run_ranks(2, send_rubbish)[0]
    assert len(said) == 5
    assert all(line.startswith("rank 1 ") and "\n" not in line and "same version" in line for line in said)
    assert "wants to send -3 bytes" in said[-1]


def send_too_much(rank: int) -> str:
    messages._MAX_JSON_BYTES = 100
    with pytest.raises(CommunicationError) as refused:
        gather("x" * 200 * rank, str)
    with pytest.raises(CommunicationError, match="rank 0 wants to send 9 bytes, at most 8"):
        broadcast_bytes(b"123456789" if rank == 0 else None, 8)
    return str(refused.value)


def test_too_much_is_refused_on_every_rank() -> None:
    said = run_ranks(2, send_too_much)
    assert said[0] == said[1]
    assert "rank 1 wants to send 202 bytes, at most 100" in said[0]
