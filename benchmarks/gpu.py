"""The GPU kernel on a real card: speed, launch time, no waiting, same rows, real exchanges.

    python benchmarks/gpu.py [--smoke]

Without a CUDA device it says so and measures nothing. With one it first runs `tests/gpu`, and stops if a test fails:

1. rows equal those of the CPU reference, over all dtypes and awkward layouts, the same from run to run to the last bit;
2. a clean check over NCCL makes the host wait nowhere (`torch.cuda.set_sync_debug_mode("error")`);
3. two gloo ranks with CUDA tensors name a gradient that was not summed, and nothing where all were.

It then measures GB/s beside a device-to-device copy (which moves every byte twice) and `torch.sum`, and
the time the host needs for the launches alone. `--smoke`: the same, tiny, on the CPU, so that this program runs before
there is a card.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _harness import Subject
from _ranks import Record, smoke

from tpwatch.fingerprint import Fingerprinter, choose
from tpwatch.fingerprint.layout import ROW

MIB = 1 << 20
SIZES = {"1 GiB": (1, 1024 * MIB), "3,000 x 4 KiB": (3000, 4096)}
TINY = {"3 x 4 KiB": (3, 4096)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check() -> None:
    """Run the tests that need a card, and stop if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    if subprocess.run(command, cwd=Path(__file__).parent.parent, check=False).returncode:
        sys.exit("a test failed on this card: nothing is measured")


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def finished(subject: Subject, device: str) -> Subject:
    """The subject together with the wait for the device."""

    def run() -> None:
        subject.call()
        wait(device)

    return Subject(subject.name, run, subject.moved, subject.baseline)


def subjects(tensors: list[torch.Tensor], chosen: Fingerprinter) -> list[Subject]:
    """Fingerprints beside copy and sum, without waiting for any."""
    moved = sum(t.nbytes for t in tensors)
    copies = [torch.empty_like(t) for t in tensors]
    out = torch.empty(len(tensors), ROW, dtype=torch.float64, device=tensors[0].device)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "device copy": (lambda: torch._foreach_copy_(copies, tensors), 2 * moved),
        "torch.sum": (lambda: [tensor.sum() for tensor in tensors], moved),
        f"tpwatch {chosen.name}": (lambda: chosen.rows(tensors, out), moved),
    }
    return [Subject(name, call, moved, name == "device copy") for name, (call, moved) in calls.items()]


def launches(subjects: Sequence[Subject], device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds that the host needs to begin each, on a device that has nothing else to do."""
    times: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for number in range(1 + rounds):
        for subject in subjects:
            wait(device)
            begin = time.perf_counter()
            subject.call()
            if number:
                times[subject.name].append(time.perf_counter() - begin)
    return times


def driver() -> str:
    """Driver version."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split()[0]


def measure_all(device: str, card: str, *, tiny: bool) -> None:
    """GB/s of one large tensor and of many small ones, and of the latter the host alone."""
    torch.manual_seed(0)
    report = Record("gpu", card, tiny=tiny)
    chosen = choose(device)
    print(f"{chosen.name} ({chosen.reason})")
    compared: list[Subject] = []
    for case, (count, size) in (TINY if tiny else SIZES).items():
        for name, dtype in DTYPES.items():
            tensors = [torch.randn(size // dtype.itemsize, device=device).to(dtype) for _ in range(count)]
            compared = subjects(tensors, chosen)
            at_rest = [finished(subject, device) for subject in compared]
            report.case(f"{case} {name}", at_rest, rounds=1 if tiny else 11, calls=1 if tiny else 3)
    report.add(f"the host alone, {case} {name}", launches(compared, device, 1 if tiny else 20), {})


def main() -> None:
    """Check and measure, or say that there is nothing to run on."""
    if smoke(__doc__):
        measure_all("cpu", "No card: tiny, on the CPU.", tiny=True)
    elif torch.cuda.is_available():
        check()
        card = torch.cuda.get_device_name()
        measure_all("cuda", f"{card}, driver {driver()}, CUDA {torch.version.cuda}.", tiny=False)
    else:
        print("no CUDA device: not run")


if __name__ == "__main__":
    main()
