"""Every benchmark runs, in its tiny form, and says what it measured; how fast it was is nobody's business here."""

from __future__ import annotations

import importlib
import re
import subprocess
import time
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.commands import REPOSITORY, run_command, run_python

BENCHMARKS = REPOSITORY / "benchmarks"
RESULTS = BENCHMARKS / "results" / "results.csv"
TINY = ("exchange", "fingerprint", "gpu", "import", "scale", "sinks", "step_overhead")
NEED = pytest.mark.megatron
EXPORTERS = ("opentelemetry", "prometheus_client", "tensorboard", "wandb")

CASES = {
    "exchange": ("20 x 4 KiB, 2 ranks",),
    "fingerprint": (
        "3 x 4 KiB float32",
        "3 x 4 KiB bfloat16",
        "vector units, 3 x 4 KiB float32",
        "vector units, 3 x 4 KiB bfloat16",
    ),
    "gpu": ("3 x 4 KiB float32", "3 x 4 KiB bfloat16", "the host alone, 3 x 4 KiB"),
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
    "sinks": ("GPT, 5 replicated", "inside tpwatch, all hooks"),
    "step_overhead": (
        "a check, parameters of 4 KiB",
        "GPT, norms replicated",
        "inside tpwatch, all hooks, in an average step: GPT, norms replicated",
        "GPT with replicated bottlenecks",
        "inside tpwatch, all hooks, in an average step: GPT with replicated bottlenecks",
    ),
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the folder of benchmarks by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@cache
def tiny(name: str) -> subprocess.CompletedProcess[str]:
    """The tiny form of one benchmark, run once."""
    if name == "sinks" and (missing := [package for package in EXPORTERS if find_spec(package) is None]):
        pytest.skip(f"needs {', '.join(missing)}")
    program = BENCHMARKS / ("gpu.py" if name == "gpu" else f"bench_{name}.py")
    return run_python(program, "--smoke", env={"OMP_NUM_THREADS": "1"})


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


@NEED
def test_what_is_imported_is_compiled() -> None:
    """Whatever the environment says about compiled modules, those of tpwatch are there and have a size."""
    (rows,) = tables(tiny("import").stdout).values()
    sizes = {subject: moved for subject, _, _, moved, *_ in rows}
    assert not sizes.pop("import torch")
    assert len(sizes) == 3
    assert all(re.fullmatch(r"0\.[0-9]*[1-9][0-9]* MB", moved) for moved in sizes.values()), sizes


@NEED
def test_sinks_are_measured_with_the_meeting_of_the_job() -> None:
    """With every sink on, the ranks meet before the update, and the time there is told."""
    met = re.search(r"where the job meets \+([0-9.]+) ms", tiny("sinks").stdout)
    assert met is not None
    assert float(met[1]) > 0


def test_the_clock_is_around_every_call_of_the_adapter(module: Any) -> None:
    """A call into a Watch that the adapter makes in a step is timed; where a CUDA graph is captured, nothing is."""
    source = (REPOSITORY / "tpwatch" / "adapters" / "megatron.py").read_text()
    called = set(re.findall(r"self\._watch\.(\w+)\(", source))
    assert called == {*module("bench_step_overhead").ENTRY_POINTS, "captured"}


def test_the_clock_counts_all_of_the_time_inside(module: Any) -> None:
    """Whatever an entry point does is in the figure, even if it raises; what it returns gets out."""

    class Slow:
        def __getattr__(self, _name: str) -> Any:
            return self.work

        def work(self, *, fail: bool = False) -> str:
            time.sleep(0.02)
            if fail:
                raise InterruptedError
            return "done"

    watch: Any = Slow()
    hooks = module("bench_step_overhead").Hooks(watch)
    assert watch.finalizer_entered() == "done"
    with pytest.raises(InterruptedError):
        watch.gradients_ready(fail=True)
    taken = hooks.take()
    assert taken["finalizer_entered"] >= 0.02
    assert taken["gradients_ready"] >= 0.02
    assert sum(taken.values()) < 10
    assert sum(hooks.take().values()) == 0.0


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_the_tables_of_a_page_are_those_of_the_results(module: Any, page: str) -> None:
    """Every figure on a page is that of the latest run in the CSV: nothing is typed in, nothing is stale."""
    text = (REPOSITORY / page).read_text()
    assert module("_pages").rewritten(text, module("_harness").load(RESULTS)) == text


def result(module: Any, subject: str, median: float, note: str = "") -> Any:
    """A line of the CSV about one subject."""
    return module("_harness").Result(
        date="2000-01-01",
        benchmark="speed",
        case="a case",
        subject=subject,
        median=median,
        best=median,
        rounds=1,
        moved=0,
        ratio=1.0,
        note=note,
        machine="",
        versions="",
    )


@pytest.mark.parametrize(
    ("limit", "most", "noise", "verdict"),
    [
        (2.0, False, 0.0, "met"),
        (2.1, False, 0.0, "**missed**"),
        (2.0, True, 0.0, "met"),
        (1.9, True, 0.0, "**missed**"),
        (1.9, True, 2.5, "not decided"),
    ],
)
def test_a_goal_is_judged_by_its_figure(module: Any, limit: float, most: bool, noise: float, verdict: str) -> None:  # noqa: FBT001
    """Twice as fast, against several limits; what is smaller than the noise is not decided."""
    goals = module("_goals")
    goal = goals.Goal(
        what="speed",
        limit=limit,
        read=lambda latest: latest.speed("speed", "a case", "quick", "slow"),
        why=lambda _: "because",
        show=goals.speed,
        most=most,
        noise=lambda _: noise,
    )
    rows = [result(module, "slow", 2.0), result(module, "quick", 1.0)]
    line = goals.goals_table([goal], goals.Latest(rows)).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")][2:] == ["2x", verdict, "because"]


def test_a_goal_without_results_is_not_yet_run(module: Any) -> None:
    """No figure, and no claim."""
    goals = module("_goals")
    *_, line = goals.goals_table(goals.GOALS[:1], goals.Latest([])).splitlines()
    assert line.endswith("|  | not yet run |  |")


def test_goals_go_by_the_latest_run(module: Any) -> None:
    """An earlier run of the same benchmark does not count."""
    earlier = result(module, "quick", 1.0)
    latest = module("_goals").Latest([replace(earlier, date="2000-01-02", median=3.0), earlier])
    assert latest.row("speed", "a", "quick").median == 3.0


def test_results_name_the_commit(module: Any, tmp_path: Path) -> None:
    """Its short hash, with a plus where more than results and pages were changed; nothing outside a repository."""
    commit = partial(module("_harness").commit, tmp_path)
    git = ("git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    assert commit() == ""
    run_command("git", "init", "-q", tmp_path)
    (tmp_path / "a.py").write_text("1\n")
    run_command(*git, "add", "a.py")
    assert run_command(*git, "commit", "-q", "-m", "one").returncode == 0
    head = run_command(*git, "rev-parse", "--short", "HEAD").stdout.strip()
    assert commit() == head
    (tmp_path / "page.md").write_text("tables\n")
    assert commit() == head
    (tmp_path / "a.py").write_text("2\n")
    assert commit() == f"{head}+"


def bench(**environment: str) -> subprocess.CompletedProcess[str]:
    """`scripts/bench` with a Python that only says what it is asked to run."""
    return run_command(REPOSITORY / "scripts" / "bench", "echo", env={"TRAINCHECK": "", **environment})


def test_all_benchmarks_run_in_one_go() -> None:
    """`scripts/bench` misses none that runs here, writes the pages at the end, and says how long it took."""
    done = bench(QUIET="1000000")
    assert done.returncode == 0, done.stderr
    run = re.findall(r"^benchmarks/(\S+)", done.stdout, flags=re.MULTILINE)
    assert sorted(run[:-1]) == sorted(path.name for path in BENCHMARKS.glob("bench_*.py"))
    assert run[-1] == "_pages.py"
    assert re.search(r"=== done .* after 0 min \d+ s$", done.stdout.strip())


def test_nothing_is_measured_on_a_busy_machine() -> None:
    """Where other processes use the cores, `scripts/bench` refuses, and says why."""
    done = bench(QUIET="-1", WAIT="0")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "other processes use the cores" in done.stderr


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_every_table_of_a_page_has_a_benchmark(page: str) -> None:
    """A mark that names no benchmark would say `Not yet run` for ever."""
    marked = re.findall(r"<!-- bench: (\w+) -->", (REPOSITORY / page).read_text())
    programs = "".join(path.read_text() for path in Path(BENCHMARKS).glob("*.py"))
    assert marked
    assert [name for name in marked if f'"{name}"' not in programs] == []
