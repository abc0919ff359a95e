"""What a person is shown of recipes: nothing cut off, nothing taken for markup."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from megabatch.errors import ConfigError
from megabatch.recipes import load_config, recipe_names, recipe_path
from megabatch.recipes.show import derived_numbers, print_recipe, print_recipes
from megabatch.schedule.batch import parse_stages


def plain_console(width: int = 300) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, highlight=False, soft_wrap=True), out


def test_the_list_has_a_row_for_every_recipe_with_its_claims() -> None:
    console, out = plain_console()
    print_recipes(console)
    header, *rows = out.getvalue().splitlines()
    assert header.split() == ["recipe", "global", "batch", "epochs", "time", "accuracy", "hardware"]
    assert [row.split()[0] for row in rows] == recipe_names()
    for name, row in zip(recipe_names(), rows, strict=True):
        config = load_config(name)
        for text in (
            config.reference.time,
            config.reference.accuracy,
            config.reference.hardware,
            *(f"{total:,}" for total in parse_stages(config.train.global_batch_size).global_batch_sizes),
        ):
            assert text in row


def test_a_narrow_terminal_folds_the_words_and_loses_none() -> None:
    console, out = plain_console(width=64)
    print_recipes(console)
    assert "".join(load_config("demo").reference.hardware.split()) in _column(out.getvalue(), "hardware")


def test_no_name_is_cut_or_folded_on_a_usual_terminal() -> None:
    console, out = plain_console(width=80)
    print_recipes(console)
    shown = [line.split()[0] for line in out.getvalue().splitlines() if line and not line.startswith(" ")]
    assert shown[1:] == recipe_names()


def test_the_numbers_of_a_published_run() -> None:
    steps, batch = derived_numbers(load_config("akiba2017"))
    assert steps == "3,519 steps in 90 epochs of 1,281,167 images"
    assert batch == (
        "from epoch 0: 32,768 images a step = 1,024 ghost batches of 32, 1 on each of 1,024 workers; 2.56% of the set"
    )


def test_a_recipe_built_on_another_says_so() -> None:
    console, out = plain_console()
    print_recipe("akiba2017", console)
    assert "built on   goyal2017: what is not set below is as there\n" in out.getvalue()


def _column(text: str, name: str) -> str:
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if name in line)
    begin, rows = lines[at].index(name), lines[at + 1 :]
    return "".join("".join(row[begin:].split()) for row in rows)


def test_one_recipe_shows_its_reference_its_unknowns_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[reference]\npaper = "a [bold]paper[/]"\nhardware = "h"\ntime = "t"\naccuracy = "a"\n'
        'unknown = ["the rate [red]", "the weather"]\n[train]\nepochs = 3  # a comment stays\n',
        encoding="utf-8",
    )
    console, out = plain_console()
    print_recipe(str(path), console)
    text = out.getvalue()
    assert "paper      a [bold]paper[/]\n" in text
    assert "unknown    the rate [red]\nunknown    the weather\n" in text
    assert "numbers    from epoch 0: 256 images a step = 8 ghost batches of 32\n" in text
    assert "command" not in text.split("\n\n")[0]
    assert text.rstrip("\n").endswith(path.read_text(encoding="utf-8").rstrip("\n"))


def test_by_default_it_goes_to_stdout_unwrapped(capsys: pytest.CaptureFixture[str]) -> None:
    print_recipe("demo")
    shown = capsys.readouterr().out
    assert recipe_path("demo").read_text(encoding="utf-8").strip() in shown
    assert f"command    {load_config('demo').reference.command}\n" in shown


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown recipe 'nope'"):
        print_recipe("nope")
