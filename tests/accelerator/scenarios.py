"""What is run on the fake device: every kind of step that a recipe can ask for, by the settings that make it so."""

from __future__ import annotations

from dataclasses import dataclass

GHOST = 16


@dataclass(frozen=True)
class Scenario:
    """Some steps of a recipe on rank 0 of `ranks`. ghosts: of each rank and step. bug: one that is seeded, see `bugs`.

    stages: how many times as large the global batch is, step by step. The last step is looked at: nothing is made there
    for the first time. idle: others have all ghost batches, and this rank goes along.
    """

    recipe: str = "demo"
    settings: tuple[str, ...] = ()
    ranks: int = 1
    ghosts: int = 1
    kind: str = "step"
    bug: str = ""
    stages: tuple[int, ...] = (1, 1, 1)
    idle: bool = False
    eager_steps: int = 12  # before passes are captured, with train.cuda_graph, and one of each kind


FLOAT, EXACT = "comm.sums=float", "comm.sums=exact"
NOISE = ("batch_control.measure_every_steps=1",)
ALGORITHMS = ("backend", "ring", "halving_doubling", "hierarchical", "torus", "direct", "exchange")

# Nothing but the late read of the step before may be waited for in these.
LATE: dict[str, Scenario] = {
    "sgd": Scenario(settings=(FLOAT,)),
    "sgd on 8 ranks": Scenario(settings=(FLOAT,), ranks=8),
    "sgd in fp16": Scenario(settings=(FLOAT, "train.precision=fp16"), ranks=8),
    "sgd in bf16": Scenario(settings=(FLOAT, "train.precision=bf16"), ranks=8),
    "clipping": Scenario(settings=(FLOAT, "optimizer.clip_norm=1.0"), ranks=8),
    "lars in fp16": Scenario(settings=(FLOAT, "optimizer.name=lars", "train.precision=fp16"), ranks=8),
    "rmsprop warm-up": Scenario(settings=(FLOAT, "optimizer.name=rmsprop_warmup", "optimizer.nesterov=false"), ranks=8),
    "adamw": Scenario(settings=(FLOAT, "optimizer.name=adamw", "optimizer.nesterov=false"), ranks=8),
    "accumulation": Scenario(settings=(FLOAT,), ranks=8, ghosts=3),
    "noise scale": Scenario(settings=(FLOAT, *NOISE, "train.precision=fp16"), ranks=8, ghosts=2),
    "an idle rank": Scenario(settings=(FLOAT,), ranks=8, idle=True),
    "batch stages": Scenario(settings=(FLOAT,), ranks=8, stages=(1, 2, 3)),
    "gradients in fp16": Scenario(settings=("comm.grad_dtype=fp16",), ranks=8),
    **{
        f"{algorithm} on 8 ranks": Scenario(settings=(FLOAT, f"comm.algorithm={algorithm}"), ranks=8)
        for algorithm in ALGORITHMS
    },
    "ResNet-50, lars, fp16": Scenario("mikami2018", ranks=8),
    "ResNet-50, sgd": Scenario("goyal2017", (FLOAT,), ranks=8),
    "exact sums": Scenario(settings=(EXACT,), ranks=8),
    "exact sums alone": Scenario(settings=(EXACT,)),
    "exact sums in fp16, accumulated": Scenario(settings=(EXACT, "train.precision=fp16"), ranks=8, ghosts=3),
    "exact sums, noise scale": Scenario(settings=(EXACT, *NOISE), ranks=8, ghosts=2),
    "exact sums, an idle rank": Scenario(settings=(EXACT,), ranks=8, idle=True),
    "exact sums, batch stages": Scenario(settings=(EXACT,), ranks=8, stages=(1, 2, 3)),
    "ResNet-50, lars, exact sums": Scenario("mikami2018", (EXACT, "comm.grad_dtype=fp32"), ranks=8),
    "ResNet-50, sgd, exact sums": Scenario("goyal2017", (EXACT, "comm.grad_dtype=fp32"), ranks=8),
    "ResNet-50, rmsprop warm-up, exact sums": Scenario("akiba2017", (EXACT, "comm.grad_dtype=fp32"), ranks=8),
    "lamb": Scenario(settings=(EXACT, "optimizer.name=lamb", "optimizer.nesterov=false"), ranks=8),
    "averaged weights": Scenario(settings=(EXACT, "model.ema_half_life_epochs=1"), ranks=8),
    "foreign and capturable": Scenario(
        settings=(
            *(FLOAT, "optimizer.name=torch.optim:RMSprop", "optimizer.nesterov=false"),
            *("optimizer.settings.capturable=true", "optimizer.settings.foreach=true"),
        ),
        ranks=8,
    ),
}

# The host must know before it goes on whether to make the step, or what became of an audit.
AT_ONCE: dict[str, Scenario] = {
    "foreign": Scenario(settings=(FLOAT, "optimizer.name=torch.optim:RMSprop", "optimizer.nesterov=false"), ranks=8),
}

GRAPH = "train.cuda_graph=true"
GRAPHS: dict[str, Scenario] = {
    "graph": Scenario(settings=(FLOAT, GRAPH), ranks=8, eager_steps=1),
    "graph, accumulated": Scenario(settings=(FLOAT, GRAPH, "train.precision=fp16"), ranks=8, ghosts=4, eager_steps=1),
    "graph, exact sums": Scenario(settings=(EXACT, GRAPH), ranks=8, ghosts=3, eager_steps=2),
    "graph, ResNet-50, exact sums, batch stages": Scenario(
        "mikami2018", (EXACT, "comm.grad_dtype=fp32", GRAPH), ranks=8, stages=(1, 1, 3, 3, 3), eager_steps=1
    ),
    "graph, ResNet-50, lars, fp16": Scenario("mikami2018", (GRAPH,), ranks=8, eager_steps=1),
}

OTHERS: dict[str, Scenario] = {
    "a loop of one's own": Scenario(kind="own loop", ranks=8),
    "evaluation": Scenario(settings=(FLOAT,), kind="evaluation"),
    "statistics of no batch": Scenario(settings=(FLOAT,), kind="statistics", ranks=8),
    "checkpoint": Scenario(settings=(FLOAT,), kind="checkpoint", ranks=8),
}

BUGS: dict[str, Scenario] = {
    bug: Scenario(settings=(FLOAT, "optimizer.name=lars"), ranks=8, bug=bug)
    for bug in ("float in lars", "labels on the host", "a copy that blocks", "a number of the host in a stack")
} | {"a stream that does not wait": Scenario(settings=(FLOAT,), ranks=8, bug="a stream that does not wait")}
GRAPH_BUGS: dict[str, Scenario] = {
    bug: Scenario(settings=(FLOAT, GRAPH), ranks=8, eager_steps=1, bug=bug)
    for bug in ("a seed in the pass", "an upload in the pass")
}

SCENARIOS = {**LATE, **GRAPHS, **AT_ONCE, **OTHERS, **BUGS, **GRAPH_BUGS}
