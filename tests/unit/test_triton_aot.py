"""What the GPU kernel compiles to, without a GPU: its main loop must stay lean.

The kernel is compiled for three generations and disassembled. A change that makes ptxas spill, read
less than 16 bytes at a time, or spend more instructions than before fails here.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.triton

CAPABILITIES = (80, 90, 100)

# (kind, bytes of an element) -> instructions of the main loop for 16 bytes of data.
# 16 bytes are 4 elements of float32: 14.5 each; 8 of bfloat16 and float16: 12 each.
BUDGETS = {
    ("FLOAT32", 4): 58,
    ("BFLOAT16", 2): 95,
    ("FLOAT16", 2): 95,
    ("BYTES", 1): 22,
    ("FLOAT64", 8): 22,
}
REGISTERS = 84  # three blocks of 256 threads on a multiprocessor with 65,536 registers

SIGNATURE = {
    "addresses": "*i64",
    "numels": "*i64",
    "tensor_of": "*i32",
    "chunk_of": "*i32",
    "v0_keys": "*i32",
    "v1_keys": "*i32",
    "u_keys": "*i64",
    "a_keys": "*i64",
    "fold_words": "*i64",
    "sign_columns": "*i32",
    "sign_bits": "*i64",
    "hashes": "*i64",
    "partials": "*fp64",
    "KIND": "constexpr",
    "ITEM": "constexpr",
    "UNROLL": "constexpr",
}

FOLD_SIGNATURE = {
    "starts": "*i32",
    "counts": "*i32",
    "hashes": "*i64",
    "partials": "*fp64",
    "group_hashes": "*i64",
    "group_partials": "*fp64",
}
FINISH_SIGNATURE = {
    "starts": "*i32",
    "counts": "*i32",
    "length_keys": "*i64",
    "hashes": "*i64",
    "partials": "*fp64",
    "out": "*fp64",
    "head": "*fp64",
    "head_stride": "i32",
    "HEADS": "constexpr",
}

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
OPERATION = re.compile(r"^(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel.

    Attributes:
        registers: per thread.
        main_loop: operations of the innermost loop that reads the data, in order.
    """

    registers: int
    main_loop: list[str]

    def count(self, prefix: str) -> int:
        """Number of operations of the main loop that start like this."""
        return sum(operation.startswith(prefix) for operation in self.main_loop)


def compile_kernel(capability: int, name: str, signature: dict[str, str], **constants: int) -> Any:
    """Compile one kernel ahead of time for one compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tpwatch.fingerprint import triton_kernels as kernels

    kernel = getattr(kernels, name)
    names = kernel.arg_names
    pointers = [i for i, n in enumerate(names) if signature[n].startswith("*") and n != "head"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(constant),): value for constant, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options = kernels.OPTIONS if name == "chunk_kernel" else kernels.SUM_OPTIONS
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))


def kind_constants(kind: str, item: int) -> dict[str, int]:
    """Compile-time constants of `chunk_kernel` for one kind of element."""
    from tpwatch.fingerprint import triton_kernels as kernels

    return {"KIND": getattr(kernels, kind).value, "ITEM": item, "UNROLL": kernels.UNROLL}


def disassemble(cubin: Path) -> tuple[int, list[tuple[int, str]]]:
    """Return registers per thread, and address and text of every instruction."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def dump(option: str) -> str:
        done = subprocess.run([tool, option, cubin], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    registers = re.search(r"REG:(\d+)", dump("-res-usage"))
    assert registers is not None
    code = [(int(at, 16), text) for at, text in INSTRUCTION.findall(dump("-sass"))]
    return int(registers[1]), code


def innermost_loops(code: list[tuple[int, str]]) -> list[list[str]]:
    """Operations of every loop that contains no other loop."""
    spans = []
    for at, text in code:
        branch = BRANCH.search(text)
        if branch and int(branch[1], 16) < at:
            spans.append((int(branch[1], 16), at))
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    texts = [[text for at, text in code if first <= at <= last] for first, last in inner]
    return [[m[1] for text in loop if (m := OPERATION.match(text))] for loop in texts]


def vector_loads(loop: list[str]) -> int:
    """Loads of 16 bytes in a loop."""
    return sum(op.startswith("LDG") and ".128" in op for op in loop)


@pytest.fixture(
    params=[(c, *kind) for c in CAPABILITIES for kind in BUDGETS],
    ids=lambda p: f"sm_{p[0]}-{p[1]}",
)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Compiled, int]:
    """The kernel compiled for one generation and kind of element, and its budget."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    capability, kind, item = request.param
    cubin = tmp_path / "kernel.cubin"
    compiled = compile_kernel(capability, "chunk_kernel", SIGNATURE, **kind_constants(kind, item))
    cubin.write_bytes(compiled.asm["cubin"])
    registers, code = disassemble(cubin)
    return Compiled(registers, max(innermost_loops(code), key=vector_loads)), BUDGETS[kind, item]


def test_main_loop(case: tuple[Compiled, int]) -> None:
    """The main loop keeps to registers, to 16-byte reads, and to its instruction budget."""
    compiled, budget = case
    rows = vector_loads(compiled.main_loop)
    assert rows >= 2
    # Beside the data there is one load a row, the same for all threads: the 8-byte key of the row.
    assert compiled.count("LDG") - rows <= rows
    assert compiled.count("LDL") + compiled.count("STL") == 0
    assert compiled.count("LDS") + compiled.count("BAR") == 0
    assert len(compiled.main_loop) / rows <= budget
    assert compiled.registers <= REGISTERS


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("heads", [0, 5])
def test_summing_kernels_do_not_spill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: int, heads: int
) -> None:
    """The kernels behind the main one compile for every generation and keep to registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernels = (
        compile_kernel(capability, "fold_kernel", FOLD_SIGNATURE),
        compile_kernel(capability, "finish_kernel", FINISH_SIGNATURE, HEADS=heads),
    )
    for kernel in kernels:
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        _, code = disassemble(cubin)
        assert len(code) > 50
        assert not any(re.search(r"\b(STL|LDL|ATOM|RED)\b", text) for _, text in code)


def test_no_atomics() -> None:
    """Sums have a fixed order: no kernel uses an atomic operation."""
    source = Path(__file__).parents[2] / "tpwatch" / "fingerprint" / "triton_kernels.py"
    assert "tl.atomic" not in source.read_text()
