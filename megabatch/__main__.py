"""`python -m megabatch` and the `megabatch` command: run a verb, turn errors into one line."""

from __future__ import annotations

import os
import sys
import traceback

__all__ = ["main"]


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    from typer.exceptions import TyperException

    from megabatch.cli import app
    from megabatch.errors import MegabatchError

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m megabatch` does: a model may be a function in the user's folder
    try:
        code = app(standalone_mode=False)
    except TyperException as error:
        if not str(error):
            sys.exit(2)  # a bare command: its help has been shown
        what = error.format_message().rstrip(".")
        _fail(f"{what}; `megabatch --help` and `megabatch VERB --help` show what is possible")
    except MegabatchError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    print(f"megabatch: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
