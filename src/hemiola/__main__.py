"""``python -m hemiola``, the form torchrun takes."""

from hemiola.cli import main

if __name__ == "__main__":
    main()
