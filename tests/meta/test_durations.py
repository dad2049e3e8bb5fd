"""The default tier stays a ten-minute gate on two cores: what is recorded of it, and what is said where it is not."""

from pathlib import Path

from tests.support.durations import FILE, REASONS, TEST, recorded, without_reason

ROOT = Path(__file__).parents[2]
GATE = 2 * 10 * 60
"""Seconds of two processors in ten minutes."""


def test_the_default_tier_is_recorded_within_ten_minutes():
    assert recorded().keys() == {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert sum(recorded().values()) < GATE


def test_reasons_are_of_what_there_is_and_is_slow():
    for name in REASONS:
        file, _, function = name.partition("::")
        assert function in (ROOT / file).read_text()
        assert recorded()[file] > (TEST if function else FILE), f"{name} needs no reason"


def test_what_is_slow_without_a_reason_is_named():
    quick = {"tests/a.py::test_a[1]": TEST, "tests/a.py::test_b": TEST}
    assert without_reason(quick) == []
    assert without_reason(quick | {"tests/a.py::test_c": 11.0}) == [
        "tests/a.py::test_c took 11 s of a processor: a test over 10 s must say why"
    ]
    many = {f"tests/a.py::test_a[{n}]": 9.0 for n in range(7)}
    assert without_reason(many) == ["tests/a.py took 63 s of a processor: a file over 60 s must say why"]
