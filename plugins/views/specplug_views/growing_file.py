"""A file of JSON records that is whole after every write."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specplug import UsageError

_FOR_HTML = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


class GrowingFile:
    """Writes records between a head and a tail, which is written anew after each of them.

    So the file is whole at any time: a run that is interrupted, or has no end, leaves one that can
    be opened.

    Args:
        path: of the file. What is there is overwritten by ``begin``.
        head, tail: what stands before and after the records.

    Raises:
        UsageError: no file can be there.
    """

    def __init__(self, path: str | Path, head: str, tail: str) -> None:
        self.path = Path(path).expanduser()
        self._head, self._tail = head.encode(), tail.encode()
        self._end = 0
        if self.path.is_dir() or not self.path.parent.is_dir():
            found = "it is a folder" if self.path.is_dir() else "its folder is not there"
            raise UsageError(f"{str(self.path)!r}: {found}; expected a file that can be written")

    def begin(self) -> None:
        """Write a file without a record, the first time that it is called.

        Raises:
            UsageError: it cannot be written.
        """
        if self._end:
            return
        try:
            self.path.write_bytes(self._head + self._tail)
        except OSError as error:
            raise UsageError(
                f"{str(self.path)!r} cannot be written: {error.strerror}; expected a place that can"
            ) from error
        self._end = len(self._head)

    def add(self, records: Iterable[Any]) -> None:
        """Append records: what ``json`` can write, NaN and infinities aside.

        Characters that mean something in HTML are escaped, so that no text ends a script.
        """
        lines = [dumps(record) for record in records]
        if not lines:
            return
        lead = ",\n" if self._end > len(self._head) else "\n"
        written = (lead + ",\n".join(lines)).encode()
        with self.path.open("r+b") as file:
            file.seek(self._end)
            file.write(written + self._tail)  # longer than the tail that it overwrites
        self._end += len(written)


def dumps(record: Any) -> str:
    """Return a record as JSON without spaces, in ASCII, which may stand in a script of HTML."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).translate(_FOR_HTML)
