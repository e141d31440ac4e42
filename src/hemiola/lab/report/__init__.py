"""From a folder that ``hemiola run`` wrote to a page, figures, and words.

Nothing heavy is imported until one of these functions is called, so the command line may import this module freely.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["headline", "summary_table", "write_figure", "write_report"]


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder, replacing an older one at once, and return its path.

    Args:
        folder: What ``hemiola run --out`` wrote; the run may still be going on.

    Returns:
        The path of a single file that needs neither a network nor any other file.

    Raises:
        InputError: A file of the folder is missing or unreadable; the message names it.
    """
    from hemiola.lab.report.page import render
    from hemiola.lab.report.read import read_folder, write_whole

    return write_whole(Path(folder) / "report.html", render(read_folder(Path(folder))).encode())


def write_figure(folder: Path, figure: str | Path) -> Path:
    """Draw one figure for a paper or a slide, and return the path of the file.

    Args:
        folder: What ``hemiola run --out`` wrote.
        figure: Where to write it, such as ``figures/gap-vs-seconds.svg``; the file's name says which figure, and .png,
            .svg or .pdf.

    Returns:
        Where the figure was written.

    Raises:
        InputError: No such figure, no such format, or the folder has nothing to draw in it.
    """
    from hemiola.lab.report.figures import draw
    from hemiola.lab.report.read import read_folder, write_whole

    target = Path(figure)
    image = draw(read_folder(Path(folder)), target.name)
    return write_whole(target, image)


def summary_table(folder: Path) -> Table:
    """The table of the report for a terminal, as something rich can print."""
    from hemiola.lab.report.read import read_folder
    from hemiola.lab.report.summary import summarise
    from hemiola.lab.report.terminal import table

    return table(summarise(read_folder(Path(folder))))


def headline(folder: Path) -> list[str]:
    """What the comparison says, in a few plain sentences."""
    from hemiola.lab.report.conclusion import sentences
    from hemiola.lab.report.read import read_folder
    from hemiola.lab.report.summary import summarise

    read = read_folder(Path(folder))
    return sentences(read, summarise(read))
