"""The command line as a user meets it: verbs, output and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.commands import run_python
from tests.unit._samples import finding, plan, step_report
from tpwatch import cli
from tpwatch.cli import main
from tpwatch.cli.rules import rules_markdown
from tpwatch.config import Config, load
from tpwatch.diagnose.rules import RULES
from tpwatch.export.jsonl import RunLog, write_meta
from tpwatch.records import Finding

ROOT = Path(__file__).parents[2]


def run_directory(path: Path, *findings: Finding, checks: int = 2) -> str:
    """A finished run with these findings."""
    watched = plan("a", "b")
    log = RunLog(path, watched.group, "first")
    log.start(watched, 0, Config())
    for step in range(1, checks + 1):
        log.check(step_report(step))
    for found in findings:
        log.finding(checks, found)
    log.end(checks)
    log.close()
    return str(path)


# ---------------------------------------------------------------------------------------- check


@pytest.mark.parametrize(
    ("findings", "options", "code"),
    [
        ([], [], 0),
        ([finding()], [], 1),
        ([finding(severity="warning")], [], 1),
        ([finding(severity="warning")], ["--fail-on", "error"], 0),
        ([finding(severity="info")], [], 0),
        ([finding(severity="info")], ["--fail-on", "info"], 1),
        ([finding(role="consequence", caused_by="x")], ["--fail-on", "info"], 0),
    ],
)
def test_the_gate_fails_from_its_level_on(
    tmp_path: Path, findings: list[Finding], options: list[str], code: int
) -> None:
    """Warning by default."""
    assert main(["check", run_directory(tmp_path, *findings), *options]) == code


def test_the_gate_does_not_pass_what_was_not_checked(tmp_path: Path) -> None:
    """Neither a run without a check nor a directory without event files is clean."""
    assert main(["check", run_directory(tmp_path / "a", checks=0)]) == 3
    (tmp_path / "empty").mkdir()
    assert main(["check", str(tmp_path / "empty")]) == 3


def test_a_fault_weighs_more_than_a_check_that_was_not_completed(tmp_path: Path) -> None:
    """The fault may be what kept the check from completing."""
    assert main(["check", run_directory(tmp_path, finding(), checks=0)]) == 1


def test_a_missing_group_fails_the_gate_unless_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Part of the job left no events."""
    directory = run_directory(tmp_path)
    write_meta(tmp_path, {"groups": ["tp-0", "tp-2"]})
    assert main(["check", directory]) == 3
    assert "tp-2" in capsys.readouterr().err
    assert main(["check", directory, "--allow-incomplete-ranks"]) == 0


def test_a_missing_group_does_not_hide_a_fault(tmp_path: Path) -> None:
    """What was found was found."""
    directory = run_directory(tmp_path, finding())
    write_meta(tmp_path, {"groups": ["tp-0", "tp-2"]})
    assert main(["check", directory]) == 1


def test_the_gate_reads_the_events_and_not_the_summary(tmp_path: Path) -> None:
    """A stale or forged summary.json changes nothing."""
    directory = run_directory(tmp_path, finding())
    (tmp_path / "summary.json").write_text('{"verdict": "clean"}')
    assert main(["check", directory]) == 1


def test_the_gate_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary of the contract, on standard output alone."""
    main(["check", run_directory(tmp_path, finding()), "--format", "json"])
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["findings"][0]["kind"]) == ("faults", "double-reduce")


def test_the_gate_names_each_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per cause, none per consequence."""
    follower = finding(kind="drift", parameter="b", role="consequence", caused_by="a")
    main(["check", run_directory(tmp_path, finding(parameter="a"), follower)])
    out = capsys.readouterr().out
    assert "error: double-reduce [TPW104] a since step 1" in out
    assert "drift" not in out


# --------------------------------------------------------------------------------------- report


def test_a_report_of_faults_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` is the gate."""
    assert main(["report", run_directory(tmp_path, finding())]) == 0
    assert "Verdict: faults" in capsys.readouterr().out


def test_a_report_into_a_pipe_is_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No escape sequences where there is no terminal."""
    main(["report", run_directory(tmp_path, finding())])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(("no_color", "colored"), [(None, True), ("1", False)])
def test_color_needs_a_terminal_and_no_no_color(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_color: str | None,
    *,
    colored: bool,
) -> None:
    """NO_COLOR is honoured."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["report", run_directory(tmp_path, finding())])
    assert ("\x1b" in capsys.readouterr().out) is colored


def test_a_report_in_json_has_the_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One entry per checked step."""
    main(["report", run_directory(tmp_path), "--format", "json"])
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["timeline"]] == [1, 2]


# ---------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("name", ["TPW104", "tpw104", "double-reduce"])
def test_a_rule_is_explained_by_code_or_kind(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever a person has at hand."""
    assert main(["explain", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith("TPW104 double-reduce")
    headings = ("Signal", "Why it matters", "Likely causes", "What it cannot tell", "Next step")
    assert [heading for heading in headings if heading not in out] == []


def test_an_unknown_rule_is_a_usage_error_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A typo gets a hint."""
    assert main(["explain", "dubble-reduce"]) == 2
    assert "Did you mean double-reduce?" in capsys.readouterr().err


def test_all_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """As text and as JSON."""
    main(["rules"])
    text = capsys.readouterr().out
    assert all(rule.code in text and rule.kind in text for rule in RULES)
    main(["rules", "--format", "json"])
    assert [r["code"] for r in json.loads(capsys.readouterr().out)] == [r.code for r in RULES]


def test_the_page_of_rules_is_up_to_date() -> None:
    """`python scripts/generate_rules_doc.py` was run after the last change of a rule."""
    assert (ROOT / "docs" / "rules.md").read_text() == rules_markdown(RULES)


def test_links_in_the_page_of_rules_lead_somewhere() -> None:
    """Every row of the index has a chapter."""
    page = rules_markdown(RULES)
    for rule in RULES:
        assert f"](#{rule.code.lower()}-{rule.kind})" in page
        assert f"\n## {rule.code} {rule.kind}\n" in page


# --------------------------------------------------------------------------------------- config


def test_the_configuration_in_force_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """File below environment; the output is a configuration file again."""
    (tmp_path / "c.yaml").write_text("{interval: 5, patience: 5}")
    monkeypatch.setenv("TPWATCH_INTERVAL", "7")
    assert main(["config", "show", "--config", str(tmp_path / "c.yaml")]) == 0
    shown = capsys.readouterr().out
    assert load(code=yaml.safe_load(shown)) == Config(interval=7, patience=5)


def test_the_configuration_is_shown_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """For programs."""
    main(["config", "show", "--format", "json"])
    assert load(code=json.loads(capsys.readouterr().out)) == Config()


def test_files_are_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Valid ones by name; the first wrong one with its mistake and exit code 2."""
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("interval: 5")
    bad.write_text("intervall: 5")
    assert main(["config", "validate", str(good)]) == 0
    assert main(["config", "validate", str(good), str(bad)]) == 2
    captured = capsys.readouterr()
    assert f"{good}: valid" in captured.out
    assert "Did you mean interval?" in captured.err
    assert str(bad) in captured.err


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """For an editor."""
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["interval"]["minimum"] == 1


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["check"], ["check", "x", "--fail-on", "panic"], ["report", "--x"]])
def test_wrong_usage_exits_with_2(argv: list[str]) -> None:
    """As argparse does it."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2


def test_a_missing_directory_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, no traceback."""
    assert main(["check", "/nonexistent"]) == 2
    assert capsys.readouterr().err == "tpwatch: /nonexistent: no such run directory\n"


def break_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a bug into the report verb."""

    def bug(*_args: object, **_kwargs: object) -> None:
        message = "a bug"
        raise ZeroDivisionError(message)

    monkeypatch.setattr(cli.runs, "render", bug)


def test_an_internal_error_is_one_line_with_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 4."""
    break_report(monkeypatch)
    assert main(["report", run_directory(tmp_path)]) == 4
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "internal error: ZeroDivisionError: a bug" in err
    assert "TPWATCH_DEBUG=1" in err


def test_an_internal_error_shows_its_traceback_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TPWATCH_DEBUG=1."""
    break_report(monkeypatch)
    monkeypatch.setenv("TPWATCH_DEBUG", "1")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["report", run_directory(tmp_path)])


def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    """`tpwatch rules | head -0`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tpwatch", "config", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(timeout=60)


# ----------------------------------------------------------------------------- without torch


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from tpwatch.cli import main; "


@pytest.mark.parametrize("verb", [["rules"], ["explain", "drift"], ["config", "show"]])
def test_the_command_line_works_without_torch(verb: list[str]) -> None:
    """A recorded run is read on a laptop that has none."""
    done = run_python("-c", f"{WITHOUT_TORCH} sys.exit(main({verb!r}))")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_gate_works_without_torch(tmp_path: Path) -> None:
    """Continuous integration need not install it to judge a run."""
    directory = run_directory(tmp_path, finding())
    done = run_python("-c", f"{WITHOUT_TORCH} sys.exit(main(['check', {directory!r}]))")
    assert (done.returncode, done.stderr) == (1, "")


def test_the_doctor_copes_without_torch() -> None:
    """It says that torch cannot be imported, and goes on."""
    done = run_python("-c", f"{WITHOUT_TORCH} sys.exit(main(['doctor']))")
    assert done.returncode == 0
    assert "cannot be imported" in done.stdout
    assert "extras" in done.stdout


def test_the_package_can_be_run_as_a_module() -> None:
    """`python -m tpwatch` is the command."""
    assert run_python("-m", "tpwatch", "check", "/nonexistent").returncode == 2
