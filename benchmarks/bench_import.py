"""What `import tpwatch` costs a program that has imported torch.

    python benchmarks/bench_import.py [--smoke]

Every round starts fresh interpreters, which time their own imports: the start of Python is not in the figures. The
modules come from the file cache of the system and in their compiled form, whatever the environment says about that:
the interpreters share a scratch folder for it, and the first round, not counted, fills it. "Must move" is the size of
the compiled modules of tpwatch that were loaded: what has to be read and executed.

Also says whether any optional package has been imported, by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from _ranks import Record, scratch, smoke

OPTIONAL = (
    "megatron", "numpy", "opentelemetry", "prometheus_client", "rich", "tensorboard", "transformer_engine", "triton",
    "wandb",
)  # fmt: skip
"""Packages that only some users have. torch itself may import some of them: those are its own business."""

TORCH = "import torch"
BESIDE = "import tpwatch, torch being there"
ATTACH = "tpwatch.attach resolved, torch being there"
ALONE = "import tpwatch without torch"

PROGRAM = """
import json, pathlib, sys, time
told = {"seconds": {}}
for name, statement in json.loads(sys.argv[1]):
    already = set(sys.modules)
    begin = time.perf_counter()
    exec(statement)
    told["seconds"][name] = time.perf_counter() - begin
    if "tpwatch" in statement:
        new = {name: sys.modules[name] for name in set(sys.modules) - already}
        own = [m.__spec__.cached for name, m in new.items() if name.partition(".")[0] == "tpwatch"]
        files = [pathlib.Path(path) for path in own if pathlib.Path(path).is_file()]
        told.setdefault("bytes", {})[name] = sum(path.stat().st_size for path in files)
        told["new"] = sorted({*told.get("new", ()), *(name.partition(".")[0] for name in new)})
print(json.dumps(told))
"""

RUNS = (
    ((TORCH, "import torch, torch.distributed"), (BESIDE, "import tpwatch"), (ATTACH, "tpwatch.attach")),
    ((ALONE, "import tpwatch"),),
)


def fresh(statements: tuple[tuple[str, str], ...], compiled: str) -> dict[str, dict[str, float]]:
    """Run statements in a new interpreter: seconds and bytes of each, and the packages they brought in.

    `compiled`: the folder where it finds and leaves compiled modules.
    """
    command = [sys.executable, "-c", PROGRAM, json.dumps(statements)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = compiled
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    told: dict[str, dict[str, float]] = json.loads(done.stdout)
    return told


def main() -> None:
    """Take turns; the first round, which compiles the modules, is not counted."""
    tiny = smoke(__doc__)
    times: dict[str, list[float]] = {name: [] for run in RUNS for name, _ in run}
    moved: dict[str, int] = {}
    brought: set[str] = set()
    with scratch() as compiled:
        for number in range(1 + (1 if tiny else 11)):
            for run in RUNS:
                told = fresh(run, compiled)
                brought |= set(told["new"])
                for name, seconds in told["seconds"].items() if number else ():
                    times[name].append(seconds)
                moved.update({name: int(size) for name, size in told["bytes"].items()})
    optional = ", ".join(sorted(brought & set(OPTIONAL))) or "none"
    note = f"Fresh interpreters, start of Python not included. Optional packages that tpwatch imported: {optional}."
    Record("import", note, tiny=tiny).add("seconds to import", times, moved)


if __name__ == "__main__":
    main()
