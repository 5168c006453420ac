from __future__ import annotations

from dataclasses import asdict, dataclass, field

import pytest

from ddp_sdk.errors import UserError
from ddp_trainer.config.run import RunConfig
from ddp_trainer.data import DATASETS
from ddp_trainer.models import MODELS
from ddp_trainer.options import SettingsGroup, build, merge, option, options


@dataclass(frozen=True)
class Inner(SettingsGroup, group="inner"):
    size: int = option(3, "how big", at_least=1, below=100)
    rate: float = option(0.5, "how fast", above=0)
    kinds: tuple[str, ...] = option((), "which")
    mode: str = option("a", "how", choices=("a", "b"))
    limit: float | None = option(None, "at most")


@dataclass(frozen=True)
class Outer(SettingsGroup):
    on: bool = option(False, "whether")
    inner: Inner = field(default_factory=Inner)


def test_every_setting_has_flag_of_its_own() -> None:
    flags = [item.flag for item in options(RunConfig)]
    assert len(flags) == len(set(flags))
    reserved = {"--preset", "--config", "--as-published", "--help"}
    assert not reserved & set(flags)


def test_condition_of_each_setting_names_setting_and_its_choices() -> None:
    known = {item.key: item for item in options(RunConfig)}
    for item in known.values():
        assert item.help
        for key, values in item.only.items():
            names = {"model.name": MODELS, "data.name": DATASETS}.get(key, known[key].choices or ())
            assert set(values) <= set(names)


def test_config_round_trips_through_plain_data() -> None:
    config = Outer(True, Inner(4, 0.25, ("x", "y"), "b", 1.0))
    assert build(Outer, asdict(config)) == config


def test_merge_overrides_values_without_changing_inputs() -> None:
    base = {"a": 1, "inner": {"x": 1, "y": 2}}
    overlay = {"inner": {"y": 3}}
    assert merge(base, overlay) == {"a": 1, "inner": {"x": 1, "y": 3}}
    assert base == {"a": 1, "inner": {"x": 1, "y": 2}}
    assert overlay == {"inner": {"y": 3}}


@pytest.mark.parametrize(("value", "number"), [(1, 1.0), ("1e-3", 0.001)])  # YAML 1.1 parses the second one as text
def test_whole_number_and_text_are_accepted_for_float(value: object, number: float) -> None:
    assert build(Outer, {"inner": {"rate": value}}).inner.rate == number


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"iner": {}}, "iner: unknown setting; did you mean 'inner'?"),
        ({"inner": {"sise": 1}}, "inner.sise: unknown setting; did you mean 'inner.size'?"),
        ({"inner": 3}, "inner: 3 is not a mapping"),
        ({"inner": {"size": "big"}}, "inner.size: 'big' is not a whole number"),
        ({"inner": {"size": True}}, "inner.size: True is not a whole number"),
        ({"inner": {"size": None}}, "inner.size: must not be empty"),
        ({"inner": {"rate": "fast"}}, "inner.rate: 'fast' is not a number"),
        ({"inner": {"kinds": 3}}, "inner.kinds: 3 is not a list"),
        ({"inner": {"mode": "c"}}, "inner.mode: 'c' is not known; choose from a, b"),
        ({"inner": {"size": 0}}, "inner.size: 0 is out of range; it must be at least 1 and below 100"),
        ({"inner": {"size": 100}}, "inner.size: 100 is out of range; it must be at least 1 and below 100"),
        ({"inner": {"rate": 0}}, "inner.rate: 0.0 is out of range; it must be above 0"),
        ({"inner": {"rate": float("nan")}}, "inner.rate: nan is out of range"),
        ({"inner": {"rate": float("inf")}}, "inner.rate: inf is out of range"),
        ({"inner": {"rate": 10**400}}, "inner.rate: inf is out of range"),
        ({"inner": {"size": 10**400}}, "inner.size: 10000000000000000000… (401 digits) is out of range"),
        ({"on": "maybe"}, "on: 'maybe' is not true or false"),
    ],
)
def test_invalid_value_is_named_with_remedy(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        build(Outer, values)
    assert str(caught.value).startswith(message)


def test_flags_are_parsed_by_type_of_their_setting() -> None:
    by_key = {item.key: item for item in options(Outer)}
    assert by_key["inner.size"].parse("7") == 7
    assert by_key["inner.rate"].parse("7") == 7.0
    assert by_key["inner.kinds"].parse("crop, flip") == ("crop", "flip")
    assert by_key["inner.limit"].parse("none") is None
    assert by_key["on"].parse("yes") is True
    assert by_key["on"].parse("false") is False
    with pytest.raises(UserError, match="'x' is not a whole number"):
        build(Outer, {"inner": {"size": by_key["inner.size"].parse("x")}})
    with pytest.raises(UserError, match="'x' is not true or false"):
        build(Outer, {"on": by_key["on"].parse("x")})


def test_too_large_seed_is_rejected_with_limit() -> None:
    with pytest.raises(UserError, match=rf"seed: 4611686018427387905 is out of range; .* at most {2**62}$"):
        build(RunConfig, {"seed": 2**62 + 1})
    assert RunConfig(seed=2**62).seed == 2**62
