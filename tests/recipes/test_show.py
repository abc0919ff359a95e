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


def test_the_list_has_one_line_per_recipe_within_80_columns() -> None:
    console, out = plain_console(width=80)
    print_recipes(console)
    header, *rows, hint = out.getvalue().splitlines()
    assert header.split() == ["recipe", "global", "batch", "epochs", "workers", "time", "top-1"]
    assert [row.split()[0] for row in rows] == recipe_names()
    assert max(map(len, [header, *rows, hint])) <= 80
    by_name = {row.split()[0]: row.split()[1:] for row in rows}
    assert by_name["akiba2017"] == ["32,768", "90", "1,024", "15", "minutes", "74.9", "%"]
    assert by_name["demo"] == ["512", "8", "4", "5", "minutes", "90", "%"]
    assert by_name["adabatch2017"][-1] == "-"  # "within 1 %" is no accuracy
    assert by_name["nado2021"][3] == "-"  # a number of steps is no time
    for name in recipe_names():
        totals = parse_stages(load_config(name).train.global_batch_size).global_batch_sizes
        assert by_name[name][0] == f"{totals[0]:,}"
        assert len(totals) == 1 or by_name[name][2] == f"{totals[-1]:,}"


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
