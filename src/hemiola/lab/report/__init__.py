"""From folders that ``hemiola run`` wrote to a page, figures, and words: read, summarise, draw, write.

Nothing heavy is imported until one of these functions is called, so the command line may import this module freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hemiola.files import write_whole

if TYPE_CHECKING:
    from hemiola.lab.report.summary import Summary

__all__ = ["summary_of", "write_figure", "write_report"]

Folders = Path | str | Sequence[Path | str]


def summary_of(folders: Folders) -> Summary:
    """Read one folder, or several to be compared, and average every run over its seeds.

    Args:
        folders: What ``hemiola run --out`` wrote; a run may still be going on.

    Raises:
        InputError: A file of a folder is missing or unreadable; the message names it.
    """
    from hemiola.lab.report.read import read_folder, together
    from hemiola.lab.report.summary import summarise

    paths = [folders] if isinstance(folders, Path | str) else folders
    return summarise(together([read_folder(Path(path)) for path in paths]))


def write_report(folders: Folders, out: Path | str | None = None) -> Path:
    """Write the report of one folder, or of several, replacing an older one at once, and return its path.

    Args:
        folders: What ``hemiola run --out`` wrote; a run may still be going on.
        out: Where to; ``report.html`` in the (first) folder by default.

    Returns:
        The path of a single file that needs neither a network nor any other file.

    Raises:
        InputError: A file of a folder is missing or unreadable; the message names it.
    """
    summary = summary_of(folders)
    return write_page(summary, summary.folder.paths[0] / "report.html" if out is None else Path(out))


def write_page(summary: Summary, path: Path, headline: str | None = None) -> Path:
    """The same from what has been read already; ``headline``: what the page says first, if not its own conclusions."""
    from hemiola.lab.report.page import render

    return write_whole(path, render(summary, headline))


def write_figure(folders: Folders, figure: str | Path) -> Path:
    """Draw one figure for a paper or a slide, and return the path of the file.

    Args:
        folders: What ``hemiola run --out`` wrote.
        figure: Where to write it, such as ``figures/gap-vs-seconds.svg``; the file's name says which figure, and .png,
            .svg or .pdf.

    Returns:
        Where the figure was written.

    Raises:
        InputError: No such figure, no such format, or the folder has nothing to draw in it.
    """
    from hemiola.lab.report import charts

    target = Path(figure)
    return write_whole(target, charts.figure(summary_of(folders), target.name))
