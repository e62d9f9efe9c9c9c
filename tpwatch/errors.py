"""Every error tpwatch raises, with the data it is about.

    TpwatchError
    |-- ConfigError             (also ValueError)    a knob has a value that breaks a rule
    |-- AdapterUnavailable      (also RuntimeError)  the requested framework is missing or unsupported
    |-- FingerprintUnavailable  (also RuntimeError)  the requested implementation cannot run here
    |-- UnreadableTensor        (also RuntimeError)  a watched tensor has no memory, or lies on another device
    |-- RunDirectoryError       (also RuntimeError)  a run directory is missing or cannot be read
    `-- ReplicaFault            (also RuntimeError)  the user asked to be stopped, and a fault was found

This file knows no other module of the package.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpwatch.records import Finding


def printable(text: str) -> str:
    """`text` with control and other unprintable characters escaped: names come from anywhere."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class TpwatchError(Exception):
    """Root of the tree: catch it to catch everything tpwatch raises on purpose."""

    def __init__(self, message: str) -> None:
        """Hold one line that a terminal can show: names of models, files and knobs are in it."""
        super().__init__(printable(message))


class _Brief(reprlib.Repr):
    """`repr` of bounded length: a few lines of YAML with anchors can stand for more text than there is memory."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 400, 400
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 12

    def repr_int(self, x: int, level: int) -> str:
        """Whole numbers of thousands of digits have no `repr`."""
        del level
        return repr(x) if abs(x) < 10**40 else f"{hex(x)[:40]}..."


def brief(value: object) -> str:
    """A value as it stands in a message: `repr`, but short whatever the value is."""
    return _Brief().repr(value)


class ConfigError(TpwatchError, ValueError):
    """A configuration knob has a value that breaks a rule.

    Attributes: ``knob`` (dotted key), ``value`` (as given), ``rule`` (what must hold), ``remedy``
    (what to do).
    """

    def __init__(self, knob: str, value: object, rule: str, remedy: str) -> None:
        """Build the message ``knob = value: rule. remedy``."""
        super().__init__(f"{knob} = {brief(value)}: {rule}. {remedy}")
        self.knob = knob
        self.value = value
        self.rule = rule
        self.remedy = remedy


class AdapterUnavailable(TpwatchError, RuntimeError):
    """The framework asked for by name is not installed, too old or too new, or lacks a symbol.

    Attributes: ``adapter``, ``found`` (version or ``"not installed"``), ``supported`` (range),
    ``missing`` (dotted symbol).
    """

    def __init__(self, adapter: str, found: str, supported: str, missing: str = "") -> None:
        """Build a message that names what was found and what is supported."""
        symbol = f"; symbol {missing} is missing" if missing else ""
        super().__init__(
            f"adapter={adapter!r} cannot be used: found {found}, supported {supported}{symbol}. "
            "Install a supported version, or leave adapter='auto' to run unwatched."
        )
        self.adapter = adapter
        self.found = found
        self.supported = supported
        self.missing = missing


class FingerprintUnavailable(TpwatchError, RuntimeError):
    """The fingerprint implementation asked for by name cannot run here.

    Attributes: ``name``, ``reason``.
    """

    def __init__(self, name: str, reason: str) -> None:
        """Build a message that says why, and what works everywhere."""
        super().__init__(
            f"fingerprint = {name!r}: {reason}. Use fingerprint: auto, or `tpwatch doctor` to see what can run."
        )
        self.name = name
        self.reason = reason


class UnreadableTensor(TpwatchError, RuntimeError):
    """A tensor that is to be fingerprinted has no memory to read, or not where the others have theirs.

    Attributes: ``tensor`` (dtype and shape), ``reason``.
    """

    def __init__(self, tensor: str, reason: str) -> None:
        """Build a message that says which kind of tensor, why it cannot be read, and what to do."""
        super().__init__(f"a tensor {tensor} cannot be read: {reason}. Bring back what was offloaded before the check.")
        self.tensor = tensor
        self.reason = reason


class RunDirectoryError(TpwatchError, RuntimeError):
    """A run directory is missing, empty, or cannot be read.

    Attributes: ``path``, ``reason``.
    """

    def __init__(self, path: str, reason: str) -> None:
        """Build a message that names the directory and the reason."""
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class ReplicaFault(TpwatchError, RuntimeError):
    """Raised on every rank of the job, at the same step, when a fault meets a policy that stops the run.

    Attributes: ``findings`` (what stopped the run, as far as this rank's replica group found it; may be empty),
    ``step``, ``elsewhere`` (faults by kind over all replica groups).
    """

    def __init__(
        self,
        findings: Sequence[Finding],
        step: int,
        elsewhere: Mapping[str, int] | None = None,
        what: str = "stopped the run",
    ) -> None:
        """Build a one-line message from the first finding, or from what other groups said; `what` tpwatch did."""
        self.findings = tuple(findings)
        self.step = step
        self.elsewhere = dict(elsewhere or {})
        super().__init__(f"tpwatch {what} at step {step}: {self._why()}")

    def _why(self) -> str:
        if not self.findings:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self.elsewhere.items())
            return f"faults in another replica group, or not confirmed yet ({kinds}). See the run directory."
        first = self.findings[0]
        more = f" (and {len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
        return f"{first.kind} of {first.parameter}{more}. {first.advice}"
