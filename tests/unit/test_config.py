"""Configuration: types, limits, unknown names, precedence of the sources, schema, sample files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest

from tpwatch.config import Action, Config, Prometheus, Thresholds, WatchSelection, env_names, load, schema
from tpwatch.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def failure(**sources: Any) -> ConfigError:
    """The error that loading from these sources raises."""
    with pytest.raises(ConfigError) as caught:
        load(**sources)
    return caught.value


def yaml_file(tmp_path: Path, text: str) -> Path:
    """A YAML file with this text."""
    path = tmp_path / "tpwatch.yaml"
    path.write_text(text)
    return path


# ----------------------------------------------------------------------------------- precedence


def test_each_source_beats_the_ones_below_it(tmp_path: Path) -> None:
    """Code over command line over environment over file over defaults, knob by knob."""
    file = yaml_file(tmp_path, "{warmup: 1, interval: 1, patience: 1, seed: 1}")
    env = {"TPWATCH_INTERVAL": "2", "TPWATCH_PATIENCE": "2", "TPWATCH_SEED": "2"}
    config = load(code={"seed": 4}, cli={"patience": 3, "seed": 3}, env=env, file=file)
    assert (config.warmup, config.interval, config.patience, config.seed) == (1, 2, 3, 4)
    assert config.deep_interval == Config().deep_interval


def test_sections_are_merged_knob_by_knob(tmp_path: Path) -> None:
    """One source may set one threshold and another source another."""
    file = yaml_file(tmp_path, "thresholds: {max_abs: 0.5, ratio: 3}")
    config = load(env={"TPWATCH_THRESHOLDS__MAX_ABS": "0.25"}, file=file)
    assert config.thresholds == Thresholds(max_abs=0.25, ratio=3.0)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    """TPWATCH_CONFIG names the file."""
    file = yaml_file(tmp_path, "interval: 7")
    assert load(env={"TPWATCH_CONFIG": str(file)}).interval == 7


def test_a_file_named_by_the_caller_beats_the_environment(tmp_path: Path) -> None:
    """TPWATCH_CONFIG is not even read if the caller names a file."""
    file = yaml_file(tmp_path, "interval: 7")
    assert load(env={"TPWATCH_CONFIG": "/nonexistent"}, file=file).interval == 7


def test_a_config_object_in_code_is_complete() -> None:
    """A knob that a `Config` leaves at its default is not filled from elsewhere."""
    env = {"TPWATCH_INTERVAL": "5", "TPWATCH_THRESHOLDS__MAX_ABS": "1"}
    assert load(code=Config(patience=2), env=env) == Config(patience=2)


def test_a_config_object_without_a_directory_takes_it_from_the_environment() -> None:
    """`out=None` means "not chosen": `tpwatch run --out` still decides where results go."""
    assert load(code=Config(), env={"TPWATCH_OUT": "runs/a"}).out == "runs/a"
    assert load(code=Config(out="b"), env={"TPWATCH_OUT": "runs/a"}).out == "b"


def test_an_option_that_was_not_given_decides_nothing() -> None:
    """An argument parser leaves None for it."""
    assert load(cli={"interval": None}, env={"TPWATCH_INTERVAL": "5"}).interval == 5


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_the_kill_switch_wins_over_code(text: str) -> None:
    """TPWATCH_DISABLED beats even an explicit `enabled=True`."""
    assert load(code=Config(enabled=True), env={"TPWATCH_DISABLED": text}).enabled is False


def test_the_kill_switch_wins_over_mistakes_in_other_sources() -> None:
    """Whoever switches tpwatch off must not be stopped by its configuration."""
    env = {"TPWATCH_DISABLED": "1", "TPWATCH_CONFIG": "/nonexistent", "TPWATCH_NONSENSE": "1"}
    assert load(env=env).enabled is False


@pytest.mark.parametrize("text", ["0", "false", ""])
def test_a_kill_switch_that_is_off_changes_nothing(text: str) -> None:
    """TPWATCH_DISABLED=0 is the same as not setting it."""
    assert load(env={"TPWATCH_DISABLED": text}) == Config()


# ---------------------------------------------------------------------------------- environment


def test_every_knob_has_its_environment_variable() -> None:
    """Names are one-to-one with the keys, `__` for nesting."""
    names, config = env_names(), Config()
    flat = {f.name for f in dataclasses.fields(Config) if not dataclasses.is_dataclass(getattr(config, f.name))}
    assert flat <= set(names.values())
    assert names["TPWATCH_THRESHOLDS__REL_FLOOR"] == "thresholds.rel_floor"
    assert len(set(names.values())) == len(names)


def test_environment_values_are_read_by_the_type_of_their_knob() -> None:
    """Truth values, numbers, unset, lists and mappings."""
    config = load(
        env={
            "TPWATCH_ENABLED": "no",
            "TPWATCH_INTERVAL": "10",
            "TPWATCH_HANDSHAKE_TIMEOUT": "1e1",
            "TPWATCH_THRESHOLDS__MAX_ABS": "none",
            "TPWATCH_WATCH__INCLUDE": "decoder.*, *.norm",
            "TPWATCH_WATCH__DECLARE": "*.a=sum,*.b=avg",
        }
    )
    assert config.enabled is False
    assert (config.interval, config.handshake_timeout) == (10, 10.0)
    assert config.thresholds.max_abs is None
    assert config.watch == WatchSelection(include=("decoder.*", "*.norm"), declare={"*.a": "sum", "*.b": "avg"})


def test_an_unknown_environment_variable_is_an_error_with_the_nearest_name() -> None:
    """A typo would otherwise change nothing and say nothing."""
    error = failure(env={"TPWATCH_INTERVALL": "5"})
    assert error.knob == "TPWATCH_INTERVALL"
    assert "Did you mean TPWATCH_INTERVAL?" in str(error)


def test_reserved_and_foreign_environment_variables_are_left_alone() -> None:
    """Names of the launcher, of the test suite and of other programs are no knobs."""
    env = {
        "TPWATCH_DEBUG": "1",
        "TPWATCH_LAUNCH_ID": "x",
        "TPWATCH_TEST_ANYTHING": "1",
        "TPWATCHER": "1",
        "HOME": "/root",
    }
    assert load(env=env) == Config()


# --------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("values", "knob", "rule"),
    [
        ({"interval": 0}, "interval", "at least 1"),
        ({"interval": "often"}, "interval", "whole number"),
        ({"interval": True}, "interval", "whole number"),
        ({"interval": 1.5}, "interval", "whole number"),
        ({"warmup": -1}, "warmup", "at least 0"),
        ({"enabled": 1}, "enabled", "true or false"),
        ({"out": 3}, "out", "text"),
        ({"handshake_timeout": 0}, "handshake_timeout", "above 0"),
        ({"handshake_timeout": float("nan")}, "handshake_timeout", "finite"),
        ({"thresholds": {"max_abs": "small"}}, "thresholds.max_abs", "finite number"),
        ({"thresholds": {"max_rel": -1.0}}, "thresholds.max_rel", "at least 0"),
        ({"thresholds": 3}, "thresholds", "section"),
        ({"watch": {"include": "decoder.*"}}, "watch.include", "list"),
        ({"watch": {"declare": ["*.a"]}}, "watch.declare", "map patterns"),
        ({"watch": {"declare": {"*.a": "mean"}}}, "watch.declare['*.a']", "one of sum, avg"),
        ({"on_fault": False}, "on_fault", "one of ignore, log, warn, callback, abort"),
        ({"prometheus": {"port": 65536}}, "prometheus.port", "at most 65535"),
        ({"prometheus": {"tls_cert": "a.pem"}}, "prometheus.tls_cert", "goes with prometheus.tls_key"),
        ({"sinks": "wandb"}, "sinks", "list"),
    ],
)
def test_a_bad_value_is_an_error_with_knob_value_and_rule(values: dict[str, Any], knob: str, rule: str) -> None:
    """Every type and every limit is checked, in sections too."""
    error = failure(code=values)
    assert error.knob == knob
    assert rule in error.rule
    assert error.remedy


def test_values_are_checked_when_a_config_is_built_directly() -> None:
    """There is no way round the checks."""
    with pytest.raises(ConfigError, match=r"thresholds\.ratio = 0"):
        Config(thresholds=Thresholds(ratio=0))


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ({"intervall": 3}, "interval"),
        ({"thresholds": {"max_abz": 3}}, "thresholds.max_abs"),
        ({"on_fault": "abrt"}, "abort"),
        ({"on_fault": "calback"}, "callback"),
        ({"policies": {"drift:*": "callbak"}}, "callback"),
        ({"fingerprint": "tritn"}, "triton"),
    ],
)
def test_a_misspelt_name_is_an_error_with_the_nearest_one(values: dict[str, Any], nearest: str) -> None:
    """Keys and choices alike."""
    assert f"Did you mean {nearest}?" in str(failure(code=values))


def test_a_name_that_resembles_nothing_is_an_error_with_all_valid_ones() -> None:
    """No guess is better than a wild one."""
    assert "Valid: enabled, adapter, out" in str(failure(code={"zzz": 1}))


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    """Whoever has three sources must know which one to mend."""
    file = yaml_file(tmp_path, "intervall: 3")
    assert f"Given in file {file}" in str(failure(file=file))


def test_a_yaml_syntax_error_names_its_line(tmp_path: Path) -> None:
    """The third line is broken here."""
    file = yaml_file(tmp_path, "interval: 3\nwarmup: 2\nwatch: [a, b\n")
    error = failure(file=file)
    assert str(file) in str(error)
    assert "line 3" in str(error) or "line 4" in str(error)


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    """Not a traceback about a file."""
    assert "cannot be read" in str(failure(file=tmp_path / "nothing.yaml"))


def test_a_file_that_is_no_mapping_is_a_configuration_error(tmp_path: Path) -> None:
    """A list at the top level has no keys."""
    assert "mapping" in str(failure(file=yaml_file(tmp_path, "- interval\n")))


def test_yaml_cannot_build_objects(tmp_path: Path) -> None:
    """The safe loader refuses tags that would run code."""
    file = yaml_file(tmp_path, "out: !!python/object/apply:os.getcwd []\n")
    assert "not valid YAML" in str(failure(file=file))


def test_an_empty_file_and_an_empty_section_change_nothing(tmp_path: Path) -> None:
    """A file of which every line is commented out is legal."""
    assert load(file=yaml_file(tmp_path, "# nothing\n")) == Config()
    assert load(file=yaml_file(tmp_path, "thresholds:\n  # max_abs: 1\n")) == Config()


def test_exponents_without_a_point_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-3 as text; people write it as a number."""
    assert load(file=yaml_file(tmp_path, "thresholds: {max_abs: 1e-3}")).thresholds.max_abs == 0.001


# --------------------------------------------------------------------------------------- methods


def test_first_steps_are_all_checked_then_every_interval() -> None:
    """Warm-up counts from the step before the first watched one."""
    config = Config(warmup=3, interval=10)
    checked = [step for step in range(101, 131) if config.checked(step, start=100)]
    assert checked == [101, 102, 103, 110, 120, 130]


def test_the_digest_depends_on_every_knob_but_where_results_go() -> None:
    """Ranks may write elsewhere, and export by their node's own address; anything else must agree."""
    base = Config()
    assert Config(out="elsewhere").digest() == base.digest()
    assert Config(prometheus=Prometheus(enabled=True, port=1), sinks=("a",)).digest() == base.digest()
    changed = [
        Config(enabled=False),
        Config(interval=2),
        Config(seed=1),
        Config(thresholds=Thresholds(max_abs=0.1)),
        Config(watch=WatchSelection(exclude=("a",))),
    ]
    assert len({config.digest() for config in [base, *changed]}) == 1 + len(changed)


def test_the_digest_depends_on_the_order_of_declarations() -> None:
    """The last match wins, so order is meaning."""
    one = Config(watch=WatchSelection(declare={"*.a": "sum", "*": "avg"}))
    other = Config(watch=WatchSelection(declare={"*": "avg", "*.a": "sum"}))
    assert one.digest() != other.digest()


@pytest.mark.parametrize("action", get_args(Action))
def test_only_an_action_that_stops_makes_the_job_meet(action: Any) -> None:
    """As the general one, and as that of one pattern."""
    stops = action in ("abort", "checkpoint_then_abort")
    for config in (load(code={"on_fault": action}), load(env={"TPWATCH_POLICIES": f"drift:*={action}"})):
        assert config.can_stop is stops
        assert config.meets is stops


def test_a_config_survives_its_mapping() -> None:
    """`to_mapping` holds everything."""
    config = Config(interval=3, watch=WatchSelection(declare={"*.a": "sum"}))
    assert load(code=config.to_mapping()) == config


# ---------------------------------------------------------------------------------------- schema


def test_the_schema_describes_every_knob() -> None:
    """An editor shows the docstring of a knob, its type, limit, choices and default."""
    properties = schema()["properties"]
    assert set(properties) == {f.name for f in dataclasses.fields(Config)}
    assert properties["interval"]["minimum"] == 1
    assert properties["interval"]["default"] == 1
    assert properties["on_fault"]["enum"] == ["ignore", "log", "warn", "callback", "abort", "checkpoint_then_abort"]
    assert properties["handshake_timeout"]["exclusiveMinimum"] == 0
    assert properties["watch"]["properties"]["include"]["default"] == ["*"]
    assert properties["thresholds"]["additionalProperties"] is False


def test_every_knob_is_documented() -> None:
    """No description is empty, in sections either."""
    properties = schema()["properties"]
    nested = [p for s in properties.values() for p in s.get("properties", {}).values()]
    assert all(entry["description"] for entry in [*properties.values(), *nested])


# --------------------------------------------------------------------------------- sample files


def test_the_minimal_sample_checks_every_tenth_step() -> None:
    """configs/minimal.yaml loads and says what its comments say."""
    config = load(file=CONFIGS / "minimal.yaml")
    assert (config.on_fault, config.warmup, config.interval) == ("warn", 10, 10)


def test_the_megatron_sample_asks_for_megatron_by_name() -> None:
    """configs/megatron.yaml loads and differs from the defaults in the adapter alone."""
    assert load(file=CONFIGS / "megatron.yaml") == Config(adapter="megatron")


def test_the_paranoid_sample_stops_at_the_first_difference() -> None:
    """configs/paranoid.yaml loads and is as strict as it says."""
    config = load(file=CONFIGS / "paranoid.yaml")
    assert (config.on_fault, config.guard, config.patience) == ("abort", "before_update", 1)
    assert config.thresholds.max_abs == 0.0


def test_every_sample_file_has_a_test() -> None:
    """A sample nobody loads rots."""
    assert {p.name for p in CONFIGS.glob("*")} == {"minimal.yaml", "megatron.yaml", "paranoid.yaml"}
