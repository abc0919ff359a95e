"""The phases of a run: one trunk, and side branches that collapse it (Codreanu 2017, "final collapse").

    trunk     0 ------- 37 ------- 52 ------- 67
                        |          |          |
    branches            1 --- 42   2 --- 57   3 --- 72      each starts from the trunk's weights; the trunk goes on from
                                                            where the branch left it, not from where the branch ended

The trunk is cut where a branch leaves it and where its momentum is reset. A cut lies between steps: before the first
step that starts at or after its epoch, so branches change nothing about the trunk's own steps. A branch has a clock
of its own that starts at 0, and images in an order of its own (`branch_seed`): each image once per epoch of the
branch, whatever part of an epoch the trunk had seen.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["Phase", "branch_seed", "plan_phases"]


@dataclass(frozen=True)
class Phase:
    """A stretch of the trunk, or a branch."""

    number: int  # place in the list of phases
    member: int  # the branch's number from 1 on; 0 on the trunk
    until_epoch: float  # of the trunk's clock, or of the branch's own
    reset_momentum: bool  # when it begins

    @property
    def is_branch(self) -> bool:
        return self.member > 0

    @property
    def name(self) -> str:
        return f"collapse-{self.member}" if self.member else "trunk"


def plan_phases(
    total_epochs: float,
    collapse_at_epochs: tuple[float, ...] = (),
    collapse_epochs: float = 0.0,
    reset_at_epochs: tuple[float, ...] = (),
    collapse_resets_momentum: bool = True,
) -> tuple[Phase, ...]:
    """The phases in the order in which they are run; epochs must lie in (0, total_epochs] and rise."""
    phases: list[Phase] = []
    reset = False
    # A recipe stretched over other epochs may end a rounding error away from its last branch.
    collapse_at_epochs = tuple(min(epoch, total_epochs) for epoch in collapse_at_epochs)
    for epoch in sorted({*collapse_at_epochs, *reset_at_epochs, total_epochs}):
        phases.append(Phase(len(phases), 0, epoch, reset))
        if epoch in collapse_at_epochs:
            member = 1 + collapse_at_epochs.index(epoch)
            phases.append(Phase(len(phases), member, collapse_epochs, collapse_resets_momentum))
        reset = epoch in reset_at_epochs
    return tuple(phases)


def branch_seed(seed: int, member: int) -> int:
    """The key of a phase's sample order, augmentation and dropout: the run's own seed on the trunk (member 0)."""
    if member == 0:
        return seed
    digest = hashlib.sha256(f"megabatch branch {member} of seed {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
