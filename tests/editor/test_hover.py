"""The texts that the editor shows for a line and for a word."""

from __future__ import annotations

from mbc.editor.analysis import analyse
from mbc.editor.hover import line_text, word_text
from mbc.editor.line_times import LineTimes, Planner, decoded, encoded
from mbc.source import Source
from tests.frontend.reading import ROOT

DIGITS = (ROOT / "examples" / "01_digits" / "net.mbc").read_text(encoding="utf-8")


def line_of(text: str, part: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)


def test_a_line_that_is_expanded_in_several_places():
    networks = analyse(Source("net.mbc", DIGITS)).networks
    text = line_text(networks, line_of(DIGITS, "return x |> conv"), None)
    assert "| convolution | `fp32[64, 24, 8, 8]`, `fp32[64, 48, 4, 4]` | 576.0 KiB |" in text
    assert "parameters" in text and "is being predicted" in text
    assert line_text(networks, line_of(DIGITS, "input image"), None).endswith(
        "| input `image` | `fp32[64, 1, 8, 8]` | 16.0 KiB |"
    )
    assert line_text(networks, 1, None) == ""


def test_equal_results_of_a_line_are_counted():
    text = DIGITS.replace("stage(2 * width)", "stage(width)").replace("|> maxpool(2)", "")
    shown = line_text(analyse(Source("net.mbc", text)).networks, line_of(text, "return x |> conv"), None)
    assert "| convolution | `fp32[64, 24, 8, 8]` x 2 |" in shown
    shown = line_text(analyse(Source("net.mbc", text)).networks, line_of(text, "logits = image"), None)
    assert " x " not in shown


def test_the_time_of_a_line():
    networks = analyse(Source("net.mbc", DIGITS)).networks
    line = line_of(DIGITS, "return x |> conv")
    times = LineTimes("GPU", 200.0, {line: 50.0})
    assert line_text(networks, line, times).endswith(
        "50.0 us of a step of 200.0 us (25.0%), forward and backward, predicted for GPU"
    )
    untimed = line_text(networks, line, LineTimes("GPU"))
    assert untimed.endswith("No time: the network is in fp64, which is for the CPU.")
    estimated = LineTimes("GPU", 200.0, {line: 50.0}, frozenset({line}))
    assert "\n~50.0 us" in line_text(networks, line, estimated)
    assert line_text(networks, line, LineTimes("GPU", error="too small")).endswith("No time: too small")


def test_times_travel_whole():
    measured = LineTimes("GPU", 2.0, {3: 1.5, 7: 0.25}, frozenset({7}))
    for times in (measured, LineTimes("GPU", error="a", code="b", remedy="c")):
        assert decoded(encoded(times)) == times


def test_planning_of_another_text_ends_the_one_before():
    import threading

    ready = threading.Event()
    reports: list[tuple[str, LineTimes]] = []

    def report(text: str, times: LineTimes) -> None:
        reports.append((text, times))
        ready.set()

    planner = Planner("h200", report)
    assert planner.times("network a { }") is None
    assert planner.times("network b {") is None
    assert ready.wait(120)
    ((text, times),) = reports
    assert text == "network b {" and times.code == "MBC002" and planner.times(text) == times
    planner.close()


def test_a_word():
    assert word_text(DIGITS, DIGITS.index("conv(")).startswith("```mbc\nconv(channels, kernel")
    assert word_text(DIGITS, DIGITS.index("stage(2")) == "```mbc\nblock stage(channels) on x\n```"
    assert "momentum" in word_text(DIGITS, DIGITS.index("sgd"))
    assert word_text(DIGITS, DIGITS.index("image[")) == ""


def test_mistakes_of_several_networks_and_networks_that_need_settings():
    text = "network a { x = 1 }\nnetwork b(n) { x = y }\n"
    analysis = analyse(Source("net.mbc", text))
    assert [error.code for error in analysis.errors] == ["MBC020"] and analysis.networks == ()
    assert [error.code for error in analyse(Source("net.mbc", "network")).errors] == ["MBC002"]
    assert [error.code for error in analyse(Source("net.mbc", "")).errors] == ["MBC023"]
