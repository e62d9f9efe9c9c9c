"""The sink in the trainer's own run: real runs of W&B without a network, read back from the file that they record."""

from __future__ import annotations

import itertools
import json
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import _runs
from tests.export._wandb import Recorded, recorded
from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config, Wandb
from tpwatch.errors import ConfigError
from tpwatch.export import Place
from tpwatch.export.fanout import Fanout
from tpwatch.export.jsonl import Events
from tpwatch.export.sinks import chosen
from tpwatch.export.wandb import COLUMNS, MOST_ALERTS, MOST_ROWS, SCALARS, STEP, TABLE, WandbSink

wandb = pytest.importorskip("wandb")

pytestmark = pytest.mark.timeout(60)

FAULT_ELSEWHERE = str(Path(__file__).parent / "scripts" / "fault_elsewhere.py")
OWN = f"{SCALARS}/"


class Watched:
    """What a watched rank of the group tp-2 says, and the sink that hears it."""

    def __init__(self, directory: Path, **knobs: Any) -> None:
        """The watch begins."""
        config = Config(wandb=Wandb(enabled=True, **knobs))
        self.directory = directory / "run"
        self.sink = WandbSink(Place(config, self.directory, "tp-2", rank=2))
        self.say = Events("1-1", lambda _event, line: self.sink.write(json.loads(line)))
        self.say.start(plan("a", "b", first_rank=2), 0, config)

    def job(self, step: int, **counts: int) -> None:
        """What the job as a whole has found; an underscore in the name of a kind is a hyphen."""
        self.say.job(step, job(**counts))

    def close(self, step: int = 9) -> None:
        """The watch ends."""
        self.say.end(step)
        self.sink.close()


def job(**counts: int) -> dict[str, Any]:
    """What an event says about the whole job."""
    kinds = {kind.replace("_", "-"): count for kind, count in counts.items()}
    return {"counts": kinds, "ratio": 2.0, "max_abs": 0.5, "stopping": False}


Trainer = Callable[..., Any]


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    """Open the trainer's run, which is finished at the latest after the test."""
    values = {"MODE": "offline", "SILENT": "true", "ERROR_REPORTING": "false"}
    values |= dict.fromkeys(("CACHE_DIR", "CONFIG_DIR", "DATA_DIR"), str(tmp_path))
    for name, value in values.items():
        monkeypatch.setenv(f"WANDB_{name}", value)

    def init(directory: Path = tmp_path) -> Any:
        settings = wandb.Settings(console="off", x_disable_stats=True, disable_git=True)
        return wandb.init(project="p", dir=directory, settings=settings)

    yield init
    wandb.finish()


@pytest.fixture(scope="module", autouse=True)
def _service() -> Iterator[None]:
    """End the process that writes for W&B."""
    yield
    wandb.teardown()


def ended(directory: Path) -> Recorded:
    """Finish the trainer's run and read it back."""
    wandb.finish()
    return recorded(directory)


def without_ours(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row that are the trainer's."""
    return {name: value for name, value in row.items() if not name.startswith(("tpwatch/", "_"))}


# --------------------------------------------------------------------------------- the trainer's rows


@pytest.mark.parametrize("explicit", [True, False])
def test_rows_of_the_trainer_are_all_kept(explicit: bool, trainer: Trainer, tmp_path: Path) -> None:  # noqa: FBT001
    """A hundred rows, with and without a step of their own, while the sink logs without a pause on another thread."""
    run = trainer()
    sink = WandbSink(Place(Config(wandb=Wandb(enabled=True)), tmp_path, "tp-0"))
    over, told = threading.Event(), itertools.count(1)

    def tell() -> None:
        while not over.is_set():
            sink.write({"event": "job", "step": next(told), **job()})
        sink.close()

    thread = threading.Thread(target=tell)
    thread.start()
    for step in range(1, 101):
        row = {"loss": 1.0 / step, "lr": 0.1 * step}
        if explicit:
            run.log(row, step=step)
        else:
            run.log(row)
        time.sleep(0.002)
    over.set()
    thread.join(10)
    found = ended(tmp_path)
    theirs = [row for row in found.rows if "loss" in row]
    assert [without_ours(row) for row in theirs] == [{"loss": 1.0 / s, "lr": 0.1 * s} for s in range(1, 101)]
    if explicit:
        assert [row["_step"] for row in theirs] == list(range(1, 101))
    # At most one row before the trainer's first and one behind its last are ours alone.
    assert len(found.rows) - len(theirs) <= 2
    assert len(found.column(STEP)) > 20
    assert found.column(STEP)[-1] == next(told) - 1


def test_a_watch_that_ends_leaves_the_step_open(trainer: Trainer, tmp_path: Path) -> None:
    """What the trainer logs for the same step after the end of the watch still goes into the same row."""
    run = trainer()
    watched = Watched(tmp_path)
    run.log({"loss": 0.5}, step=7)
    watched.job(7, drift=1)
    watched.close()
    run.log({"validation": 0.25}, step=7)
    (row,) = [row for row in ended(tmp_path).rows if "loss" in row]
    assert without_ours(row) == {"loss": 0.5, "validation": 0.25}
    assert row[OWN + "faults"] == 1


# --------------------------------------------------------------------------------- what is logged


def test_scalars_have_a_step_of_their_own(trainer: Trainer, tmp_path: Path) -> None:
    """Own group and whole job in the row that the trainer has open, against the step that was checked."""
    trainer().log({"loss": 1.0}, step=40)
    watched = Watched(tmp_path)
    differing = {"param": 1, "grad_pre": 5, "grad_post": 2}
    watched.say.check(step_report(6, differing=differing, ratio_lo=0.5, ratio_hi=math.inf, seconds=0.25))
    watched.say.finding(6, finding(ranks=(2, 3)))
    watched.job(6, double_reduce=3, drift=1)
    found = ended(tmp_path)
    (row,) = found.rows
    scalars = {name.removeprefix(OWN): value for name, value in row.items() if name.startswith(OWN)}
    assert scalars == {
        "faults": 4, "faults_double_reduce": 3, "faults_drift": 1, "worst_ratio": 2.0, "worst_max_abs": 0.5,
        "faulty_parameters": 1, "differing_param": 1, "differing_grad_pre": 5, "differing_grad_post": 2,
        "ratio_lo": 0.5, "ratio_hi": math.inf, "check_seconds": 0.25,
    }  # fmt: skip
    assert (row["loss"], row["_step"], row[STEP]) == (1.0, 40, 6)
    assert found.step_metrics[f"{SCALARS}/*"] == STEP


def test_the_table_has_causes_first_and_an_end(trainer: Trainer, tmp_path: Path) -> None:
    """Every column of every finding, the worst on top, and no more than the limit."""
    trainer()
    watched = Watched(tmp_path)
    for i in range(MOST_ROWS):
        watched.say.finding(3, finding(parameter=f"c{i}", role="consequence", caused_by="b", ranks=(2, 3)))
    watched.say.finding(3, finding(parameter="w", severity="warning", ratio=None, ranks=(2, 3), max_abs=math.inf))
    watched.say.finding(3, finding(parameter="b", first_step=2, ranks=(2, 3)))
    watched.say.finding(3, finding(parameter="a", first_step=1, ranks=(2, 3)))
    watched.close()
    rows = ended(tmp_path).table(TABLE)
    assert [row["parameter"] for row in rows[:4]] == ["a", "b", "w", "c0"]
    assert len(rows) == MOST_ROWS
    assert rows[0] == {
        "kind": "double-reduce", "code": "TPW104", "parameter": "a", "group": "tp-2", "ranks": "2, 3", "first_step": 1,
        "last_step": 6, "severity": "error", "role": "cause", "ratio": 2.0, "max_abs": 0.0, "advice": "Reduce it once.",
    }  # fmt: skip
    assert tuple(rows[2]) == COLUMNS
    assert rows[2]["ratio"] is rows[2]["max_abs"] is None


def test_the_table_is_logged_again_only_when_it_has_changed(trainer: Trainer, tmp_path: Path) -> None:
    """Five rows of the trainer, two states of the table."""
    run = trainer()
    watched = Watched(tmp_path)
    for step, last in enumerate((1, 1, 1, 4, 4), start=1):
        run.log({"loss": 1.0}, step=step)
        watched.say.finding(step, finding(last_step=last))
        watched.job(step, double_reduce=step)
    watched.close()
    found = ended(tmp_path)
    assert found.column(OWN + "faults") == [1, 2, 3, 4, 5]
    assert [row["_step"] for row in found.rows if TABLE in row] == [1, 4]
    assert [row["last_step"] for row in found.table(TABLE)] == [4]


def test_of_a_burst_of_checks_the_last_is_logged(trainer: Trainer, tmp_path: Path) -> None:
    """Checks that come in faster than anybody logs do not leave the numbers of an early one behind."""
    trainer().log({"loss": 1.0}, step=1)
    watched = Watched(tmp_path)
    for step in range(1, 51):
        watched.say.check(step_report(step, seconds=step))
    watched.close(50)
    (row,) = ended(tmp_path).rows
    assert (row[STEP], row[OWN + "check_seconds"]) == (50, 50)


# ------------------------------------------------------------------------------------------ alerts


def test_each_new_fault_is_an_alert_once(trainer: Trainer, tmp_path: Path) -> None:
    """Causes of warning or error, with their severity; neither notices nor consequences."""
    trainer()
    watched = Watched(tmp_path)
    for step in (1, 2):
        watched.say.finding(step, finding(parameter="a"))
        watched.say.finding(step, finding(parameter="b", severity="warning"))
        watched.say.finding(step, finding(parameter="c", severity="info"))
        watched.say.finding(step, finding(parameter="d", role="consequence", caused_by="a"))
    watched.job(2, double_reduce=2)
    watched.close()
    alerts = ended(tmp_path).alerts
    assert [(title, level) for title, _, level in alerts] == [
        ("tpwatch: double-reduce of a", "ERROR"),
        ("tpwatch: double-reduce of b", "WARN"),
    ]
    assert alerts[0][1] == "TPW104 since step 1 on ranks 0, 1. Reduce it once."


def test_a_fault_of_another_group_is_an_alert_by_kind(trainer: Trainer, tmp_path: Path) -> None:
    """Kinds that the own group has are known from their findings already; each other kind is said once."""
    trainer()
    watched = Watched(tmp_path)
    watched.say.finding(1, finding(parameter="a"))
    for step in (1, 2, 3):
        watched.job(step, double_reduce=2, drift=step)
    watched.close()
    own, elsewhere = ended(tmp_path).alerts
    assert own[0] == "tpwatch: double-reduce of a"
    assert elsewhere[0] == "tpwatch: drift in another replica group"
    assert str(watched.directory) in elsewhere[1]


def test_alerts_are_bounded(trainer: Trainer, tmp_path: Path) -> None:
    """The last one says that it is the last."""
    trainer()
    watched = Watched(tmp_path)
    for i in range(MOST_ALERTS + 5):
        watched.say.finding(1, finding(parameter=f"p{i}"))
    watched.close()
    titles = [title for title, _, _ in ended(tmp_path).alerts]
    assert titles == [*(f"tpwatch: double-reduce of p{i}" for i in range(MOST_ALERTS)), "tpwatch: no more alerts"]


def test_alerts_can_be_switched_off(trainer: Trainer, tmp_path: Path) -> None:
    """The numbers are logged all the same."""
    trainer()
    watched = Watched(tmp_path, alerts=False)
    watched.say.finding(1, finding())
    watched.job(1, double_reduce=1, drift=1)
    watched.close()
    found = ended(tmp_path)
    assert found.alerts == []
    assert found.column(OWN + "faults") == [2]


# ----------------------------------------------------------------------------- runs that come and go


def test_a_run_that_is_opened_late_gets_what_was_found_before(trainer: Trainer, tmp_path: Path) -> None:
    """The latest numbers, the table and the alerts."""
    watched = Watched(tmp_path)
    watched.say.finding(1, finding())
    watched.job(1, double_reduce=1)
    trainer().log({"loss": 1.0}, step=2)
    watched.say.note(2, "something else")
    found = ended(tmp_path)
    (row,) = found.rows
    assert (row["loss"], row[OWN + "faults"]) == (1.0, 1)
    assert len(found.table(TABLE)) == len(found.alerts) == 1


def test_a_second_run_gets_what_is_known(trainer: Trainer, tmp_path: Path) -> None:
    """A trainer that goes on in another run sees the same numbers and findings there; alerts are not repeated."""
    watched = Watched(tmp_path)
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        trainer(tmp_path / name).log({"loss": 1.0}, step=1)
        watched.say.finding(1, finding())
        if name == "first":
            watched.job(1, double_reduce=1)
        watched.say.status(1, [], [])
        found.append(ended(tmp_path / name))
    first, second = found
    assert first.column(OWN + "faults") == second.column(OWN + "faults") == [1]
    assert len(first.table(TABLE)) == len(second.table(TABLE)) == 1
    assert second.step_metrics == first.step_metrics
    assert (len(first.alerts), len(second.alerts)) == (1, 0)


def test_a_run_that_is_finished_first_is_left_alone(
    trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is being finished and afterwards: nothing is added, nothing raises."""
    caplog.set_level(logging.INFO, "tpwatch")
    run = trainer()
    watched = Watched(tmp_path)
    watched.job(1)
    run.log({"loss": 1.0}, step=1)
    with monkeypatch.context() as patch:
        found = ended(tmp_path)
        patch.setattr(wandb, "run", run)  # so it is until everything is uploaded
        watched.job(2, drift=1)
    watched.job(3, drift=2)
    watched.close()
    assert found.column(OWN + "faults") == [0]
    assert recorded(tmp_path) == found
    assert "was finished first" in caplog.text


def test_a_process_without_a_run_gets_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It names that rank, and the knob that says which one has the run."""
    watched = Watched(tmp_path, rank=-2)
    watched.say.finding(1, finding())
    watched.job(1, double_reduce=1)
    watched.close()
    (record,) = caplog.records
    assert "no run was open in the process of rank 2 (wandb.rank)" in record.getMessage()


def test_a_run_that_refuses_costs_only_its_own_events(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sink hears everything, the trainer's rows are there, and the failures are counted."""

    class Broken:
        """A run whose log always fails."""

        def __init__(self, run: Any) -> None:
            self.define_metric, self.alert = run.define_metric, run.alert

        def log(self, data: object, *, commit: bool) -> None:
            """Fail."""
            del data, commit
            message = "the disk is full"
            raise OSError(message)

    run = trainer()
    monkeypatch.setattr(wandb, "run", Broken(run))
    config = Config(wandb=Wandb(enabled=True), sinks=("tests.export._sinks:Lists",))
    place = Place(config, tmp_path, "tp-0")
    fanout = Fanout(chosen(config, leader=True, logs=True), place)
    say = Events("1-1", lambda _event, line: fanout.hand_over(line))
    for step in (1, 2, 3):
        say.job(step, job())
        run.log({"loss": 1.0 / step}, step=step)
    fanout.close()
    monkeypatch.undo()
    assert place.health.losses["wandb"].errors == 4  # three events and the close
    assert (tmp_path / "kinds.tp-0").read_text().split() == ["job", "job", "job", "closed"]
    run.finish()
    assert recorded(tmp_path).column("loss") == [1.0, 0.5, 1.0 / 3]


# ------------------------------------------------------------------------------------- whole programs


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start of the run, not at its end."""

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(ConfigError, match=r"wandb.enabled = True: needs wandb.*pip install 'tpwatch\[wandb\]'"):
        WandbSink(Place(Config(), tmp_path, "tp-0"))


def test_the_sink_imports_nothing() -> None:
    """Neither with tpwatch nor by being built does W&B get into a process."""
    code = (
        "import sys, tpwatch; from pathlib import Path; from tpwatch.config import Config; "
        "from tpwatch.export import Place; from tpwatch.export.wandb import WandbSink; "
        "sink = WandbSink(Place(Config(), Path(), 'tp-0')); sink.write({'event': 'end', 'step': 1}); sink.close(); "
        "print(sorted(name for name in sys.modules if name.startswith('wandb')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.megatron
@pytest.mark.timeout(240)
def test_the_rank_that_logs_shows_a_fault_of_another_group(tmp_path: Path) -> None:
    """DP2xTP2, fault in group 0 only, run on rank 3: counts and worst ratio of the job, none of the own group."""
    env = {"WANDB_CACHE_DIR": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    ended = _runs.ranks([FAULT_ELSEWHERE, str(tmp_path)], 4, env=[env] * 4, timeout=150)
    assert ended.codes == [0] * 4, ended.output
    faulty = _runs.faulty("ple-double-sum", _runs.watched(tmp_path / "run"))
    found = recorded(tmp_path)
    assert found.column("lm loss") == [1.0 / step for step in range(1, 8)]
    last = [row for row in found.rows if OWN + "faults" in row][-1]
    assert last[OWN + "faults_double_reduce"] == last[OWN + "faults"] == len(faulty)
    assert last[OWN + "worst_ratio"] == pytest.approx(2.0, rel=1e-2)
    assert last[OWN + "faulty_parameters"] == 0
    assert [title for title, _, _ in found.alerts] == ["tpwatch: double-reduce in another replica group"]
    assert TABLE not in last
