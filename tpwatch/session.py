"""Attaching.

Examine the host, agree with every rank through the store, then build the monitor and wrap the
seams.

No tpwatch collective happens before every rank of the job has said it is ready: one unattached rank
would pair our all-reduce with one of the framework's own and corrupt it silently. If any rank is
missing, disabled, of another version or configuration, all stay off, with one warning.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpwatch
from tpwatch._guard import Guard, say
from tpwatch.adapters import choose
from tpwatch.adapters.base import Adapter, Groups, Host
from tpwatch.config import Config, load
from tpwatch.diagnose import Diagnosis, layout_finding
from tpwatch.discover import Difference, Discovery, agree, discover, restrict
from tpwatch.engine import Engine
from tpwatch.errors import ConfigError
from tpwatch.exchange import Exchange
from tpwatch.export import Place
from tpwatch.export.fanout import Fanout
from tpwatch.export.jsonl import Events, RunLog, run_directory, write_meta, write_summary
from tpwatch.export.recorder import Leader, Silent, Teller
from tpwatch.export.scribe import LEISURE, in_time
from tpwatch.export.sinks import chosen
from tpwatch.fingerprint import choose as choose_fingerprinter
from tpwatch.handshake import Assembly, Meeting, default_store, next_round
from tpwatch.job import Job
from tpwatch.monitor import Monitor
from tpwatch.parts import Parts, Recorder
from tpwatch.records import WatchPlan
from tpwatch.report.summary import summarize
from tpwatch.watch import Watch


def attach(  # noqa: PLR0913 - the contract of DESIGN section 6
    model: Any,  # noqa: ANN401 - a module or a list of model chunks of any framework
    optimizer: Any,  # noqa: ANN401
    config: Config | Mapping[str, Any] | None = None,
    *,
    adapter: str = "auto",
    groups: Groups | None = None,
    mesh: Any = None,  # noqa: ANN401
) -> Watch:
    """Watch the replicated parameters of `model`.

    Call on every rank, after the optimizer exists; not a collective.

    Args:
        model: a module, or the list of model chunks of this rank.
        optimizer: the outermost optimizer, the one whose `step` the training loop calls.
        config: a `Config`, or a mapping of the keys that differ from file, environment and default.
        adapter: `"megatron"` fails loudly if Megatron-core cannot be watched; `"auto"` then runs unwatched.
        groups: process groups by axis, where they are not the framework's global ones.
        mesh: device mesh of a torch-native job; no adapter uses it yet.

    Returns:
        A `Watch`; inert (with a `reason`) if nothing is watched.

    Raises:
        ConfigError: a knob is wrong, on every rank alike.
        AdapterUnavailable: the adapter asked for by name cannot be used.
    """
    del mesh
    settings = load(code=config, env=os.environ)
    guard = Guard(settings.max_errors, debug=os.environ.get("TPWATCH_DEBUG") == "1")
    if not (dist.is_available() and dist.is_initialized()):
        return _inert(settings, guard, "torch.distributed is not initialised: one rank has nothing to compare")
    if settings.enabled:
        _check_rank(settings)
    session = guard.attempt("attach", Session, settings, guard).value
    if session is None:  # the store is gone already
        return _inert(settings, guard, f"attach failed: {guard.last_error}")
    if not settings.enabled:
        outcome = guard.attempt("attach", session.decline)
        return outcome.value or _inert(settings, guard, "disabled")
    chosen = choose(adapter if adapter != "auto" else settings.adapter)
    if chosen is None:
        return _inert(settings, guard, "no supported framework is installed (Megatron-core 0.16 to 0.19)")
    outcome = guard.attempt("attach", session.open, chosen, _chunks(model), optimizer, groups)
    if outcome.value is None:
        session.take_down()
    return outcome.value or _inert(settings, guard, f"attach failed: {guard.last_error}")


def _inert(config: Config, guard: Guard, reason: str) -> Watch:
    say(logging.WARNING, "tpwatch: not watching: %s", reason)
    return Watch(config, guard, reason=reason)


def _check_rank(config: Config) -> None:
    world, rank = dist.get_world_size(), config.wandb.rank
    if config.wandb.enabled and not -world <= rank < world:
        rule = f"must be a rank of this job of {world}, or count from its end"
        remedy = "Give the rank on which your trainer logs; -1 is the last."
        raise ConfigError(knob="wandb.rank", value=rank, rule=rule, remedy=remedy)


READING = 300.0
"""Seconds that the end of a run waits for its event files to be read: many groups leave gigabytes."""
_SWITCHED_OFF = "switched off (TPWATCH_DISABLED or enabled: false)"


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the replica group agreed on."""

    discovery: Discovery
    differences: tuple[Difference, ...]


class Session:
    """One attach.

    From the examination of the host to a Watch that is installed, or the reason why not.
    """

    def __init__(self, config: Config, guard: Guard) -> None:
        """Nothing is said yet."""
        self.config = config
        self.guard = guard
        self.rank = dist.get_rank()
        self.world = list(range(dist.get_world_size()))
        self.store = default_store()
        self.round = next_round(self.store, "attach", self.rank)
        self._teller: Teller | None = None
        self._watch: Watch | None = None

    def decline(self) -> Watch:
        """Tell the other ranks that this one is switched off, and wait for nobody."""
        meeting = Meeting(self.store, f"attach/{self.round}", self.rank, self.world, self._timeout)
        return self._off(meeting.decline(f"rank {self.rank}: {_SWITCHED_OFF}"))

    def open(self, adapter: Adapter, chunks: list[Any], optimizer: Any, groups: Groups | None) -> Watch:  # noqa: ANN401
        """Meet all ranks, agree on the plan, build, meet again, install."""
        examined = self.guard.attempt("discovery", adapter.examine, chunks, optimizer, self.config, groups)
        axis, group = adapter.group(groups)
        ranks = dist.get_process_group_ranks(group) if group else self.world
        meeting = Meeting(self.store, f"attach/{self.round}", self.rank, self.world, self._timeout)
        reason = meeting.hold(self._hello(f"{axis}-{ranks[0]}", examined.error), _disagreement)
        if reason or examined.value is None:
            return self._off(reason)
        host = examined.value
        directory = str(meeting.payload(0)["out"])
        if self.rank == 0:
            self._write_meta(host, directory, meeting)
        found = discover(host.axis, ranks, host.candidates, self.config.watch)
        for warning in found.warnings if self.rank == 0 else ():
            say(logging.WARNING, "tpwatch: %s", warning)
        agreed = self._agree_on_plan(found, ranks)
        built = self.guard.attempt("building", self._build, host, agreed, directory)
        failed = "" if built.ok else f"rank {self.rank}: {self.guard.last_error}"
        ready = Meeting(self.store, f"ready/{self.round}", self.rank, self.world, self._timeout)
        if (reason := ready.hold({"failed": failed}, _any_failed)) or built.value is None:
            return self._off(reason)
        built.value.begin()
        self.guard.attempt("the first words", self._say, built.value, agreed)
        return built.value

    def take_down(self) -> None:
        """Put the host's own objects back, and close what was opened: nothing has begun."""
        if self._watch is not None:
            self._watch.call_off()
        if self._teller is not None:
            self.guard.attempt("closing", self._teller.leave)

    # -------------------------------------------------------------------------------------- meetings

    @property
    def _timeout(self) -> float:
        return self.config.handshake_timeout

    def _hello(self, group: str, error: Exception | None) -> dict[str, Any]:
        return {
            "group": group, "failed": f"cannot attach: {error}" if error else "", "version": tpwatch.__version__,
            "config": self.config.digest(), "out": run_directory(self.config.out),
        }  # fmt: skip

    def _write_meta(self, host: Host, directory: str, meeting: Meeting) -> None:
        """`meta.json`: with the names of all groups, a reader can miss the event file of one."""
        groups = {str(said["group"]) for said in meeting.payloads().values()}
        alone = len(groups) == len(self.world)
        facts = {"tpwatch": tpwatch.__version__, "world_size": len(self.world), **host.versions}
        facts["groups"] = [f"{host.axis}-0"] if alone else sorted(groups)
        self.guard.attempt("writing meta.json", write_meta, directory, facts)

    def _agree_on_plan(self, found: Discovery, ranks: Sequence[int]) -> Agreed:
        """The plan itself if all ranks of the group have the same, else what they have in common."""
        name = f"plan/{self.round}/{ranks[0]}"
        digests = Meeting(self.store, name, self.rank, ranks, self._timeout)
        _require(digests.hold({"digest": str(found.plan.digest)}))
        if len({p["digest"] for p in digests.payloads().values()}) == 1:
            return Agreed(found, ())
        plans = Meeting(self.store, f"{name}/whole", self.rank, ranks, self._timeout)
        _require(plans.hold({"plan": found.plan.to_json()}))
        by_rank = {rank: WatchPlan.from_json(p["plan"]) for rank, p in plans.payloads().items()}
        common, differences = agree(by_rank, ranks[0])
        return Agreed(restrict(found, common), differences)

    # -------------------------------------------------------------------------------------- building

    def _build(self, host: Host, agreed: Agreed, directory: str) -> Watch:
        """All that can fail on this rank alone, before the last meeting: buffers, event file, wrapped seams."""
        monitor = self._monitor(host, agreed, directory)
        self._watch = watch = Watch(self.config, self.guard, self._engine(host, monitor, directory))
        watch.install(host.install(watch))
        return watch

    def _monitor(self, host: Host, agreed: Agreed, directory: str) -> Monitor:
        plan = agreed.discovery.plan
        fingerprinter = choose_fingerprinter(host.device, self.config.fingerprint)
        recorder = self._recorder(host, plan, directory, {"name": fingerprinter.name, "reason": fingerprinter.reason})
        parts = Parts(
            plan=plan, source=host.source(agreed.discovery.rows), exchange=Exchange(host.group),
            assembly=self._assembly(plan.ranks),
            group_rank=list(plan.ranks).index(self.rank), fingerprinter=fingerprinter,
            diagnosis=Diagnosis(plan, self.config, loss_scaler=host.loss_scaler),
            recorder=recorder, device=host.device,
        )  # fmt: skip
        return Monitor(parts, self.config, self.guard)

    def _recorder(self, host: Host, plan: WatchPlan, directory: str, fingerprint: Mapping[str, str]) -> Recorder:
        """Event file and sinks of this rank; silent on ranks that have neither."""
        alone = len(plan.ranks) == 1 and self.rank != 0
        leads = self.rank == plan.ranks[0] and not alone
        sinks = chosen(self.config, leader=leads, logs=self.rank == self.config.wandb.rank % dist.get_world_size())
        if not leads and not sinks:
            return Silent()
        incarnation = f"{self.round}-{os.getpid()}"
        fanout = Fanout(sinks, Place(self.config, Path(directory), plan.group, rank=self.rank))
        events: Events
        if leads:
            events = log = self._open_log(directory, plan.group, incarnation, fanout)
            launch_id, conclude = os.environ.get("TPWATCH_LAUNCH_ID", ""), partial(self._conclude, directory, LEISURE)
            teller: Teller = Leader(log, fanout, launch_id, conclude)
        else:
            events = Events(incarnation, lambda _event, line: fanout.hand_over(line))
            teller = Teller(events, fanout)
        versions = {
            "tpwatch": tpwatch.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        facts = {"fingerprint": fingerprint, "versions": {**versions, **host.versions}, "stage": host.stage}
        events.start(plan, self.config.start_step, self.config, **facts)
        self._teller = teller
        return teller

    @staticmethod
    def _open_log(directory: str, group: str, incarnation: str, fanout: Fanout) -> RunLog:
        try:
            return RunLog(directory, group, incarnation, fanout.hand_over)
        except OSError:
            fanout.close()  # its threads and ports would stay behind
            raise

    def _assembly(self, ranks: Sequence[int]) -> Assembly:
        return Assembly(self.round, self.rank, ranks, self._timeout)

    def _engine(self, host: Host, monitor: Monitor, directory: str) -> Engine:
        plan = monitor.parts.plan

        def close(step: int) -> None:
            if self._teller is not None:
                self._teller.close(monitor.parts.diagnosis.findings, step)

        meets = self.config.meets or self.config.checkpoint == "refuse"
        job = Job(leader=self.rank == plan.ranks[0], device=host.device) if meets else None
        everyone, conclude = self._assembly(self.world), partial(self._conclude, directory, READING)
        return Engine(monitor, job, everyone, directory, close, conclude)

    def _conclude(self, directory: str, patience: float) -> None:
        """Derive `summary.json`, on rank 0."""
        if self.rank == 0:
            in_time(lambda: write_summary(directory, summarize(directory)), patience)

    def _say(self, watch: Watch, agreed: Agreed) -> None:
        """What the user should know before the first step."""
        monitor = watch.monitor
        if monitor is None:
            return
        plan, step = monitor.parts.plan, self.config.start_step
        if self.rank == plan.ranks[0]:
            for name, reason in plan.not_watched:
                say(logging.INFO, "tpwatch: not watched: %s (%s)", name, reason)
        if not plan.replicas or len(plan.ranks) == 1:
            why = "the TP group has one rank" if len(plan.ranks) == 1 else "no replicated parameter was found"
            monitor.watching = False
            monitor.ledger.note(step, f"nothing to watch: {why}")
            say(logging.WARNING, "tpwatch: nothing to watch: %s", why)
            return
        say(logging.INFO, "tpwatch: watching %d replicas over ranks %s", len(plan.replicas), list(plan.ranks))
        monitor.report(step, [layout_finding(plan, d.parameter, d.what, step) for d in agreed.differences])

    def _off(self, reason: str) -> Watch:
        """Stay off: one warning for the job, not one per rank. What was built is taken down again."""
        self.take_down()
        level = logging.WARNING if self.rank == 0 else logging.DEBUG
        say(level, "tpwatch: off on all ranks: %s. Training goes on unwatched.", reason)
        return Watch(self.config, self.guard, reason=reason)


def _chunks(model: Any) -> list[Any]:  # noqa: ANN401
    return list(model) if isinstance(model, (list, tuple)) else [model]


def _require(reason: str) -> None:
    if reason:
        raise RuntimeError(reason)


def _disagreement(heard: Mapping[int, Mapping[str, Any]]) -> str:
    """Why this job cannot be watched, from what the ranks said so far."""
    first = heard[min(heard)]
    for rank, said in heard.items():
        if said["failed"]:
            return f"rank {rank}: {said['failed']}"
        for key in ("version", "config"):
            if said[key] != first[key]:
                return f"rank {rank} has another {key} ({said[key]}) than rank {min(heard)} ({first[key]})"
    return ""


def _any_failed(heard: Mapping[int, Mapping[str, Any]]) -> str:
    return next((str(said["failed"]) for said in heard.values() if said["failed"]), "")


__all__ = ["Session", "attach"]
