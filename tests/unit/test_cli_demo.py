"""The demo's judgement: a run of the catalogue against what its entry promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.commands import run_python
from tests.unit._samples import finding, plan, step_report
from tpwatch.cli import main
from tpwatch.cli.demo_verdict import Judged, closing_table, judge
from tpwatch.config import Config
from tpwatch.export.jsonl import RunLog
from tpwatch.lab.catalog import ENTRIES, Fault, Faulty
from tpwatch.lab.launch import Job, run_directory
from tpwatch.records import Finding, Summary
from tpwatch.report.live import Lines, open_screen
from tpwatch.report.summary import StepRow

NAMES = ("a.weight", "b.weight", "c.weight")
DOUBLED = Fault(
    name="doubled",
    story="two parameters are summed twice",
    kind="double-reduce",
    faulty=(Faulty("a.*"), Faulty("b.*", first_step=2)),
    multiplied_by_tp=True,
)
BORN = Fault(
    name="born",
    story="one differs from the start",
    kind="init-mismatch",
    faulty=(Faulty("a.*"),),
)
HEALTHY = Fault(name="healthy", story="nothing wrong")
RIGHT = (finding(parameter="a.weight"), finding(parameter="b.weight", first_step=2))


def judged(fault: Fault, *findings: Finding, verdict: str = "", fixed: bool = False) -> Judged:
    """The judgement on a run of two tensor-parallel ranks with these findings."""
    counted = "faults" if any(f.counts for f in findings) else "clean"
    summary = Summary(verdict or counted, 6, 3, findings, (), {})  # type: ignore[arg-type]
    return judge(fault, summary, NAMES, tp=2, fixed=fixed)


def test_all_faulty_parameters_named_rightly_is_as_expected() -> None:
    """Kind, parameters, first steps and ratio; a consequence may stand beside them."""
    follower = finding(kind="drift", parameter="c.weight", role="consequence", caused_by="a.weight")
    assert judged(DOUBLED, *RIGHT, follower).problems == ()


@pytest.mark.parametrize(
    ("findings", "problem"),
    [
        ((), "no cause was named"),
        (RIGHT[:1], "not named: b.weight"),
        ((*RIGHT, finding(parameter="c.weight")), "named though healthy: c.weight"),
        ((RIGHT[0], replace(RIGHT[1], kind="drift")), "named drift, not double-reduce"),
        ((RIGHT[0], replace(RIGHT[1], first_step=1)), "b.weight: first step 1, not 2"),
        ((RIGHT[0], replace(RIGHT[1], ratio=2.01)), "b.weight: ratio 2.01, not 2"),
        ((RIGHT[0], replace(RIGHT[1], ratio=None)), "b.weight: ratio None, not 2"),
        ((RIGHT[0], replace(RIGHT[1], role="consequence")), "not named: b.weight"),
        (tuple(replace(f, severity="info") for f in RIGHT), "the verdict is clean"),
    ],
)
def test_whatever_differs_from_the_entry_is_a_problem(findings: tuple[Finding, ...], problem: str) -> None:
    """One sentence each."""
    assert any(problem in text for text in judged(DOUBLED, *findings).problems)


def test_a_difference_in_values_is_labelled_with_the_update_before() -> None:
    """Initial values are those of update 0."""
    born = finding(kind="init-mismatch", parameter="a.weight", point="param", first_step=0)
    assert judged(BORN, born).problems == ()
    assert judged(BORN, replace(born, first_step=1)).problems != ()


def test_a_healthy_run_must_be_silent() -> None:
    """Even information on it is unexpected, and so is a run in which nothing was checked."""
    assert judged(HEALTHY).problems == ()
    assert judged(HEALTHY, finding(severity="info")).problems != ()
    assert judged(HEALTHY, verdict="nothing-checked").problems != ()


def test_a_fixed_fault_is_a_healthy_run() -> None:
    """What was expected without the fix is unexpected with it."""
    assert judged(DOUBLED, fixed=True).problems == ()
    assert judged(DOUBLED, *RIGHT, fixed=True).problems != ()


def test_the_closing_table_says_how_each_fault_was_named() -> None:
    """Fault, kind, parameter, first step, measure, verdict; problems below."""
    born = finding(kind="init-mismatch", parameter="a.weight", first_step=0, point="param")
    rows = [judged(DOUBLED, *RIGHT), judged(BORN, replace(born, max_abs=0.25)), judged(HEALTHY)]
    _, _, doubled, initial, healthy = closing_table(rows).splitlines()
    cells = [" ".join(line.split()) for line in (doubled, initial, healthy)]
    assert cells == [
        "doubled double-reduce a.weight and 1 more 1 x2 as expected",
        "born init-mismatch a.weight 0 0.25 as expected",
        "healthy - - - - as expected",
    ]


def test_problems_stand_below_the_closing_table() -> None:
    """With the name of their fault."""
    text = closing_table([judged(DOUBLED, *RIGHT[:1])])
    assert "unexpected" in text
    assert text.splitlines()[-1] == "doubled: not named: b.weight"


# ------------------------------------------------------------------------------ while it runs


STEPS = (
    StepRow(1, {"param": 0, "grad_pre": 1, "grad_post": 2}, 0.0, 0.0),
    StepRow(2, {"param": 3, "grad_pre": 3, "grad_post": 3}, 0.5, 0.1),
)


def test_each_step_is_one_line_where_there_is_no_terminal() -> None:
    """A step that was shown is not shown again."""
    said: list[str] = []
    lines = Lines(said.append)
    lines.show(STEPS[:1], ())
    lines.show(STEPS, ())
    assert said == [
        "  step 1, values differ 0, reduced gradients differ 2, max abs 0",
        "  step 2, values differ 3, reduced gradients differ 3, max abs 0.5",
    ]


def test_what_was_found_is_said_when_it_changes() -> None:
    """Also before a step was completed; consequences are not named."""
    said: list[str] = []
    lines = Lines(said.append)
    follower = finding(parameter="c", kind="drift", role="consequence", caused_by="a")
    for findings in ([], [finding(parameter="a"), follower], [finding(parameter="a"), follower]):
        lines.show((), findings)
    lines.show((), [finding(parameter="a"), finding(parameter="b", kind="drift")])
    assert said == ["  found double-reduce: a", "  found double-reduce, drift: a and 1 more"]


def test_without_a_terminal_the_title_comes_first() -> None:
    """Then the lines."""
    said: list[str] = []
    with open_screen("title", said.append, live=False) as screen:
        screen.show(STEPS, ())
    assert [said[0], len(said)] == ["title", 3]


def test_on_a_terminal_the_table_is_redrawn(capsys: pytest.CaptureFixture[str]) -> None:
    """By rich, where it is installed; names are text, not markup."""
    pytest.importorskip("rich")
    with open_screen("title", print, live=True) as screen:
        screen.show(STEPS, (finding(parameter="[bold]a"),))
    out = capsys.readouterr().out
    assert "[bold]a" in out
    assert "0.5" in out


# -------------------------------------------------------------------------------- the catalogue


def test_the_catalogue_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every entry with its story; nothing is run."""
    assert main(["demo", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(entry.name in out and entry.story in out for entry in ENTRIES)


def test_an_unknown_fault_is_a_usage_error_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is started."""
    assert main(["demo", "--fault", "ple-dubble-sum"]) == 2
    assert "Did you mean 'ple-double-sum'?" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- the verb


def lab_that_writes(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    """Put in the lab's place a run of two checked steps with these findings."""

    def launch(job: Job, _output: object) -> int:
        for name in job.faults:
            watched = plan("decoder.layers.0.per_layer_embedding.conv1d.weight", "x")
            log = RunLog(run_directory(job, name), watched.group, "first")
            log.start(watched, 0, Config())
            log.check(step_report(1))
            for found in findings:
                log.finding(1, found)
            log.end(1)
            log.close()
        return 0

    monkeypatch.setattr("tpwatch.cli.demo.launch", launch)
    monkeypatch.setattr("tpwatch.cli.demo.missing", lambda _name: "")


CONV = finding(parameter="decoder.layers.0.per_layer_embedding.conv1d.weight")


def test_a_fault_named_as_expected_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo shows its course, the closing table and where the run directory is."""
    lab_that_writes(monkeypatch, CONV)
    out = tmp_path / "run"
    assert main(["demo", "--fault", "ple-double-sum", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "step 1, values differ 0" in shown
    assert "found double-reduce" in shown
    assert "as expected" in shown
    assert f"run directory: {out}" in shown


def test_a_fault_that_was_not_named_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so is a fixed one that was."""
    lab_that_writes(monkeypatch)
    command = ["demo", "--fault", "ple-double-sum", "--out"]
    assert main([*command, str(tmp_path / "a")]) == 1
    assert "no cause was named" in capsys.readouterr().out
    lab_that_writes(monkeypatch, CONV)
    assert main([*command, str(tmp_path / "b"), "--fixed"]) == 1


def test_a_lab_that_crashes_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left nothing behind: nothing was checked."""
    monkeypatch.setattr("tpwatch.cli.demo.launch", lambda _job, _output: 1)
    monkeypatch.setattr("tpwatch.cli.demo.missing", lambda _name: "")
    assert main(["demo", "--fault", "ple-double-sum", "--out", str(tmp_path / "run")]) == 1


def test_several_faults_get_a_directory_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below the one that was asked for."""
    lab_that_writes(monkeypatch, CONV)
    names = "ple-double-sum,lora-unsummed"
    assert main(["demo", "--fault", names, "--out", str(tmp_path / "run")]) == 1
    assert (tmp_path / "run" / "lora-unsummed" / "events.tp-0.jsonl").is_file()
    assert "lora-unsummed: named double-reduce, not missing-reduce" in capsys.readouterr().out


def test_a_directory_with_a_run_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the earlier run found would be taken for this one's."""
    lab_that_writes(monkeypatch, CONV)
    command = ["demo", "--fault", "ple-double-sum", "--out", str(tmp_path / "run")]
    assert main(command) == 0
    assert main(command) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_a_size_that_does_not_divide_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is started."""
    assert main(["demo", "--fault", "dense-sp", "--tp", "3"]) == 2
    assert "multiple of the tensor-parallel size 3" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tp", "--dp", "--steps"])
@pytest.mark.parametrize("value", ["0", "two"])
def test_a_size_that_is_no_size_is_a_usage_error(option: str, value: str) -> None:
    """From the argument parser."""
    with pytest.raises(SystemExit) as stop:
        main(["demo", option, value])
    assert stop.value.code == 2


def test_a_fault_whose_packages_are_missing_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the extra that brings them."""
    monkeypatch.setattr("tpwatch.cli.demo.missing", lambda _name: "megatron-core (extra lab)")
    assert main(["demo"]) == 2
    assert "needs megatron-core (extra lab)" in capsys.readouterr().err


@pytest.mark.megatron
def test_the_demo_names_a_real_fault_and_finds_the_fixed_one_clean(tmp_path: Path) -> None:
    """Real Megatron-core on two ranks, as a user would start it."""
    demo = ("-m", "tpwatch", "demo", "--fault", "ple-double-sum,dense-sp", "--steps", "4")
    done = run_python(*demo, "--out", str(tmp_path / "faulty"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as expected") == 2
    assert (tmp_path / "faulty" / "ple-double-sum" / "summary.json").is_file()
    fixed = run_python(*demo, "--fixed", "--out", str(tmp_path / "fixed"))
    assert fixed.returncode == 0, fixed.stdout + fixed.stderr
    assert fixed.stdout.count("as expected") == 2
