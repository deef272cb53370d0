"""Sizes as people write and read them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devmap_cli.units import (
    Amount,
    SizeError,
    exact_bytes,
    format_bytes,
    format_count,
    format_seconds,
    parse_amount,
    parse_size,
)

POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("10GB", 10 * 10**9),
        ("10G", 10 * 10**9),
        ("10GiB", 10 * 2**30),
        ("10Gi", 10 * 2**30),
        ("512MiB", 512 * 2**20),
        ("512MB", 512 * 10**6),
        ("3KB", 3000),
        ("3KiB", 3072),
        ("2TB", 2 * 10**12),
        ("2Ti", 2 * 2**40),
        ("1PiB", 2**50),
        ("100B", 100),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        (".5GB", 500_000_000),
        ("2.GB", 2 * 10**9),
        ("0.1GB", 100_000_000),  # 0.1 is no binary fraction: the decimal counts
        (" 10 GB ", 10 * 10**9),
        ("0", 0),
        ("0GB", 0),
    ],
)
def test_reads_absolute_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert parse_amount(text) == Amount(num_bytes)


@pytest.mark.parametrize("text", ["10gb", "10GB", "10gB", "10Gb", "10g", "10G"])
def test_case_never_makes_bits_of_bytes(text: str) -> None:
    assert parse_size(text) == 10 * 10**9


@pytest.mark.parametrize("text", ["10gib", "10GIB", "10Gib", "10gi", "10GI"])
def test_binary_units_in_any_case(text: str) -> None:
    assert parse_size(text) == 10 * 2**30


def test_share_of_the_total() -> None:
    amount = parse_amount("80%")
    assert amount == Amount(percent=Decimal(80))
    assert amount.is_relative
    assert amount.of(1000) == 800
    assert parse_amount("12.5%").of(80 * 2**30) == 10 * 2**30
    assert parse_amount("100%").of(7) == 7
    assert parse_amount("0%").of(7) == 0


def test_all_but_an_amount() -> None:
    amount = parse_amount("-2GiB")
    assert amount == Amount(2 * 2**30, all_but=True)
    assert amount.is_relative
    assert amount.of(24 * 2**30) == 22 * 2**30
    assert amount.of(2**30) == 0


def test_an_absolute_amount_needs_no_total() -> None:
    assert not parse_amount("10GB").is_relative
    assert parse_amount("10GB").of(0) == 10 * 10**9


@pytest.mark.parametrize(
    ("text", "said", "suggestion"),
    [
        ("10XB", "unknown unit 'XB'", "10GB"),
        ("10 XB", "unknown unit 'XB'", "10GB"),
        ("10iB", "unknown unit 'iB'", "10GB"),
        ("10Gbit", "unknown unit 'Gbit'", "10GB"),
        ("10bits", "unknown unit 'bits'", "10GB"),
        ("10GGB", "unknown unit 'GGB'", "10GB"),
        ("10", "has no unit", "10GB"),
        ("-2", "has no unit", "-2GB"),
        ("1.5", "has no unit", "1.5GB"),
        ("", "size is missing", "10GB"),
        ("GB", "is not a size", "10GB"),
        ("ten", "is not a size", "10GB"),
        ("--2GB", "is not a size", "10GB"),
        ("+2GB", "is not a size", "10GB"),
        ("1,5GB", "is not a size", "10GB"),
        ("1e3GB", "is not a size", "10GB"),
        ("nanGB", "is not a size", "10GB"),
        ("101%", "not a share between 0% and 100%", "80%"),
        ("-10%", "not a share between 0% and 100%", "80%"),
    ],
)
def test_refuses_what_is_no_size_and_suggests_one(text: str, said: str, suggestion: str) -> None:
    with pytest.raises(SizeError, match=said) as caught:
        parse_amount(text)
    assert caught.value.suggestion == suggestion
    parse_amount(suggestion)  # what is suggested can be read


@pytest.mark.parametrize("text", ["80%", "-2GiB"])
def test_a_plain_size_is_not_relative(text: str) -> None:
    with pytest.raises(SizeError, match="not a plain size"):
        parse_size(text)


@given(
    number=st.integers(0, 900_000),  # TiB; above 909,494 of them are more than any device has
    prefix=st.sampled_from(list(POWERS)),
    binary=st.booleans(),
    suffix=st.sampled_from(["B", "b"]),
    lower=st.booleans(),
)
def test_every_spelling_of_a_unit_means_bytes(number: int, prefix: str, binary: bool, suffix: str, lower: bool) -> None:
    binary = binary and prefix != ""
    text = f"{number}{prefix}{'i' if binary else ''}{suffix}"
    assert parse_size(text.lower() if lower else text) == number * (1024 if binary else 1000) ** POWERS[prefix]


@given(st.text(alphabet="0123456789.-%kKmMgGiIbB xX", max_size=8))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        amount = parse_amount(text)
    except SizeError:
        return
    assert 0 <= amount.of(10**9) <= max(10**9, amount.num_bytes)


@given(st.integers(0, 2**50))
def test_what_people_read_can_be_read_back(num_bytes: int) -> None:
    again = parse_size(format_bytes(num_bytes))
    assert abs(again - num_bytes) <= num_bytes * 0.051  # one decimal of 1.0 KiB


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1.0 KiB"),
        (466_196_889, "444.6 MiB"),
        (2**30, "1.00 GiB"),
        (15 * 2**30 + 2**28, "15.2 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
        (-(2**20), "-1.0 MiB"),
    ],
)
def test_formats_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1536, "1,536"), (494_032_768, "494.03 M"), (7_615_616_512, "7.62 B"), (2_400_000_000_000, "2.40 T")],
)
def test_formats_counts(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.085, "85 ms"), (2.312, "2.31 s"), (99.5, "99.50 s"), (200.4, "3 min 20 s")]
)
def test_formats_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_more_than_any_device_has() -> None:
    with pytest.raises(SizeError, match="more than any device has"):
        parse_size("9" * 500 + "GB")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0B"), (999, "999B"), (10 * 10**9, "10GB"), (24 << 30, "24GiB"), (1_000_001, "1000001B"), (2048, "2KiB")],
)
def test_exact_bytes(num_bytes: int, text: str) -> None:
    assert exact_bytes(num_bytes) == text


@given(st.integers(1, 10**15))
def test_exact_bytes_are_read_as_they_were(num_bytes: int) -> None:
    assert parse_size(exact_bytes(num_bytes)) == num_bytes
