"""Every benchmark runs, in its tiny form, and says what it measured; how fast it was is nobody's business here."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.commands import REPOSITORY, run_python

BENCHMARKS = REPOSITORY / "benchmarks"
RESULTS = BENCHMARKS / "results" / "results.csv"
TINY = ("exchange", "import", "scale", "step_overhead")
NEED = pytest.mark.megatron

CASES = {
    "exchange": ("20 x 4 KiB, 2 ranks",),
    "import": ("seconds to import",),
    "scale": (
        "a check, parameters of 16 elements",
        "a check, parameters of 1,024 elements",
        "2 processes",
        "measured: one all-reduce, 2 ranks over loopback",
        "modelled: both all-reduces of a check",
        "building a monitor",
        "a check on one rank of a group of",
        "measured: the meetings at attach",
        "modelled: the meetings at attach",
        "measured: the store",
    ),
    "step_overhead": ("a check, parameters of 4 KiB", "GPT, norms replicated", "GPT with replicated bottlenecks"),
}


@cache
def tiny(name: str) -> subprocess.CompletedProcess[str]:
    """The tiny form of one benchmark, run once."""
    return run_python(BENCHMARKS / f"bench_{name}.py", "--smoke", env={"OMP_NUM_THREADS": "1"})


def tables(output: str) -> dict[str, list[list[str]]]:
    """Rows of cells, without the head, of each table by its title."""
    parts = re.split(r"^## (.*)$", output, flags=re.MULTILINE)[1:]
    return {
        title: [re.split(r" *\| *", line.strip("| ")) for line in body.splitlines() if line.startswith("| ")][1:]
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }


@NEED
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_runs(name: str) -> None:
    """It ends well and prints a table for every case, with at least one line and a time on each."""
    done = tiny(name)
    assert done.returncode == 0, done.stderr
    found = tables(done.stdout)
    assert len(found) == len(CASES[name])
    for expected, (title, rows) in zip(CASES[name], found.items(), strict=True):
        assert title.startswith(expected)
        assert rows
        assert all(re.fullmatch(r"[0-9.e+]+ (s|ms|us|ns)", row[1]) for row in rows), rows


@NEED
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_run_leaves_no_result(name: str) -> None:
    """Only a full run is recorded."""
    before = RESULTS.read_bytes() if RESULTS.is_file() else b""
    tiny(name)
    assert (RESULTS.read_bytes() if RESULTS.is_file() else b"") == before


@NEED
def test_a_check_and_the_probes_stand_beside_a_single_read() -> None:
    """The methods of `bench_exchange` are those that its text explains."""
    (rows,) = tables(tiny("exchange").stdout).values()
    text = (BENCHMARKS / "bench_exchange.py").read_text()
    assert len(rows) == 5
    assert all(f'- "{row[0]}"' in text for row in rows)


@NEED
def test_a_check_sends_what_the_format_says() -> None:
    """Every tensor is read at three points; each of two sides sends 208 bytes a replica, and less than that again."""
    sent = re.search(r"must read ([0-9,]+) and send ([0-9,]+) bytes", tiny("exchange").stdout)
    assert sent is not None
    read, payload = (int(number.replace(",", "")) for number in sent.groups())
    assert read == 3 * 20 * 4096
    assert 0 <= payload - 2 * 208 * 20 < 2 * 208


def test_importing_tpwatch_brings_no_optional_package() -> None:
    """`bench_import` looks at what was really imported."""
    assert "Optional packages that tpwatch imported: none." in tiny("import").stdout


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_every_table_of_a_page_has_a_benchmark(page: str) -> None:
    """A mark that names no benchmark would say `Not yet run` for ever."""
    marked = re.findall(r"<!-- bench: (\w+) -->", (REPOSITORY / page).read_text())
    programs = "".join(path.read_text() for path in Path(BENCHMARKS).glob("*.py"))
    assert marked
    assert [name for name in marked if f'"{name}"' not in programs] == []
