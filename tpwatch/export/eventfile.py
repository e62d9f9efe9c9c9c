"""A file of lines that outlives a kill, a full disk and a long run.

A line is in the file before the call returns. One that cannot be written is counted, and what a reader cannot do
without is kept until it can. A file that has grown long is put by as a part (`rotation`).

Knows lines, their kinds and the file system; not what a line says, and not who waits for it (`scribe`).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tpwatch._guard import say
from tpwatch.export.rotation import PARTS_KEPT, event_file, next_number, part_file, thinned

DURABLE = frozenset({"finding", "abort", "end"})
"""Events that are forced to disk at once: what a crash in the next moment must not take along."""

OWED = DURABLE | {"start"}
"""Events that are written later where they cannot be written now."""

CONFESSION = "lost"
"""Kind of the line that says how many were lost."""

MOST_OWED = 10_000
"""Lines that are kept for later, at most."""

DIRECTORY_MODE = 0o750
FILE_MODE = 0o640


class EventFile:
    """The live event file of one replica group, and the parts it leaves behind; one writer at a time."""

    def __init__(
        self, directory: str | os.PathLike[str], group: str, rotate_bytes: int, confess: Callable[[int, str], str]
    ) -> None:
        """Open it for appending; the directory is created if need be.

        `confess` makes the line that says how many were lost, given that number and the line that comes next.
        """
        self.path = event_file(directory, group)
        self.lost = 0
        """Lines that could not be written and never will be."""
        self._group = group
        self._rotate_bytes = rotate_bytes
        self._confess = confess
        self._confessed = 0
        self._owed: list[tuple[str, str]] = []
        self._failing = False
        make_directory(self.path.parent)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, FILE_MODE)
        self._torn = _ends_torn(self._fd)

    def put(self, event: str, line: str, missed: int = 0) -> None:
        """Append one line, and before it what is owed; `missed` lines in front of it were lost on the way here.

        Raises:
            OSError: the file has been closed.
        """
        if self._fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self.lost += missed
        waiting, self._owed = [*self._owed, (event, line)], []
        if self.lost > self._confessed:
            waiting.insert(0, (CONFESSION, self._confess(self.lost, line)))
        for at, (kind, text) in enumerate(waiting):
            try:
                self._write(text.encode() + b"\n", durable=kind in DURABLE)
            except OSError as error:
                self._keep(waiting[at:], error)
                return
            if kind == CONFESSION:
                self._confessed = self.lost
        self._failing = False

    def close(self) -> None:
        """Close the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.lost, self._owed = self.lost + len(self._owed), []

    # ------------------------------------------------------------------------------------- one line

    def _write(self, line: bytes, *, durable: bool) -> None:
        size = os.fstat(self._fd).st_size
        if size and size + len(line) > self._rotate_bytes:
            with suppress(OSError):  # a file that cannot be put by goes on growing: events come first
                self._put_by()
        text = b"\n" + line if self._torn else line
        self._torn = True  # until the whole line is out
        _write_all(self._fd, text)
        self._torn = False
        if durable:
            os.fsync(self._fd)

    def _keep(self, unwritten: Sequence[tuple[str, str]], error: OSError) -> None:
        """What is owed is kept, the rest is lost; that is logged when it begins, not for every line."""
        if not self._failing:
            why = error.strerror or str(error)
            say(logging.WARNING, "tpwatch: %s: %s. Events are lost until it can be written again.", self.path, why)
        self._failing = True
        self._owed = [(event, line) for event, line in unwritten if event in OWED][:MOST_OWED]
        said = [event for event, _ in unwritten if event != CONFESSION]
        self.lost += len(said) - len(self._owed)

    # ------------------------------------------------------------------------------------- rotation

    def _put_by(self) -> None:
        """Turn the live file into the next part and begin a new one; if that fails the old one stays in use."""
        number = next_number(self.path, self._group)
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fd = os.open(draft, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        part = part_file(self.path, number)
        try:
            self.path.rename(part)
            draft.rename(self.path)
        except OSError:
            os.close(fd)
            with suppress(OSError):
                draft.unlink(missing_ok=True)
                if not self.path.exists():
                    part.rename(self.path)
            raise
        os.close(self._fd)
        self._fd, self._torn = fd, False
        if number > PARTS_KEPT:
            _thin(part_file(self.path, number - PARTS_KEPT))


def make_directory(path: Path) -> None:
    """Create a directory, and what is missing above it, that the user's own group may read and others may not."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def replace_file(path: Path, text: bytes) -> Path:
    """Write a whole file so that a reader sees the old one or the new one, never half of it."""
    make_directory(path.parent)
    # By thread: one that waits for the file system may have been left behind.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    try:
        _write_all(fd, text)
        os.fsync(fd)
    finally:
        os.close(fd)
    return draft.replace(path)


def _thin(part: Path) -> None:
    lines = filter(None, part.read_bytes().split(b"\n"))
    replace_file(part, b"".join(line + b"\n" for line in thinned(lines)))


def _ends_torn(fd: int) -> bool:
    """True if the last line has no end: its writer was killed within it."""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _write_all(fd: int, text: bytes) -> None:
    """Write every byte; the kernel may take fewer than asked, on a nearly full disk for one."""
    while text:
        text = text[os.write(fd, text) :]
