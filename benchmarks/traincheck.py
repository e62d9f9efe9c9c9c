"""TrainCheck (PyPI: traincheck) on the training loop of `bench_step_overhead`, where an environment with it is at hand.

    OMP_NUM_THREADS=1 python benchmarks/traincheck.py DIRECTORY [--smoke]

DIRECTORY is the `bin` of an environment that has traincheck, torch and megatron-core. TrainCheck rewrites a script and
instruments torch for the whole process, so that traced and untraced runs are processes of their own, in turn, with
TrainCheck's sampler of the model's state. Its two other ways to watch a model do not survive Megatron-core: see the
README beside this file.

Two traced subjects: everything, as for a reference run, and only what its invariants need, as for the run under test.
The invariants are inferred from a reference run of the lab's smallest model, with the same calls; that takes minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from _ranks import Record, now, scratch

SECOND = "hidden=512, layers=8, heads=8, vocab=4096, seq=256, batch=4"
"""The model of `bench_step_overhead`."""

# TrainCheck looks for an assignment to `model`, and for a line that names it and an optimizer.
PROGRAM = """
import time, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from tpwatch.lab import cpu
from tpwatch.lab.config import LabConfig
torch.set_num_threads(1)
cpu.install()
dist.init_process_group("gloo")
from tpwatch.lab.model import build
run = build(LabConfig({sizes}))
model = run.model
optimizer = (model, run.optimizer.optimizer)[1]
for step in range({steps}):
    begin = time.perf_counter()
    run.step(step)
    if dist.get_rank() == 0:
        print("step took", time.perf_counter() - begin, flush=True)
dist.destroy_process_group()
"""
WARM = 2


class Loop:
    """One script, and how to run it."""

    def __init__(self, bin_directory: Path, folder: Path, sizes: str, steps: int) -> None:
        """Write the script and its launcher."""
        self._bin, self.folder = bin_directory, folder
        folder.mkdir()
        (folder / "loop.py").write_text(PROGRAM.format(sizes=sizes, steps=steps))
        torchrun = f"{bin_directory}/python -m torch.distributed.run --standalone --nproc_per_node 2"
        # TrainCheck sets a search path of its own for the script.
        (folder / "launch.sh").write_text(f"export PYTHONPATH={Path(__file__).parents[1]}\n{torchrun} loop.py\n")

    def plain(self) -> list[float]:
        """Seconds of each step without TrainCheck."""
        return self._seconds("sh", "launch.sh")

    def traced(self, out: str, *options: str) -> list[float]:
        """Seconds of each step under TrainCheck; the trace is left in `out`."""
        watch = ("--models-to-track", "model", "--model-tracker-style", "sampler")
        script = ("--pyscript", "loop.py", "--shscript", "launch.sh", "--output-dir", out)
        return self._seconds(str(self._bin / "traincheck-collect"), *script, *watch, *options)

    def invariants(self) -> Path:
        """Infer invariants from a trace of this loop."""
        self.traced("reference")
        self._run(str(self._bin / "traincheck-infer"), "-f", "reference", "-o", "invariants.json")
        return self.folder / "invariants.json"

    def _seconds(self, *command: str) -> list[float]:
        return [float(seconds) for seconds in re.findall(r"step took ([0-9.]+)", self._run(*command))][WARM:]

    def _run(self, *command: str) -> str:
        env = {**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=self.folder, env=env, check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done.stdout + done.stderr


def main() -> None:
    """Plain and traced runs in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    bin_directory = args.directory.absolute()
    with scratch() as folder:
        invariants = Loop(bin_directory, Path(folder) / "small", "", 8).invariants()
        sizes, steps, rounds = ("", 4, 1) if args.smoke else (SECOND, 10, 2)
        loop = Loop(bin_directory, Path(folder) / "loop", sizes, steps)
        times: dict[str, list[float]] = {"off": [], "only what invariants need": [], "everything": []}
        for number in range(rounds):
            times["off"] += loop.plain()
            times["only what invariants need"] += loop.traced(f"checked-{number}", "--invariants", str(invariants))
            times["everything"] += loop.traced(f"all-{number}")
        note = "A step at TP2, one thread a rank; tracing alone, without the checker that reads the trace."
        Record("traincheck", note, date=now(), tiny=args.smoke).add("a step under TrainCheck", times, {})


if __name__ == "__main__":
    main()
