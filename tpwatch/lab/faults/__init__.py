"""How each entry of the catalogue is built: the mechanism of the field report, never a wrong number in a gradient.

Knows: how to load a mechanism and put it into a run. Must not know: tpwatch. The modules below import Megatron-core;
`tpwatch.lab.cpu.install` comes first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpwatch.lab.catalog import Fault
    from tpwatch.lab.config import LabConfig
    from tpwatch.lab.faults.mechanism import Mechanism
    from tpwatch.lab.model import TrainingRun


def build(fault: Fault, config: LabConfig, *, fixed: bool = False) -> tuple[TrainingRun, Mechanism]:
    """Build the run of one catalogue entry, with the upstream fix if ``fixed``.

    The caller attaches its monitor and then calls ``mechanism.after_attach(run)``, before the first step.
    """
    from tpwatch.lab import model

    module, _, name = fault.mechanism.partition(":")
    mechanism: Mechanism = getattr(importlib.import_module(f"{__name__}.{module}"), name)(config, fixed=fixed)
    run = model.build(config, mechanism.edit_model)
    mechanism.edit_run(run)
    return run, mechanism
