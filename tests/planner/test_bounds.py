"""What `--fix` and `--max` mean, and how what they cannot mean is refused."""

from __future__ import annotations

import pytest

from cost_models.errors import TitanPlanError
from planner.bounds import Bounds, check_devices, parse_bounds


def error_of(*fix: str, most: tuple[str, ...] = ()) -> TitanPlanError:
    with pytest.raises(TitanPlanError) as error:
        parse_bounds(fix, most)
    assert error.value.code == "C650"
    assert error.value.hint
    return error.value


def test_no_bounds_allow_everything() -> None:
    assert parse_bounds((), ()) == Bounds()
    assert Bounds().allows("tp", 12345)
    assert Bounds().keep("tp", [1, 2, 3]) == [1, 2, 3]
    assert Bounds().value_of("tp") is None


def test_a_fixed_dimension_allows_one_value() -> None:
    bounds = parse_bounds(("tp=4, pp = 2", "ZERO=0"), ())
    assert bounds.keep("tp", [1, 2, 4, 8]) == [4]
    assert bounds.keep("pp", [1, 2]) == [2]
    assert bounds.keep("zero", [0, 1, 2, 3]) == [0]
    assert bounds.value_of("pp") == 2
    assert bounds.keep("dp", [1, 7]) == [1, 7]


def test_a_bounded_dimension_allows_what_is_not_above() -> None:
    assert parse_bounds((), ("tp=4,mbs=2",)).keep("tp", [1, 2, 4, 8]) == [1, 2, 4]
    assert parse_bounds((), ("tp=4,mbs=2",)).keep("micro_batch", [1, 2, 4]) == [1, 2]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("mbs=2", "micro_batch=2"),
        ("z=1", "zero=1"),
        ("swap=on", "swap_optimizer=on"),
        ("offload=1", "activation_offload=1"),
    ],
)
def test_short_names_are_the_long_ones(short: str, long: str) -> None:
    assert parse_bounds((short,), ()) == parse_bounds((long,), ())


@pytest.mark.parametrize(
    ("text", "value"), [("on", 1), ("true", 1), ("YES", 1), ("1", 1), ("off", 0), ("no", 0), ("false", 0)]
)
def test_switches_are_on_or_off(text: str, value: int) -> None:
    assert parse_bounds((f"sp={text}",), ()).value_of("sp") == value


def test_dashes_are_underscores() -> None:
    assert parse_bounds(("micro-batch=2",), ()) == parse_bounds(("micro_batch=2",), ())


def test_texts_are_told_back_as_words() -> None:
    bounds = parse_bounds(("recompute=full,schedule=zero-bubble,cp_kind=ring,placement=tp-cp-pp-dp,tp=2",), ("pp=8",))
    fixed, most = bounds.words()
    assert fixed == {
        "recompute": "full",
        "schedule": "zero-bubble",
        "cp_kind": "ring",
        "placement": "tp-cp-pp-dp",
        "tp": 2,
    }
    assert most == {"pp": 8}


def test_some_recomputed_layers_are_full_recomputation_of_so_many() -> None:
    fixed, _ = parse_bounds(("recompute=layers=3",), ()).words()
    assert fixed == {"recompute": "full", "recompute_layers": 3}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("garbage", "has no value"),
        ("tp=", "has no value"),
        ("", "is empty"),
        (" , ,", "is empty"),
        ("=4", "does not know ''"),
        ("tp=x", "tp=x"),
        ("tp=0", "tp=0"),
        ("tp=-1", "tp=-1"),
        ("tp=2.0", "tp=2.0"),
        ("tp=²", "tp=²"),
        ("tp=99999999999", "tp=99999999999"),
        ("zero=x", "zero=x"),
        ("sp=maybe", "sp=maybe"),
        ("schedule=fast", "schedule=fast"),
        ("recompute=layers=0", "recompute=0"),
        ("recompute=layers=x", "recompute=x"),
    ],
)
def test_what_is_no_bound_is_refused_by_its_own_words(text: str, told: str) -> None:
    assert told in error_of(text).message


def test_a_wrong_name_is_told_the_nearest_one() -> None:
    assert error_of("micro_bach=2").hint == "did you mean micro_batch?"
    assert "tp, cp, ep" in error_of("quux=2").hint


def test_a_wrong_choice_is_told_all_of_them() -> None:
    assert error_of("recompute=most").hint == "one of: none, selective, full"


def test_only_numbers_have_a_maximum() -> None:
    assert "schedule" in error_of(most=("schedule=1f1b",)).message


def test_a_value_above_its_own_maximum_is_refused() -> None:
    assert "tp=8 is above --max tp=4" in error_of("tp=8", most=("tp=4",)).message


@pytest.mark.parametrize("fix", ["tp=2", "tp=8", "tp=2,cp=2,pp=1,dp=2", "zero=3,tp=4", "micro_batch=3"])
def test_degrees_that_multiply_to_the_devices_pass(fix: str) -> None:
    check_devices(parse_bounds((fix,), ()), 8)


@pytest.mark.parametrize(
    ("fix", "told"),
    [
        ("tp=3", "tp 3 = 3 does not divide the 8 devices"),
        ("tp=4,pp=4", "tp 4 x pp 4 = 16 does not divide the 8 devices"),
        ("tp=2,cp=1,pp=2,dp=1", "tp 2 x cp 1 x pp 2 x dp 1 = 4 is not the 8 devices"),
    ],
)
def test_degrees_that_cannot_multiply_to_the_devices_are_refused_with_the_arithmetic(fix: str, told: str) -> None:
    with pytest.raises(TitanPlanError) as error:
        check_devices(parse_bounds((fix,), ()), 8)
    assert error.value.code == "C650"
    assert told in error.value.message
    assert error.value.hint == "divisors of 8: 1, 2, 4, 8"
