"""The report's page: what it shows of runs of every form, that it needs nothing else, and that no text in it is taken for markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest

from inference_service.loadtest import Loadtest, Slo
from loadgen._figures import found, level_of, repeated
from loadgen._html import page
from loadgen._levels import Load
from loadgen._measures import Measures, Window
from loadgen._result import Result
from loadgen._svg import axis, percent_axis
from loadgen._target import ErrorClass, Failure, Observation
from loadgen._verdict import judge_all

MS = 1_000_000
HOSTILE = "<script>alert('1')</script>&\"><b onload=x>"
FIGURES_A_LEVEL = 6
"""Four distributions, ITL and tokens over time."""
FIGURES_A_REPORT = 4
"""Throughput against each latency."""


@dataclass
class Page(HTMLParser):
    """What a browser would see."""

    tags: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action") or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def seen(html: str) -> Page:
    """The page as parsed, once it has been found sound."""
    parsed = Page()
    parsed.feed(html)
    parsed.close()
    assert not {"script", "link", "iframe", "img", "b onload"} & set(parsed.tags)
    assert parsed.links == []
    assert not re.search(r"url\(|@import|https?://(?!127)", html)
    for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        root = ET.fromstring(drawing)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for line in root.iter("path"):
            if line.get("class") == "line":
                numbers = [float(number) for number in re.findall(r"[-\d.]+", line.attrib["d"])]
                assert all(0 <= across <= width for across in numbers[::2])
                assert all(0 <= down <= height for down in numbers[1::2])
    return parsed


def measures(slow: int, window: Window, due: bool, example: str = "") -> Measures:
    """20 requests over four seconds, each of five tokens; the last one fails where it has something to say."""
    found = Measures(began_unix_ns=1, ended_unix_ns=4_000_000_001)
    for number in range(20):
        sent_ns = number * 200 * MS
        arrivals = [(sent_ns + (50 + number + token * 10) * slow * MS, 1) for token in range(5)]
        failure = Failure(ErrorClass.SERVER, "INTERNAL", example) if example and number == 19 else None
        due_ns = max(1, sent_ns - 3 * MS) if due else 0
        ended_ns = arrivals[-1][0]
        one = Observation(sent_ns, [] if failure else arrivals, ended_ns, due_ns, input_tokens=8, failure=failure, cut_off=False)
        found.add(one, window)
    found.receive_lag.extend([MS] * 100)
    found.add_usage(10**9, 10**8)
    return found


def result(target: str, loads: list[Load], slow: int = 1, slo: Slo | None = None, example: str = "") -> Result:
    limits = slo or Slo()
    window = Window(0, 4_000_000_000, limits)
    levels = [level_of(measures(slow * (load.number + 1), window, load.rate is not None, example), load, limits, 1) for load in loads]
    settings = {"arrival": loads[0].arrival, "slo": {name: getattr(limits, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms", "share")}}
    return Result(
        target=target,
        protocol="grpc",
        model="stub",
        began_unix_ns=10**18,
        loadtest={"search": Loadtest().search, **settings},
        levels=levels,
        repeated=repeated(levels),
        search=found(levels) if slo else None,
        verdict=judge_all([(level.name, level.verdict) for level in levels]),
    )


def closed(*concurrency: int) -> list[Load]:
    return [Load(number=number, arrival="closed", concurrency=users, rate=None, repeat=0) for number, users in enumerate(concurrency)]


def test_one_level() -> None:
    parsed = seen(page([("ours", result("ours", closed(4)))]))
    assert parsed.tags.count("svg") == FIGURES_A_REPORT + FIGURES_A_LEVEL
    assert "Trusted." in parsed.text and "Not to be trusted" not in parsed.text
    assert "nothing measured" not in parsed.text
    for title in ("TTFT", "TPOT", "ITL", "E2E", "user tokens/s"):
        assert title in parsed.text
    assert "No request failed." in parsed.text and "no limit was set" in parsed.text


def test_a_sweep_is_one_set_of_figures_with_a_line_a_level() -> None:
    html = page([("ours", result("ours", closed(1, 2, 4, 8), slo=Slo(ttft_ms=120)))])
    parsed = seen(html)
    assert parsed.tags.count("svg") == FIGURES_A_REPORT + FIGURES_A_LEVEL
    assert re.search(r"The highest load that met it: <b>1</b>", html)
    assert (parsed.text.count("✓ met"), parsed.text.count("✗ missed")) == (1, 3)
    ttft = next(drawing for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL) if "TTFT: share" in drawing)
    strokes = re.findall(r'stroke="(#\w{6})"', ttft)
    assert len(strokes) == len(set(strokes)) == 4


def test_two_targets_stand_side_by_side_at_each_level() -> None:
    runs = [("ours", result("ours", closed(1, 4))), ("theirs", result("theirs", closed(1, 4, 8), slow=2))]
    html = page(runs)
    assert seen(html).tags.count("svg") == FIGURES_A_REPORT + 3 * FIGURES_A_LEVEL
    drawings = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    by_level = [len(set(re.findall(r'stroke="(#\w{6})"', drawing))) for drawing in drawings if "TTFT: share" in drawing]
    assert by_level == [2, 2, 1]


def test_repeats_have_one_colour_and_an_interval() -> None:
    loads = [Load(number=number, arrival="closed", concurrency=2, rate=None, repeat=number) for number in range(3)]
    html = page([("ours", result("ours", loads))])
    assert "Repeats of ours" in seen(html).text
    ttft = next(drawing for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL) if "TTFT: share" in drawing)
    assert len(re.findall('class="line"', ttft)) == 3
    assert len(set(re.findall(r'stroke="(#\w{6})"', ttft))) == 1


def test_an_open_loop_shows_latency_from_due_beside_that_from_sending() -> None:
    load = Load(number=0, arrival="poisson", concurrency=0, rate=5.0, repeat=0)
    html = page([("ours", result("ours", [load]))])
    assert "TTFT, from due" in seen(html).text
    ttft = next(drawing for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL) if "TTFT: share" in drawing)
    assert ttft.count("stroke-dasharray") == 1


def test_a_run_that_measured_nothing_has_a_page_too() -> None:
    empty = level_of(Measures(), closed(1)[0], Slo(), 1)
    run = result("ours", closed(1))
    run.levels, run.repeated, run.verdict = [empty], [], judge_all([(empty.name, empty.verdict)])
    parsed = seen(page([("ours", run)]))
    assert "Not to be trusted" in parsed.text and "nothing was measured" in parsed.text
    run.levels = []
    seen(page([("ours", run)]))


def test_no_text_is_taken_for_markup() -> None:
    run = result(HOSTILE, closed(1, 2), example=HOSTILE)
    run.model = HOSTILE
    run.verdict.trusted, run.verdict.reasons = False, [HOSTILE]
    run.levels[0].verdict = run.verdict
    run.loadtest["workload"] = {"file": HOSTILE}
    parsed = seen(page([(HOSTILE, run), (f"{HOSTILE} 2", run)]))
    assert parsed.text.count(HOSTILE) > 10


@pytest.mark.parametrize(("values", "low", "high"), [([3, 180], 2, 200), ([90, 99], 0, 100), ([0.2], 0, 0.2), ([], 0, 1), ([0, 0], 0, 1)])
def test_an_axis_holds_its_values_between_round_ends(values: list[float], low: float, high: float) -> None:
    found = axis("ms", values, wide=True)
    assert [found.low, found.high] == pytest.approx([low, high])
    assert 3 <= len(found.ticks) <= 10
    assert found.place(found.low) == 0 and found.place(found.high) == pytest.approx(1)


def test_an_axis_over_many_decades_has_a_tick_each() -> None:
    assert axis("ms", [0.001, 1000], wide=True).ticks == pytest.approx([0.001, 0.01, 0.1, 1, 10, 100, 1000])
    assert percent_axis("share").place(0.5) == 0.5
