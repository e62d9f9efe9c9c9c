"""Records with plausible values, for tests that are about one field of them."""

from __future__ import annotations

from typing import Any

from tpwatch.records import Finding, ReplicaSpec, StepReport, WatchPlan


def finding(**changes: Any) -> Finding:
    """A confirmed double reduction on two ranks."""
    values: dict[str, Any] = {
        "kind": "double-reduce",
        "code": "TPW104",
        "parameter": "decoder.layers.0.input_layernorm.weight",
        "point": "grad_post",
        "group": "tp",
        "ranks": (0, 1),
        "first_step": 1,
        "last_step": 6,
        "count": 6,
        "severity": "error",
        "role": "cause",
        "caused_by": None,
        "confidence": 0.99,
        "observed": "sum",
        "expected": "avg|none",
        "ratio": 2.0,
        "max_abs": 0.0,
        "max_rel": 0.0,
        "odd_ranks": (),
        "advice": "Reduce it once.",
    }
    return Finding(**{**values, **changes})


def plan(*names: str, first_rank: int = 0, **changes: Any) -> WatchPlan:
    """A plan of two ranks that watches parameters of these names."""
    specs = tuple(ReplicaSpec(name, (4,), "float32", 0, 4, "sum") for name in names)
    return WatchPlan("tp", (first_rank, first_rank + 1), specs, **changes)


def step_report(step: int, **changes: Any) -> StepReport:
    """A checked step at which nothing was found."""
    values: dict[str, Any] = {
        "step": step,
        "call": 1,
        "new": (),
        "active": 0,
        "differing": {"param": 0, "grad_pre": 0, "grad_post": 0},
        "max_abs": 0.0,
        "max_rel": 0.0,
        "seconds": 0.001,
        "step_seconds": 0.1,
        "collectives": 2,
        "deep_collectives": 0,
        "bytes_exchanged": 1000,
    }
    return StepReport(**{**values, **changes})
