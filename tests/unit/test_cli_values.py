"""Durations, sizes, GPU requests and selectors: what people write, and what is refused."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.values import (
    GpuRequest,
    InvalidValue,
    Selector,
    SelectorKind,
    format_duration,
    format_size,
    parse_duration,
    parse_finite_duration,
    parse_gpu_types,
    parse_gpus,
    parse_selector,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("90m", 5400),
        ("2h30m", 9000),
        ("1d12h", 129_600),
        ("1.5h", 5400),
        ("1-12:00:00", 129_600),
        ("00:01:30", 90),
        ("100:00:00", 360_000),
        (" 5M ", 300),
        ("unlimited", math.inf),
    ],
)
def test_durations_as_people_write_them(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("90", "write 90s or 90m"),
        ("1.5", "write 1.5s or 1.5m"),
        ("12:30", "write 12h30m or 12m30s"),
        ("0s", "write e.g. 90s"),
        ("-5m", "write e.g. 90s"),
        ("5 minutes", "write e.g. 90s"),
        ("30m2h", "write e.g. 90s"),
        ("", "write e.g. 90s"),
        ("1:60:00", "up to 59"),
        ("1-25:00:00", "up to 59"),
        ("nan", "write e.g. 90s"),
        ("٣s", "write e.g. 90s"),
        ("9" * 400 + "s", "write e.g. 90s"),
    ],
)
def test_a_duration_that_cannot_be_meant_is_refused_with_the_way_to_write_it(text, hint):
    with pytest.raises(InvalidValue) as refused:
        parse_duration(text)
    assert hint in refused.value.hint
    assert repr(text) in refused.value.problem


def test_numbers_beyond_all_measure_are_refused():
    for parse, text in ((parse_finite_duration, "9" * 400 + "d"), (parse_size, "9" * 400 + "G")):
        with pytest.raises(InvalidValue):
            parse(text)
    assert parse_duration("unlimited") == math.inf


def test_a_grace_may_be_nothing_but_not_endless():
    assert parse_finite_duration("0s") == 0
    with pytest.raises(InvalidValue):
        parse_finite_duration("unlimited")


@given(st.integers(min_value=1, max_value=10**8))
def test_a_formatted_duration_reads_back(seconds):
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_units_add_up(days, hours, minutes, seconds):
    total = days * 86_400 + hours * 3600 + minutes * 60 + seconds
    text = f"{days}d{hours}h{minutes}m{seconds}s"
    if total:
        assert parse_duration(text) == total
    else:
        with pytest.raises(InvalidValue):
            parse_duration(text)


@given(st.text(max_size=12))
def test_any_text_is_a_duration_or_refused(text):
    for parse in (parse_duration, parse_finite_duration, parse_size, parse_gpus, parse_selector):
        # Any other exception than the refusal fails the test.
        with suppress(InvalidValue):
            parse(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("32G", 32 * 2**30),
        ("32GiB", 32 * 2**30),
        ("32gib", 32 * 2**30),
        ("32GB", 32 * 10**9),
        ("512M", 512 * 2**20),
        ("1.5T", 3 * 2**39),
        ("2k", 2048),
        ("0", 0),
    ],
)
def test_sizes_as_people_write_them(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["32", "-1G", "G", "1 G", "1GG", "1E", "inf", ""])
def test_a_size_that_cannot_be_meant_is_refused(text):
    with pytest.raises(InvalidValue):
        parse_size(text)


@given(st.integers(min_value=1, max_value=2000), st.sampled_from("KMGTP"))
def test_a_formatted_size_reads_back(count, unit):
    size_bytes = count * 1024 ** ("KMGTP".index(unit) + 1)
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.05)


def test_an_absent_size_is_not_zero():
    assert format_size(None) == "-"
    assert format_size(0) == "0B"


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("4", GpuRequest(4)),
        ("0", GpuRequest(0)),
        ("p100:4", GpuRequest(4, ("p100",))),
        ("RTX-3090:1", GpuRequest(1, ("RTX-3090",))),
    ],
)
def test_gpu_requests(text, request_):
    assert parse_gpus(text) == request_


@pytest.mark.parametrize(
    ("text", "hint"),
    [("p100", "write p100:1"), ("-1", "write 4 or p100:4"), (":4", "p100"), ("a b:1", "p100")],
)
def test_a_gpu_request_that_cannot_be_meant_is_refused(text, hint):
    with pytest.raises(InvalidValue) as refused:
        parse_gpus(text)
    assert hint in refused.value.hint


def test_gpu_types_keep_the_order_of_preference():
    assert parse_gpu_types("v100, p100") == ("v100", "p100")


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("12", Selector(SelectorKind.IDS, (12,))),
        ("1,3,5-8", Selector(SelectorKind.IDS, (1, 3, 5, 6, 7, 8))),
        ("3,1-3", Selector(SelectorKind.IDS, (3, 1, 2))),
        ("last", Selector(SelectorKind.LAST)),
        ("all", Selector(SelectorKind.ALL)),
        ("@my job", Selector(SelectorKind.NAME, name="my job")),
    ],
)
def test_selectors(text, selector):
    assert parse_selector(text) == selector


@pytest.mark.parametrize(
    "text", ["0", "-1", "8-5", "1,,2", "@", "x", "1-999999999", "1.5", "²", "", "newest"]
)
def test_a_selector_that_names_nothing_is_refused(text):
    with pytest.raises(InvalidValue):
        parse_selector(text)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_a_list_of_numbers_selects_each_once(numbers):
    selector = parse_selector(",".join(map(str, numbers)))
    assert selector.ids == tuple(dict.fromkeys(numbers))
