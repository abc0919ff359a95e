"""`python -m megabatch` and the `megabatch` command: run a verb, turn errors into one line."""

from __future__ import annotations

import os
import sys
import traceback
import unicodedata
import warnings


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    from typer.exceptions import TyperException

    from megabatch.cli import app
    from megabatch.errors import MegabatchError

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m megabatch` does: a model may be a function in the user's folder
    # Pillow warns of a very large image in lines of its own; it is refused in one line.
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit")
    try:
        code = app(with_values(sys.argv[1:]), standalone_mode=False)
    except TyperException as error:
        if not str(error):
            sys.exit(2)  # a bare command: its help has been shown
        what = error.format_message().rstrip(".")
        _fail(f"{_one_line(what)}; `megabatch --help` and `megabatch VERB --help` show what is possible")
    except MegabatchError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        _fail(_one_line(str(error)))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:  # a name too long, a folder without permission, a circle of links: in any place
        if error.filename is None or "--debug" in sys.argv:
            raise
        _fail(_one_line(f"'{error.filename}' cannot be used: {error.strerror}; give another path"))
    sys.exit(code if isinstance(code, int) else 0)


def with_values(arguments: list[str]) -> list[str]:
    """`train --elastic` may stand alone; typer knows no option whose value may be left out."""
    given: list[str] = []
    for index, argument in enumerate(arguments):
        given.append(argument)
        following = arguments[index + 1 : index + 2]
        if arguments[0] == "train" and argument == "--elastic" and (not following or following[0].startswith("-")):
            given.append("local")
    return given


def _one_line(message: str, longest: int = 1000) -> str:
    """The message without line ends and control characters; of a long one the middle is left out."""
    plain = "".join(" " if c.isspace() else "" if unicodedata.category(c)[0] == "C" else c for c in message)
    return plain if len(plain) <= longest else f"{plain[: longest // 2]} ... {plain[-longest // 2 :]}"


def _fail(message: str) -> None:
    print(f"megabatch: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
