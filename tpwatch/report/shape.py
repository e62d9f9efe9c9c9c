"""What types the values of an event must have, so that the code behind the reader need not ask again.

A run directory may come from anywhere: a half-written line, another version, another hand. Knows types and bounds, not
what a value means. A key that is missing, or of a newer version, is no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from tpwatch.export.rotation import MOST_STEPS
from tpwatch.records import SEVERITIES

Fits = Callable[[object], bool]
"""True if a value may stand here."""

LARGEST = 2**53
"""Whole numbers beyond it are none of ours, and cost memory and time to print."""

LATEST = 253_402_300_799.0
"""Last second of the year 9999: beyond it there are no dates."""

DEEPEST = 64
"""Levels of lists and mappings in one line."""


def fits(values: Mapping[str, object], shape: Mapping[str, Fits]) -> bool:
    """True if every value that is there has the type that its key asks for."""
    return all(key not in values or check(values[key]) for key, check in shape.items())


def shallow(value: object, levels: int = DEEPEST) -> bool:
    """True if lists and mappings are nested no deeper than `levels`."""
    layer = [value]
    for _ in range(levels):
        layer = [item for outer in layer for item in _inner(outer)]
        if not layer:
            return True
    return False


def _inner(value: object) -> list[object]:
    if isinstance(value, dict):
        return [item for item in value.values() if isinstance(item, (dict, list))]
    return [item for item in value if isinstance(item, (dict, list))] if isinstance(value, list) else []


# ----------------------------------------------------------------------------------------- single values


def _text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _word(value: object) -> bool:
    """A name of our own making: printed as it is."""
    return isinstance(value, str) and value.isprintable()


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def _number(value: object) -> TypeGuard[float]:
    """Finite, and no integer beyond all floats."""
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _amount(value: object) -> bool:
    """A measure of 0 or more; null stands for one that was not finite."""
    return value is None or (_number(value) and value >= 0.0)


def _share(value: object) -> bool:
    return _number(value) and 0.0 <= value <= 1.0


def _moment(value: object) -> bool:
    """Seconds, of a clock or of a stretch of time."""
    return _number(value) and 0.0 <= value <= LATEST


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _any(_value: object) -> bool:
    return True


# ------------------------------------------------------------------------------------ lists and mappings


def _list(check: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _mapping(check: Fits) -> Fits:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_text, value))  # noqa: PLR2004 - a pair


def _runs(value: object) -> bool:
    """Steps as [first, last, stride], no more of them than a part has room for."""
    if not isinstance(value, list) or not all(isinstance(run, list) and all(map(_whole, run)) for run in value):
        return False
    if not all(len(run) == 3 and run[0] <= run[1] and run[2] > 0 for run in value):  # noqa: PLR2004 - as said above
        return False
    return sum(len(range(first, last + 1, stride)) for first, last, stride in value) <= MOST_STEPS


def _spread(value: object) -> bool:
    """Of one tensor over the copies; how many elements differ is said along with how many there are."""
    if not isinstance(value, dict) or not fits(value, SPREAD):
        return False
    return "differing" not in value or "elements" in value


def _evidence(value: object) -> bool:
    if not isinstance(value, dict) or not fits(value, EVIDENCE):
        return False
    ranks = _list(_whole)
    return all(ranks(item) for key, item in value.items() if key.endswith("_ranks"))


SPREAD: Mapping[str, Fits] = {
    "max_abs": _amount,
    "max_rel": _amount,
    "l2": _amount,
    "differing": _whole,
    "elements": _whole,
}

EVIDENCE: Mapping[str, Fits] = {
    "camps_param": _list(_list(_whole)),
    "camps_grad_post": _list(_list(_whole)),
    "norms_pre": _list(_amount),
    "norms_post": _list(_amount),
    "spread_param": _spread,
    "spread_grad_post": _spread,
    "by_group": _mapping(_evidence),
}

FINDING: Mapping[str, Fits] = {
    "kind": _word,
    "code": _word,
    "parameter": _text,
    "point": _word,
    "group": _text,
    "ranks": _list(_whole),
    "first_step": _whole,
    "last_step": _whole,
    "count": _whole,
    "severity": lambda value: value in SEVERITIES,
    "role": lambda value: value in ("cause", "consequence"),
    "caused_by": lambda value: value is None or _text(value),
    "confidence": _share,
    "observed": _text,
    "expected": _text,
    "ratio": _amount,
    "max_abs": _amount,
    "max_rel": _amount,
    "odd_ranks": _list(_whole),
    "advice": _text,
    "evidence": _evidence,
}
"""A finding as written; one whose last step lies before its first is none either."""

_HEAD: Mapping[str, Fits] = {"schema": _whole, "event": _text, "step": _whole, "time": _moment, "incarnation": _text}

_CHECK: Mapping[str, Fits] = {
    "call": _whole,
    "active": _whole,
    "differing": _mapping(_whole),
    "max_abs": _amount,
    "max_rel": _amount,
    "seconds": _moment,
    "step_seconds": _moment,
    "collectives": _whole,
    "deep_collectives": _whole,
    "bytes_exchanged": _whole,
    "skipped": _flag,
    "phases": _mapping(_moment),
    "ratio_lo": _amount,
    "ratio_hi": _amount,
    "faults": _mapping(_whole),
}

_START: Mapping[str, Fits] = {
    "group": _text,
    "axis": _text,
    "ranks": _list(_whole),
    "replicas": _whole,
    "names": _list(_text),
    "not_watched": _list(_pair),
    "config_digest": _text,
    "config": _mapping(_any),
    "fingerprint": _mapping(_any),
    "versions": _mapping(_any),
}

_OTHERS: Mapping[str, Mapping[str, Fits]] = {
    "start": _START,
    "check": _CHECK,
    "status": {"not_exercised": _list(_text), "unverified": _list(_text)},
    "note": {"text": _text},
    "thinned": {"steps": _whole, "lines": _whole, "runs": _runs},
}


def is_event(value: object) -> bool:
    """True for a mapping that has the head of an event and, where its kind is known, fitting values.

    A `finding` is judged by `is_finding` besides.
    """
    if not isinstance(value, dict) or "event" not in value or "step" not in value or not fits(value, _HEAD):
        return False
    return fits(value, _OTHERS.get(value["event"], {})) and shallow(value)


def is_finding(value: object) -> bool:
    """True for a mapping whose values are those of a `Finding`, as far as they are there."""
    if not isinstance(value, dict) or not fits(value, FINDING):
        return False
    steps: tuple[Any, Any] = (value.get("first_step", 0), value.get("last_step", 0))
    return bool(steps[0] <= steps[1])
