"""What tests cost: summed by file, recorded, and held to limits or reasons."""

from pathlib import Path

from tests.support.durations import REASONS, TEST, recorded, summed, without_reason

ROOT = Path(__file__).parents[2]


def test_what_is_slow_has_a_reason():
    assert without_reason(recorded()) == []


def test_reasons_are_of_what_there_is():
    for name in REASONS:
        file, _, function = name.partition("::")
        assert function in (ROOT / file).read_text()


def test_what_is_slow_without_a_reason_is_named():
    quick = {"tests/a.py::test_a[1]": TEST, "tests/a.py::test_b": TEST}
    assert summed(quick) == {"tests/a.py": 2 * TEST}
    assert without_reason(summed(quick | {"tests/a.py::test_c": 11.0})) == [
        "tests/a.py::test_c took 11 s of a processor: a test over 10 s must say why"
    ]
    assert without_reason(summed({f"tests/a.py::test_a[{n}]": 9.0 for n in range(7)})) == [
        "tests/a.py took 63 s of a processor: a file over 60 s must say why"
    ]


def test_workers_are_given_files_in_the_order_of_their_seconds(request):
    assert request.config.option.loadscopereorder is False
    seconds = [recorded().get(item.nodeid.partition("::")[0], 0.0) for item in request.session.items]
    assert seconds == sorted(seconds, reverse=True)
