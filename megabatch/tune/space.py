"""What is searched: settings that a recipe leaves open, each with a range.

`default_space` is a pure function of the recipe. A recipe leaves open what it gives as a plain number; what it gives
as a schedule is part of its method and stays, except for the level of the learning rate and the length of its warm-up:

    optimizer.lr_factor                 level of the lr. For SGD the range reaches from a quarter of what square-root
                                        scaling of 0.1 per 256 images gives to four times what linear scaling gives, and
                                        a factor of 4 around the recipe's own at least. For others a factor of 8.
    warmup_epochs                       0 to twice the recipe's, at least a tenth of the run
    optimizer.weight_decay              a factor of 10 either way; 1e-6 to 1e-3 when the recipe has none
    optimizer.momentum                  0.8 to 0.98
    train.label_smoothing               0 to 0.2
    optimizer.lars.trust_coefficient    a factor of 10 either way

`warmup_epochs` is no setting of its own: it is where the first, rising piece of `optimizer.lr` ends (`with_warmup`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megabatch.config import Config
from megabatch.errors import ConfigError
from megabatch.recipes.validate import apply_override, validate
from megabatch.schedule.batch import parse_stages
from megabatch.schedule.pieces import Piece, largest_value, value_at

LEVEL = "optimizer.lr_factor"
WARMUP = "warmup_epochs"
_NOT_SEARCHED = ("train.epochs", "train.seed", "train.max_steps", "data.", "reference.", "checkpoint.", "log.")
_BASE_LR, _BASE_BATCH = 0.1, 256  # Goyal 2017, section 2.1
_WIDEST = 64  # factor from the recipe's own level to an end of the range
_PLAIN_MOMENTUM = 0.9  # what that lr goes with


@dataclass(frozen=True)
class Dimension:
    """One setting and its range; `log`: equal factors are equally likely."""

    key: str
    low: float
    high: float
    log: bool = False
    whole: bool = False  # whole numbers only

    @property
    def text(self) -> str:
        """As `--search` reads it."""
        return f"{self.key}={self.low:g}:{self.high:g}{':log' if self.log else ''}"


def default_space(config: Config) -> tuple[Dimension, ...]:
    """The settings that the recipe leaves open, with ranges by optimizer and batch."""
    optimizer = config.optimizer
    low, high = _levels(config)
    found = [Dimension(LEVEL, low, high, log=True)] if low > 0 else []
    if warmup := _warmup_limit(config):
        found.append(Dimension(WARMUP, 0.0, warmup))
    if not isinstance(optimizer.weight_decay, tuple):
        decay = optimizer.weight_decay
        ends = (decay / 10, decay * 10) if decay else (1e-6, 1e-3)
        found.append(Dimension("optimizer.weight_decay", *ends, log=True))
    if not isinstance(optimizer.momentum, tuple) and optimizer.momentum > 0:
        ends = min(0.8, optimizer.momentum), max(0.98, optimizer.momentum)
        found.append(Dimension("optimizer.momentum", *ends))
    found.append(Dimension("train.label_smoothing", 0.0, max(0.2, config.train.label_smoothing)))
    if optimizer.name == "lars":
        own = optimizer.lars.trust_coefficient
        found.append(Dimension("optimizer.lars.trust_coefficient", own / 10, own * 10, log=True))
    return tuple(found)


def _levels(config: Config) -> tuple[float, float]:
    """The range of `optimizer.lr_factor`; zeros when the recipe's lr is 0 all along."""
    optimizer, own = config.optimizer, config.optimizer.lr_factor
    peak = largest_value(optimizer.lr)
    if not peak or not own:
        return 0.0, 0.0
    if optimizer.name != "sgd":
        return own / 8, own * 8
    # A step of momentum m is worth 1 / (1 - m) of its lr in the long run: the same lr means more with more momentum.
    share = (1 - value_at(optimizer.momentum, config.train.epochs / 2)) / (1 - _PLAIN_MOMENTUM)
    ratio = parse_stages(config.train.global_batch_size).global_batch_sizes[0] / _BASE_BATCH
    by_rule = [_BASE_LR * share * scaled / peak for scaled in (math.sqrt(ratio), ratio)]
    return max(min(own, *by_rule) / 4, own / _WIDEST), min(max(own, *by_rule) * 4, own * _WIDEST)


def warmup_of(config: Config) -> float:
    """Where the recipe's warm-up ends, in epochs: the end of a first piece that rises; 0 when there is none."""
    lr = config.optimizer.lr
    return lr[0].until_epoch if isinstance(lr, tuple) and _rises(lr) else 0.0


def _rises(lr: Sequence[Piece]) -> bool:
    return len(lr) > 1 and lr[0].shape == "linear" and lr[0].end is not None and lr[0].end > lr[0].start


def _warmup_limit(config: Config) -> float:
    """The longest warm-up: what follows must have room."""
    lr, own = config.optimizer.lr, warmup_of(config)
    if not isinstance(lr, tuple):
        return 0.0 if config.optimizer.name == "rmsprop_warmup" else 0.1 * config.train.epochs
    following = lr[1].until_epoch if own else lr[0].until_epoch
    if config.optimizer.name == "rmsprop_warmup" and not own:
        return 0.0  # it is a warm-up by itself
    return min(max(2 * own, 0.1 * config.train.epochs), 0.8 * following)


def with_warmup(lr: float | Sequence[Piece], epochs: float, total_epochs: float) -> float | tuple[Piece, ...]:
    """The schedule with a linear warm-up of another length; 0 takes it away.

    A piece that begins where the warm-up ends begins earlier or later with it. Where there was no warm-up, one is laid
    over the beginning, and what it covers is left out: the rest keeps its values.
    """
    if not isinstance(lr, Sequence):
        return with_warmup([Piece(until_epoch=total_epochs, start=lr)], epochs, total_epochs) if epochs else lr
    if _rises(lr):
        first, second, *others = lr
        rest = [second, *others]
        if not epochs:
            return tuple(rest)
        if second.from_epoch is not None:
            second = second.model_copy(update={"from_epoch": min(second.from_epoch, epochs)})
        return (first.model_copy(update={"until_epoch": epochs}), second, *others)
    if not epochs:
        return tuple(lr)
    warm = Piece(until_epoch=epochs, shape="linear", start=0.0, end=value_at(lr, epochs))
    begins = [0.0, *(piece.until_epoch for piece in lr)]
    left = [
        piece if piece.from_epoch is not None or begin >= epochs else piece.model_copy(update={"from_epoch": begin})
        for begin, piece in zip(begins, lr, strict=False)
        if piece.until_epoch > epochs
    ]
    return (warm, *left)


def own_values(config: Config, space: Sequence[Dimension]) -> dict[str, float]:
    """The recipe's own values, each moved into its range."""
    table, own = config.model_dump(mode="json"), {}
    for one in space:
        value = warmup_of(config) if one.key == WARMUP else float(_lookup(table, one.key))
        own[one.key] = min(max(value, one.low), one.high)
    return own


def with_values(config: Config, values: Mapping[str, float]) -> Config:
    """The recipe with other values of what is searched.

    Raises:
        ConfigError: a value that the settings do not take.
    """
    source = "the recipe with values from the search"
    table = config.model_dump(mode="json", exclude_none=True)
    for key, value in values.items():
        if key != WARMUP:
            apply_override(table, f"{key}={value!r}")
    if WARMUP in values:  # last: it leads up to the rate that the other values say
        found = validate(table, source=source)
        lr = with_warmup(found.optimizer.lr, values[WARMUP], found.train.epochs)
        dumped = [one.model_dump(mode="json", exclude_none=True) for one in lr] if isinstance(lr, tuple) else lr
        table["optimizer"]["lr"] = dumped
    return validate(table, source=source)


def parse_search(text: str, config: Config) -> Dimension:
    """Read `key=low:high` or `key=low:high:log`, and check that the recipe takes both ends; `key`: its default range.

    Raises:
        ConfigError: in one line.
    """
    key, equals, ends = (part.strip() for part in text.partition("="))
    if not equals and (known := next((one for one in default_space(config) if one.key == key), None)):
        return known
    words = ends.split(":")
    try:
        low, high = float(words[0]), float(words[1])
    except (ValueError, IndexError):
        low = high = math.nan
    is_log = words[2:] == ["log"]
    if not equals or not (math.isfinite(low) and math.isfinite(high)) or (words[2:] and not is_log):
        raise ConfigError(
            f"--search '{text}' cannot be read; write key=low:high or key=low:high:log, {LEVEL}=0.1:10:log, or a "
            f"key with a default range: {', '.join(one.key for one in default_space(config))}"
        )
    if not low < high or (is_log and low <= 0):
        raise ConfigError(f"--search '{text}' is no rising range{' above 0' if is_log else ''}; give low < high")
    if key != WARMUP and any(key == one or (one[-1] == "." and key.startswith(one)) for one in _NOT_SEARCHED):
        raise ConfigError(f"--search {key}: trials would not be comparable; search another setting")
    value = 0.0 if key == WARMUP else _lookup(config.model_dump(mode="json"), key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"--search {key}: the recipe has no plain number there (it has {_short(value)}); name a number, "
            f"such as {LEVEL}, {WARMUP}, optimizer.weight_decay or train.label_smoothing"
        )
    whole = isinstance(value, int)
    for end in (low, high):
        with_values(config, {key: int(end) if whole else end})
    return Dimension(key, low, high, is_log, whole)


def _lookup(table: Any, key: str) -> Any:
    for name in key.split("."):
        if isinstance(table, list) and name.isdecimal() and int(name) < len(table):
            table = table[int(name)]
        elif isinstance(table, dict):
            table = table.get(name)
        else:
            return None
    return table


def _short(value: Any) -> str:
    return "nothing" if value is None else "a schedule" if isinstance(value, list) else repr(value)[:40]
