"""The GPU kernel on a real card: speed, launch time, no waiting, same rows, real exchanges.

    python benchmarks/gpu.py

Without a CUDA device it says so and measures nothing. With one it first runs `tests/gpu`, and stops if a test fails:

1. rows equal those of the CPU reference, over all dtypes and awkward layouts, the same from run to run to the last bit;
2. a clean check over NCCL makes the host wait nowhere (`torch.cuda.set_sync_debug_mode("error")`);
3. two gloo ranks with CUDA tensors name a gradient that was not summed, and nothing where all were.

It then measures GB/s beside a device-to-device copy (which moves every byte twice) and `torch.sum`, and
the time the host needs for the launches.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _harness import Report, Subject

from tpwatch.fingerprint import Fingerprinter, choose
from tpwatch.fingerprint.layout import ROW

MIB = 1 << 20


def check() -> None:
    """Run the tests that need a card, and stop if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    if subprocess.run(command, cwd=Path(__file__).parent.parent, check=False).returncode:
        sys.exit("a test failed on this card: nothing is measured")


def finished(call: Callable[[], object]) -> Callable[[], None]:
    """The call together with the wait for the device."""

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def measure_speed(report: Report, chosen: Fingerprinter) -> None:
    """GB/s of one large tensor and of many small ones, beside copy and sum."""
    for dtype in (torch.float32, torch.bfloat16):
        cases = {
            "1 GiB": [torch.randn(1024 * MIB // dtype.itemsize, device="cuda").to(dtype)],
            "3,000 x 4 KiB": [torch.randn(4096 // dtype.itemsize, device="cuda").to(dtype) for _ in range(3000)],
        }
        for case, tensors in cases.items():
            moved = sum(t.nbytes for t in tensors)
            copies = [torch.empty_like(t) for t in tensors]
            out = torch.empty(len(tensors), ROW, dtype=torch.float64, device="cuda")

            def copy(to: list[torch.Tensor] = copies, of: list[torch.Tensor] = tensors) -> None:
                torch._foreach_copy_(to, of)

            def fingerprint(of: list[torch.Tensor] = tensors, to: torch.Tensor = out) -> None:
                chosen.rows(of, to)

            def add(of: list[torch.Tensor] = tensors) -> None:
                for tensor in of:
                    tensor.sum()

            report.case(
                f"{case} {str(dtype).removeprefix('torch.')}",
                [
                    Subject("device copy", finished(copy), 2 * moved, baseline=True),
                    Subject("torch.sum", finished(add), moved),
                    Subject(f"tpwatch {chosen.name}", finished(fingerprint), moved),
                ],
                calls=3,
            )


def measure_launch(chosen: Fingerprinter) -> None:
    """Time of the host alone for one call over 3,000 tensors."""
    tensors = [torch.randn(1024, device="cuda") for _ in range(3000)]
    out = torch.empty(len(tensors), ROW, dtype=torch.float64, device="cuda")
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        chosen.rows(tensors, out)
        times.append(time.perf_counter() - begin)
    print(f"host time of one call, 3,000 tensors: median {sorted(times)[10] * 1e6:.0f} us")


def driver() -> str:
    """Driver version."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split()[0]


def main() -> None:
    """Check and measure, or say that there is nothing to run on."""
    if not torch.cuda.is_available():
        print("no CUDA device: not run")
        return
    torch.manual_seed(0)
    card = torch.cuda.get_device_name()
    report = Report("gpu", f"{card}, driver {driver()}, CUDA {torch.version.cuda}.")
    chosen = choose("cuda")
    print(f"{card}: {chosen.name} ({chosen.reason})")
    check()
    measure_speed(report, chosen)
    measure_launch(chosen)


if __name__ == "__main__":
    main()
