"""The command ``hemiola``, and ``python -m hemiola``, the form torchrun takes."""

import sys

from hemiola.extras import MissingExtraError, naming_the_extra


def main() -> None:
    """Run the command line, or say in one line that it is not installed."""
    try:
        with naming_the_extra("the command line"):
            from hemiola.lab import cli
    except MissingExtraError as error:
        print(f"hemiola: {error}", file=sys.stderr)
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
