"""What `hemiola.train` returns: a list of results that knows what they say together."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hemiola.errors import InputError
from hemiola.lab.results import Result

if TYPE_CHECKING:
    from hemiola.lab.report.summary import Summary
    from hemiola.lab.report.verdicts import Verdict


class Results(list[Result]):
    """One `Result` per run, sweep point and seed, and the comparison that the terminal and the report show.

    ``print(results)`` prints the table and the sentences of ``hemiola run``.

    Args:
        results: In the order of the experiment.
        about: Called when a comparison is asked for; gives what experiment.json says: the experiment and the facts of
            its task.
    """

    def __init__(self, results: Iterable[Result], about: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(results)
        self._about = about

    def conclusion(self) -> list[str]:
        """What the comparison says, in the sentences of the terminal and the report."""
        from hemiola.lab.report.conclusion import sentences

        return sentences(self._summary)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """By run, how it compares with the reference, in words and numbers; the reference itself has none."""
        from hemiola.lab.report.verdicts import verdicts

        return {verdict.run: verdict for verdict in verdicts(self._summary)}

    @cached_property
    def _summary(self) -> Summary:
        from hemiola.lab.report.read import folder_of
        from hemiola.lab.report.summary import summarise

        folder = folder_of(self._about(), (one.row for one in self), (line for one in self for line in one.log))
        return summarise(folder)

    def to_frame(self) -> Any:
        """The rows of results.csv as a pandas DataFrame, one for every cell.

        Raises:
            InputError: pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError:
            raise InputError("to_frame needs pandas, which is not installed: pip install pandas") from None
        return DataFrame([one.row for one in self])

    def _repr_html_(self) -> str:
        """What a notebook shows: the conclusion, the table and two pictures."""
        from hemiola.lab.report.notebook import notebook_html

        return notebook_html(self._summary)

    def __repr__(self) -> str:
        runs = list(dict.fromkeys(one.row["run"] for one in self))
        return f"<{len(self)} results of {', '.join(runs) or 'no run'}; print() shows the comparison>"

    def __str__(self) -> str:
        from rich.console import Console

        from hemiola.lab.report.terminal import table

        console = Console(file=io.StringIO(), width=120)
        console.print(table(self._summary))
        for line in self.conclusion():
            console.print(line, highlight=False, markup=False)
        written: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in written.rstrip().splitlines())
