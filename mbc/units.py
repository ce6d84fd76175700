"""Sizes, times and names as people write and read them."""

from __future__ import annotations

import re

UNIT_BYTES = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
_BY_ANY_CASE = {unit.lower(): size_bytes for unit, size_bytes in UNIT_BYTES.items()}


def parse_size(text: str) -> int:
    """Return the bytes that a text such as `64MiB`, `1.5 GB`, `8gb`, `4096B` or `0` names.

    Raises:
        ValueError: The text is anything else; a bare `12` is refused, because nobody means 12 bytes.
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is not None and not match[2]:
        if float(match[1]) == 0:
            return 0
        raise ValueError(f"'{text}' has no unit: write {match[1]}GB (10^9 bytes), {match[1]}MiB (2^20) or {match[1]}B")
    if match is None or match[2].lower() not in _BY_ANY_CASE:
        raise ValueError(f"'{text}' is not a size: write 64MiB (2^20), 8GB (10^9) or 4096B")
    return round(float(match[1]) * _BY_ANY_CASE[match[2].lower()])


def show_size(size_bytes: float) -> str:
    """Return a size as text, such as `12.3 MiB`: in powers of two, with one decimal, or two below 10."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.{2 if abs(size) < 10 else 1}f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def show_written(size_bytes: int) -> str:
    """Return a size exactly, in the unit that the user probably wrote, such as `1.5 GB`.

    If no unit is short, the size is rounded as by `show_size`.
    """
    shown = show_size(size_bytes)
    if parse_size(shown) == size_bytes:
        return shown
    for unit in ("TB", "GB", "MB", "GiB", "MiB"):
        thousandths, rest = divmod(size_bytes * 1000, UNIT_BYTES[unit])
        if 1000 <= thousandths < 10**7 and not rest:
            return f"{thousandths / 1000:.10g} {unit}"
    return shown


def show_given(size_bytes: int) -> str:
    """Return a size that the user gave for a comparison with other sizes: `1 GB (953.7 MiB)`, or only `8.00 GiB`."""
    written, shown = show_written(size_bytes), show_size(size_bytes)
    return shown if written == shown else f"{written} ({shown})"


def show_enough(size_bytes: int) -> str:
    """Return a size that can be typed and is not less: `12.4GiB`, `613MiB`, `10.5KiB`; at most 1 % is added."""
    for unit in ("GiB", "MiB", "KiB"):
        tenths = -(-size_bytes * 10 // UNIT_BYTES[unit])
        if tenths >= 100:
            whole, tenth = divmod(tenths, 10)
            return f"{whole}.{tenth}{unit}" if tenth else f"{whole}{unit}"
    return f"{size_bytes}B"


def show_distinct(size_bytes: int, given_bytes: int) -> tuple[str, str]:
    """Return a size and a limit as texts that differ if the sizes do.

    Bytes are added where rounding would hide the difference.
    """
    size, given = show_size(size_bytes), show_size(given_bytes)
    if size != given or size_bytes == given_bytes:
        return size, show_given(given_bytes)
    return f"{size} ({size_bytes} B)", f"{show_written(given_bytes)} ({given_bytes} B)"


def show_time(time_us: float) -> str:
    """Return a time as text, such as `12.3 us`, `4.56 ms` or `7.89 s`."""
    for limit, unit, scale in ((1e3, "us", 1.0), (1e6, "ms", 1e3), (float("inf"), "s", 1e6)):
        if time_us < limit:
            value = time_us / scale
            return f"{value:.{2 if value < 10 else 1}f} {unit}"
    raise AssertionError("unreachable")


def show_rate(per_second: float) -> str:
    """Return a rate as text without its unit, such as `12,345` or `0.427`: whole, or three digits below 100."""
    return f"{per_second:#.3g}".rstrip(".") if 0 < per_second < 100 else f"{per_second:,.0f}"


_DURATION_S = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Return the seconds that a text such as `90s`, `5min`, `1.5 h` or `300` names.

    Raises:
        ValueError: The text is anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.ASCII)
    if match is None or match[2] not in _DURATION_S:
        raise ValueError(f"'{text}' is not a duration: write 90s, 5min, 1h or a number of seconds")
    return float(match[1]) * _DURATION_S[match[2]]


def show_duration(seconds: float) -> str:
    """Return a duration as text, such as `12 s`, `3 min 5 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def show_range(low_us: float, high_us: float) -> str:
    """Return a range of times such as `18.2 to 31.0 ms`; only one time if both have the same text."""
    low, high = show_time(low_us), show_time(high_us)
    if low == high:
        return low
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"


_SPELLED_WITH_A_VOWEL = "AEFHILMNORSX"  # letters whose names begin with one, as in `an H200`


def with_article(name: str) -> str:
    """Return a name with its indefinite article: `an NVIDIA H200`, `a Tesla V100`, `an int`, `a dict`.

    Names that begin with two capitals, or a capital and a number, are read letter by letter.
    """
    spelled = re.match(r"[A-Z](?:[A-Z]|\d)", name) is not None
    vowel = name[:1] in _SPELLED_WITH_A_VOWEL if spelled else name[:1].lower() in tuple("aeiou")
    return f"{'an' if vowel else 'a'} {name}"
