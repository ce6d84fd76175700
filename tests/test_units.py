"""Sizes and times in the form that people write and read."""

from __future__ import annotations

import pytest

from mbc.units import (
    parse_duration,
    parse_size,
    show_distinct,
    show_duration,
    show_enough,
    show_given,
    show_range,
    show_rate,
    show_size,
    show_time,
    with_article,
)


def test_sizes():
    assert parse_size("64MiB") == 64 << 20
    assert parse_size(" 1.5 GB ") == 1_500_000_000
    assert parse_size("4096B") == 4096
    for power, prefix in enumerate("kMGT", 1):
        assert (parse_size(f"3{prefix}B"), parse_size(f"3{prefix}iB")) == (3 * 1000**power, 3 * 1024**power)
    assert parse_size("0") == 0
    with pytest.raises(ValueError, match=r"'12' has no unit: write 12GB \(10\^9 bytes\), 12MiB \(2\^20\) or 12B"):
        parse_size("12")
    assert [show_size(n) for n in (17, 2048, 20 << 20, 3 << 40)] == ["17 B", "2.00 KiB", "20.0 MiB", "3072.0 GiB"]


@pytest.mark.parametrize(
    "size_bytes", [1, 4096, 10241, 123_456_789, (12 << 30) + 1, (100_000 << 30) + (1 << 29), (1 << 50) + 1]
)
def test_a_recommended_budget_suffices_and_can_be_typed(size_bytes):
    assert size_bytes <= parse_size(show_enough(size_bytes)) <= 1.011 * size_bytes


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("1GB", "1 GB (953.7 MiB)"), ("1.5 GB", "1.5 GB (1.40 GiB)"), ("12345 MB", "12.345 GB (11.5 GiB)"),
        ("2TB", "2 TB (1862.6 GiB)"), ("2.5MB", "2.5 MB (2.38 MiB)"), ("8GiB", "8.00 GiB"), ("300MiB", "300.0 MiB"),
        ("64KiB", "64.0 KiB"), ("123456789B", "117.7 MiB"), ("150109880320B", "139.8 GiB"), ("1kB", "1000 B"),
        ("0", "0 B"), ("12.25GiB", "12.25 GiB (12.2 GiB)"), ("1536.5MB", "1536.5 MB (1.43 GiB)"),
        ("613.25MiB", "613.25 MiB (613.2 MiB)"), ("81559MiB", "79.6 GiB"), ("12345678.901MB", "11497.8 GiB"),
    ],
)  # fmt: skip
def test_a_size_is_shown_in_the_units_that_it_was_given_in(written, shown):
    assert show_given(parse_size(written)) == shown


def test_sizes_that_differ_look_different():
    assert show_distinct(2 * 10**9, 10**9) == ("1.86 GiB", "1 GB (953.7 MiB)")
    assert show_distinct(10**9 + 1, 10**9) == ("953.7 MiB (1000000001 B)", "1 GB (1000000000 B)")
    assert show_distinct((1 << 30) - 1, 1 << 30) == ("1024.0 MiB", "1.00 GiB")
    assert show_distinct((1 << 30) + 1, 1 << 30) == ("1.00 GiB (1073741825 B)", "1.00 GiB (1073741824 B)")
    assert show_distinct(10**9, 10**9) == ("953.7 MiB", "1 GB (953.7 MiB)")


@pytest.mark.parametrize("text", ["", "MB", "1 TBx", "-1MB", "1e3", "１MB", "9" * 400 + "MB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_times():
    assert [show_time(t) for t in (1.234, 999, 1234, 7.2e6)] == ["1.23 us", "999.0 us", "1.23 ms", "7.20 s"]


def test_rates_have_three_digits_below_100():
    shown = [show_rate(rate) for rate in (0.0, 0.0427, 0.4, 4.0, 9.996, 42.34, 99.97, 100.4, 1234567.0)]
    assert shown == ["0", "0.0427", "0.400", "4.00", "10.0", "42.3", "100", "100", "1,234,567"]


def test_durations():
    assert [parse_duration(text) for text in ("90s", "5min", "1.5 h", "300", "2m")] == [
        90.0,
        300.0,
        5400.0,
        300.0,
        120.0,
    ]
    for text in ("", "long", "-5s", "5 days", "5MIN"):
        with pytest.raises(ValueError, match="is not a duration"):
            parse_duration(text)
    assert [show_duration(s) for s in (0.4, 59.4, 125, 7830)] == ["0 s", "59 s", "2 min 5 s", "2 h 10 min"]


def test_ranges_say_their_unit_once():
    assert show_range(1234, 7890) == "1.23 to 7.89 ms"
    assert show_range(900, 1100) == "900.0 us to 1.10 ms"
    assert show_range(5.0, 5.001) == "5.00 us"


def test_articles_are_those_that_one_hears():
    names = ("NVIDIA H200", "Tesla V100", "H100", "A100", "V100", "T4", "L4", "RTX 3060", "GeForce RTX", "int", "dict")
    assert [with_article(name).split()[0] for name in names] == [
        "an", "a", "an", "an", "a", "a", "an", "an", "a", "an", "a",
    ]  # fmt: skip
