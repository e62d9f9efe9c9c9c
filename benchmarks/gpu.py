"""The GPU kernel on a real card: speed, launch time, no waiting, same rows, real exchanges.

    python benchmarks/gpu.py

Without a CUDA device it says so and measures nothing. With one it checks, and stops at the first
check that fails:

1. rows equal those of the CPU reference, over all dtypes and awkward layouts;
2. the steady path makes the host wait nowhere (`torch.cuda.set_sync_debug_mode("error")`);
3. the rows are the same from run to run, to the last bit;
4. two gloo ranks with CUDA tensors, and NCCL with one rank, exchange the heads and see one flipped bit;

and measures GB/s beside a device-to-device copy (which moves every byte twice) and `torch.sum`, and
the time the host needs for the launches.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing
from _harness import Report, Subject

from tpwatch.fingerprint import Fingerprinter, choose
from tpwatch.fingerprint.layout import COLUMNS, HEAD, ROW

MIB = 1 << 20
INTEGER_COLUMNS = [COLUMNS.index(n) for n in ("hash_lo", "hash_hi", "absmax", "nonfinite", "zeros")]
CHANGED = 3


def rows(fingerprinter: Fingerprinter, tensors: list[torch.Tensor | None]) -> torch.Tensor:
    """Rows of a list of tensors, on their device."""
    device = next(t.device for t in tensors if t is not None)
    out = torch.full((len(tensors), ROW), torch.nan, dtype=torch.float64, device=device)
    fingerprinter.rows(tensors, out)
    return out


def require(condition: object, what: str) -> None:
    """Stop with a message unless the condition holds."""
    if not condition:
        sys.exit(f"FAILED: {what}")
    passed(what)


def passed(what: str) -> None:
    """Say what holds."""
    print(f"ok: {what}", flush=True)


def awkward() -> list[torch.Tensor | None]:
    """Tensors of every dtype, odd sizes, strides and values, in host memory."""
    found: list[torch.Tensor | None] = [None]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for size in (0, 1, 7, 1023, 1024, 4097, 65_535, 65_537, 2_300_001):
            x = torch.randn(size).to(dtype)
            x[::5] = 0
            found.append(x)
        x = torch.randn(70_000).to(dtype)
        found += [x[1:], x.view(700, 100).t(), x[::3], x.clone().fill_(torch.finfo(dtype).max)]
        x = x.clone()
        x[3], x[69_999], x[40_000] = torch.nan, torch.inf, -torch.inf
        found.append(x)
    for dtype in (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64):
        found.append(torch.randint(0, 2, (5003,)).to(dtype))
    found += [torch.randn(5003).to(torch.float8_e4m3fn), torch.randn(99, dtype=torch.complex64)]
    return found


def check_parity(chosen: Fingerprinter) -> None:
    """Compare with the reference on the CPU."""
    host = awkward()
    wanted = rows(choose("cpu", "reference"), host)
    device: list[torch.Tensor | None] = []
    for tensor in host:
        if tensor is None:
            device.append(None)
            continue
        # Keep the strides and the odd start: copy the whole storage, then take the same view.
        base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
        view = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        device.append(view)
    found = rows(chosen, device).cpu()
    again = rows(chosen, device).cpu()
    columns = found[:, INTEGER_COLUMNS] == wanted[:, INTEGER_COLUMNS]
    require(columns.all(), f"integer columns of {len(host)} tensors equal the reference's")
    l2 = COLUMNS.index("l2")
    close = (found[:, l2] - wanted[:, l2]).abs() <= 2.0**-16 * wanted[:, l2]
    require(close.all(), "l2 within its bound")
    norm = wanted[:, l2].sqrt()[:, None]
    sketch = slice(COLUMNS.index("sketch_0"), None)
    require(((found - wanted)[:, sketch].abs() <= 1e-5 * norm).all(), "sketch within 1e-5 of the norm")
    require(torch.equal(found, again), "rows are the same from run to run")


def check_no_waiting(chosen: Fingerprinter) -> None:
    """Call with new storages and new values under the debug mode that makes waiting an error."""
    tensors = [torch.randn(5000, device="cuda") for _ in range(50)]
    out = torch.empty(len(tensors), ROW, dtype=torch.float64, device="cuda")
    head = torch.empty(len(tensors), HEAD + 4, dtype=torch.float64, device="cuda")[:, :HEAD]
    for _ in range(3):  # compiles, and fills the caches of pinned memory
        chosen.rows(tensors, out, head)
        tensors = [t + 1 for t in tensors]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            chosen.rows(tensors, out, head)
            tensors = [t + 1 for t in tensors]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    passed("the host waits nowhere, also when storages move")


def exchange_rank(rank: int, world: int, backend: str, port: int) -> None:
    """One rank of an exchange: the heads' MAX and MIN over the group, from one all-reduce."""
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    tensors = [torch.full((1000 + i,), 1.0 + i, device="cuda") for i in range(8)]
    if rank == 1:
        tensors[CHANGED].view(torch.int32)[7] ^= 1
    out = torch.empty(len(tensors), ROW, dtype=torch.float64, device="cuda")
    buffer = torch.empty(2, len(tensors), HEAD, dtype=torch.float64, device="cuda")
    choose("cuda").rows(tensors, out, buffer[0])
    torch.neg(buffer[0], out=buffer[1])
    dist.all_reduce(buffer, op=dist.ReduceOp.MAX)
    spread = (buffer[0] + buffer[1])[:, :2].abs().sum(1)
    found = spread.nonzero().flatten().tolist()
    dist.destroy_process_group()
    expected = [CHANGED] if world > 1 else []
    if found != expected:
        sys.exit(f"rank {rank}: rows {found} differ, expected {expected}")


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def check_exchange(backend: str, world: int) -> None:
    """Run the ranks of an exchange in processes of their own."""
    torch.multiprocessing.spawn(exchange_rank, args=(world, backend, free_port()), nprocs=world)
    passed(f"{backend} with {world} rank(s) on CUDA tensors")


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
    check_parity(chosen)
    check_no_waiting(chosen)
    check_exchange("nccl", 1)
    check_exchange("gloo", 2)
    measure_speed(report, chosen)
    measure_launch(chosen)


if __name__ == "__main__":
    main()
