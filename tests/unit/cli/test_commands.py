"""What holds for every command."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from tensorcast_dask.cli import main


def commands(group: click.Group, *before: str) -> Iterator[tuple[str, ...]]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, *before, name)
        else:
            yield (*before, name)


@pytest.mark.parametrize("words", list(commands(main)), ids=" ".join)
def test_every_command_explains_itself_and_speaks_json(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"])
    assert shown.exit_code == 0
    assert "--json" in shown.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_words_of_every_command_are_completed(shell: str) -> None:
    script = CliRunner().invoke(main, ["completion", shell]).output
    assert "_TENSORCAST_COMPLETE" in script
    asked = {
        "_TENSORCAST_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "tensorcast pl" if shell == "fish" else "tensorcast plan s",
        "COMP_CWORD": "pl" if shell == "fish" else "2",
    }
    offered = CliRunner().invoke(main, prog_name="tensorcast", env=asked).output
    assert ("plan" if shell == "fish" else "show") in offered


@pytest.mark.parametrize(
    "words",
    [
        "top -e nan",
        "top -e inf",
        "watch --seconds nan",
        "pin a --ttl nan",
        "plan run - --ddl nan",
    ],
)
def test_what_is_no_number_of_seconds_is_wrong_usage(words: str) -> None:
    said = CliRunner().invoke(main, words.split())
    assert (said.exit_code, "Invalid value" in said.output) == (2, True)
