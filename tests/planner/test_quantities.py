"""Amounts as people type them."""

from __future__ import annotations

import pytest

from cost_models.errors import TitanPlanError
from planner.quantities import parse_memory, parse_tokens

DEVICE_BYTES = 64 * 2**30


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2T", 2e12),
        ("300B", 3e11),
        ("300b", 3e11),
        ("1.5e12", 1.5e12),
        ("7", 7),
        ("5k", 5e3),
        ("1.5 M", 1.5e6),
        (" 3G ", 3e9),
    ],
)
def test_tokens_are_counted_in_powers_of_a_thousand(text: str, tokens: float) -> None:
    assert parse_tokens(text) == pytest.approx(tokens, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    ["", "T", "abc", "-1", "0", "0.5", "1e400", "2 TB", "nan", "inf", "1,000", "٣", "2T 3B", "5%", "1e300", "1e19"],
)
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(TitanPlanError) as error:
        parse_tokens(text)
    assert error.value.code == "C610"
    assert "--tokens" in error.value.message
    assert error.value.hint


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("2GiB", 2 * 2**30),
        ("2", 2 * 2**30),
        ("0", 0),
        ("0.5gib", 2**29),
        ("2000MiB", 2000 * 2**20),
        ("5%", 0.05 * DEVICE_BYTES),
        ("100 %", DEVICE_BYTES),
        ("1024B", 1024),
    ],
)
def test_memory_is_binary_or_a_share_of_the_device(text: str, n_bytes: float) -> None:
    assert parse_memory("--hbm-margin", text, whole_bytes=DEVICE_BYTES) == round(n_bytes)


def test_decimal_gigabytes_are_refused_with_the_binary_amount() -> None:
    with pytest.raises(TitanPlanError) as error:
        parse_memory("--hbm-margin", "64GB", whole_bytes=DEVICE_BYTES)
    assert error.value.code == "C609"
    assert "59.60GiB" in error.value.hint  # 64e9 / 2**30


def test_decimal_megabytes_are_refused_with_the_binary_amount() -> None:
    with pytest.raises(TitanPlanError) as error:
        parse_memory("--hbm-margin", "500 MB", whole_bytes=DEVICE_BYTES)
    assert error.value.code == "C609"
    assert "476.84MiB" in error.value.hint  # 500e6 / 2**20


@pytest.mark.parametrize(
    "text",
    ["", "abc", "-1", "GiB", "2TiB", "1e40", "nan", "2 GiB of it", "5%%", "1e400GB", "1e300MB", "1e400GiB", "1e400%"],
)
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(TitanPlanError) as error:
        parse_memory("--hbm-margin", text, whole_bytes=DEVICE_BYTES)
    assert error.value.code == "C610"
    assert repr(text) in error.value.message
    assert error.value.hint
    assert "inf" not in error.value.message


def test_a_long_amount_is_repeated_in_part() -> None:
    with pytest.raises(TitanPlanError) as error:
        parse_memory("--hbm-margin", "9" * 5000, whole_bytes=DEVICE_BYTES)
    assert len(error.value.message) < 150
