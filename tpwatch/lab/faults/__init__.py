"""How entries of the catalogue are built: each by the mechanism of its field report.

No wrong number is ever written into a gradient. Knows: how to load a mechanism and put it into a
run. Must not know: the monitor. The modules below import Megatron-core: `tpwatch.lab.cpu.install`
comes first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tpwatch.lab.catalog import Fault
from tpwatch.lab.config import LabConfig

if TYPE_CHECKING:
    from tpwatch.lab.faults.mechanism import Mechanism
    from tpwatch.lab.model import TrainingRun


def build(fault: Fault, config: LabConfig, *, fixed: bool = False) -> tuple[TrainingRun, Mechanism]:
    """Build the run of one entry, with the upstream fix if `fixed`.

    The caller attaches its monitor, then calls `mechanism.after_attach(run)`, then steps.
    """
    from tpwatch.lab import model

    file, _, name = fault.mechanism.partition(":")
    kind: type[Mechanism] = getattr(importlib.import_module(f"{__name__}.{file}"), name)
    mechanism = kind(config, fixed=fixed)
    run = model.build(config, mechanism.edit_model)
    mechanism.edit_run(run)
    return run, mechanism
