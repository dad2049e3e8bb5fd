"""The ledger: it keeps everything that was written, and trusts nothing that it reads."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from parity import cli
from parity.backends import EMULATED
from parity.judging.metrics import Scale, measure
from parity.ledger import shards
from parity.ledger.freshness import Freshness, freshness, in_units_of
from parity.ledger.provenance import checkout, here
from parity.ledger.read import FILE_LIMIT, LINE_LIMIT, read, read_all
from parity.ledger.schema import RecordError, canonical, folder_name
from parity.ledger.sources import identity
from parity.ledger.write import Merged, Recorder, merge, provenance_line, record_line
from tests.matrix.gmm import GMM
from tests.support.commands import git
from tests.support.records import H200, HASH, METRICS, PROVENANCE, RECORD, keep, path_of, write

ROOT = Path(__file__).parents[3]


def at(utc, **changes):
    return replace(RECORD, provenance=replace(PROVENANCE, utc=utc), **changes)


# --- keeping ---


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(outputs={}, tiles=None, contract_epsilon=None),
        dict(outputs={"dq": METRICS, "dk": replace(METRICS, bias=-math.inf, tiles=(), worst=((),))}),
        dict(provenance=replace(PROVENANCE, commit=None, dirty=None, flags={}, backend="tpu")),
        dict(provenance=replace(H200, flags={"TRITON_X": 'ε ≤ "1" \\ \''})),
    ],
    ids=["all", "none", "two outputs", "no git", "real"],
)
def test_every_field_survives(tmp_path, changes):
    record = replace(RECORD, **changes)
    assert keep(tmp_path, record) == Merged(written=1, older=0, lost_lines=(), in_use=0)
    assert read(path_of(tmp_path, record)) == {(record.case, 3): record}
    p = record.provenance
    assert read_all(tmp_path, p.backend) == {(p.device_kind, "double"): {record.key: record}}


def test_not_a_number_survives_and_floats_have_nine_digits(tmp_path):
    m = replace(METRICS, epsilon=math.nan, floor=1 / 3)
    keep(tmp_path, replace(RECORD, outputs={"out": m}, seconds=1.23456))
    (got,) = read(path_of(tmp_path)).values()
    assert math.isnan(got.outputs["out"].epsilon)
    assert got.outputs["out"].floor == 0.333333333
    assert got.seconds == 1.235
    assert '"epsilon":"nan"' in path_of(tmp_path).read_text()


def test_real_measurements_survive(tmp_path):
    golden = np.linspace(-1, 1, 6000).reshape(60, 100)
    y = golden.astype(ml_dtypes.bfloat16)
    y[7, 9], y[8, 8] = np.inf, 3
    m = measure(y, golden, Scale(np.ones_like(golden), 2.0**-24, 60))
    keep(tmp_path, replace(RECORD, outputs={"out": m}))
    first = path_of(tmp_path).read_bytes()
    (got,) = read(path_of(tmp_path)).values()
    for name, value in asdict(got.outputs["out"]).items():
        assert np.allclose(value, getattr(m, name), rtol=1e-8, atol=0), name
    keep(tmp_path, got)
    assert path_of(tmp_path).read_bytes() == first


def test_the_bytes_do_not_depend_on_the_order_of_parts(tmp_path):
    same = [replace(RECORD, seed=1, seconds=s) for s in (0.5, 0.25)]  # equally new
    given = [at("2026-01-01T00:00:00Z", seed=s) for s in (2, 0, 1)] + same + [replace(RECORD, case="double-M1-s3")]
    contents = set()
    for n, order in enumerate([given, given[::-1], given[2:] + given[:2]]):
        root = tmp_path / str(n)
        for record in order:
            write(root, record)
            if n == 2:
                merge(root)
        merge(root)
        contents.add(path_of(root).read_bytes())
    (content,) = contents
    lines = [json.loads(line) for line in content.splitlines()]
    assert [sorted(line) for line in lines[:2]] == [["id", "provenance"]] * 2
    assert lines[0]["id"] < lines[1]["id"]
    assert [(line["case"], line["seed"]) for line in lines[2:]] == [("double-M1-s3", 3)] + [
        (RECORD.case, s) for s in range(3)
    ]


def test_the_newest_record_stays(tmp_path):
    keep(tmp_path, at("2026-02-02T00:00:00Z", verdict="NEW"))
    assert keep(tmp_path, at("2026-02-01T00:00:00Z", verdict="OLD")).written == 0
    assert [r.verdict for r in read(path_of(tmp_path)).values()] == ["NEW"]
    first, again = (at("2026-02-03T00:00:00Z", verdict=verdict) for verdict in ("FIRST", "AGAIN"))
    assert keep(tmp_path, first, again).written == 1
    assert [r.verdict for r in read(path_of(tmp_path)).values()] == ["AGAIN"]
    assert len(path_of(tmp_path).read_text().splitlines()) == 2  # provenances that nobody names any more are gone


def test_a_record_from_the_future_blocks_no_other(tmp_path):
    keep(tmp_path, at("2999-02-02T00:00:00Z", verdict="FUTURE"))
    assert keep(tmp_path, at("2026-02-01T00:00:00Z", verdict="NOW")).written == 1
    kept = keep(tmp_path, at("2999-02-02T00:00:00Z", verdict="FUTURE"))
    assert (kept.written, kept.older) == (0, 1)
    assert [r.verdict for r in read(path_of(tmp_path)).values()] == ["NOW"]


def test_a_merge_takes_what_a_killed_run_has_left(tmp_path, capsys):
    killed, into = tmp_path / "killed", tmp_path / "into"
    keep(killed, at("2026-02-01T00:00:00Z", verdict="BEFORE", seed=1))
    write(killed, at("2026-02-02T00:00:00Z"), at("2026-02-02T00:00:00Z", seed=1))
    (part,) = (killed / ".parts").glob("*.jsonl")
    part.write_bytes(part.read_bytes() + b'{"case": "torn')
    before = {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()}
    assert cli.main(["merge", str(killed), "--records", str(into)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("2 records written") and f"lost: {part}:4: is not JSON" in printed
    assert {record.seed: record.verdict for record in read(path_of(into)).values()} == {
        1: RECORD.verdict,
        3: RECORD.verdict,
    }
    assert {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()} == before, "it is only read"


def shard(root, number, dealing="a" * 12, tests=4):
    shards.note(root, shards.Shards(dealing, 2, 8, {str(number): tests}))
    return root


def test_shards_of_different_dealings_are_not_joined(tmp_path, capsys):
    one, two, other = shard(tmp_path / "1", 1), shard(tmp_path / "2", 2), shard(tmp_path / "3", 2, "b" * 12)

    def merged(*folders):
        return cli.main(["merge", *map(str, folders), "--records", str(tmp_path / "into")])

    assert merged(one, two) == 0 and "dealing" not in capsys.readouterr().out
    assert merged(one) == 0 and "of dealing aaaaaaaaaaaa these shards are missing: 2/2" in capsys.readouterr().out
    assert merged(one, shard(tmp_path / "4", 2, tests=3)) == 0
    assert "the shards of dealing aaaaaaaaaaaa have 7 tests, of 8" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        merged(one, other)
    assert "shards must be of one dealing, got aaaaaaaaaaaa and bbbbbbbbbbbb" in capsys.readouterr().err
    assert shards.read(shard(one, 2)).missing == [], "of one folder they add up"
    (two / shards.FILE).write_text('{"dealing": 1}')
    with pytest.raises(RecordError, match="must be as a run of a shard writes it"):
        shards.read(two)


def test_ledgers_join_by_one_write_a_file_and_the_newest_stays(tmp_path, monkeypatch, capsys):
    new, old = (at(f"2026-02-0{day}T00:00:00Z", verdict=f"OF {day}") for day in (2, 1))
    for folder, record in [("a", new), ("b", old)]:
        keep(tmp_path / folder, *(replace(record, seed=seed) for seed in range(20)), replace(RECORD, provenance=H200))
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(fsync(file)))
    for order in ("ab", "ba"):
        folders = [str(tmp_path / name) for name in order]
        assert cli.main(["merge", *folders, "--records", str(tmp_path / order)]) == 0
        assert capsys.readouterr().out.startswith("21 records written to ")
        assert {r.verdict for r in read(path_of(tmp_path / order)).values()} == {"OF 2"}
        assert path_of(tmp_path / order).read_bytes() == path_of(tmp_path / "a").read_bytes()
    assert len(synced) == 4


def test_a_real_device_and_its_emulation_never_meet(tmp_path):
    keep(tmp_path, RECORD, replace(RECORD, provenance=H200))
    assert {kind for kind, _ in read_all(tmp_path, "gpu")} == {EMULATED, "NVIDIA H200"}
    for kind, real in (("NVIDIA H200", False), (EMULATED, True)):
        with pytest.raises(ValueError, match="real must be"):
            replace(PROVENANCE, device_kind=kind, real=real)


def test_what_could_not_be_read_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="printable"):
        write(tmp_path, replace(RECORD, case="double\n"))
    with pytest.raises(ValueError, match="seed must be"):
        write(tmp_path, replace(RECORD, seed=-1))
    with pytest.raises(ValueError, match="bytes"):
        write(tmp_path, replace(RECORD, case="x" * LINE_LIMIT))
    assert merge(tmp_path) == Merged(0, 0, (), 0)


# --- crashes ---


def test_a_torn_last_line_costs_that_line_alone(tmp_path):
    for seed in range(3):
        write(tmp_path, replace(RECORD, seed=seed))
    torn, *_ = (tmp_path / ".parts").glob("*.jsonl")
    whole = torn.read_bytes()
    with torn.open("ab") as part:
        part.write(whole.splitlines()[1][:-20])
    merged = merge(tmp_path)
    assert merged.written == 3
    assert len(merged.lost_lines) == 1
    assert f"{torn.name}:3: is not JSON" in merged.lost_lines[0]
    assert sorted(s for _, s in read(path_of(tmp_path))) == [0, 1, 2]
    for cut in [*range(40), *range(40, len(whole) - 1, 7)]:
        torn.write_bytes(whole[:cut])
        merged = merge(tmp_path)
        # Nothing, or the provenance alone, costs no record; every other cut tears one line.
        whole_lines = cut in (0, len(whole.splitlines()[0]), len(whole.splitlines()[0]) + 1)
        assert (merged.written, len(merged.lost_lines)) == (0, 0 if whole_lines else 1), cut


@pytest.fixture
def writer(tmp_path):
    """A process that writes records until it is killed; its seeds start at `start`."""
    running = []

    def start(start=0):
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "from dataclasses import replace; from pathlib import Path; from itertools import count\n"
            "from tests.support.records import RECORD, Recorder\n"
            f"recorder = Recorder(Path({str(tmp_path)!r}))\n"
            f"for seed in count({start}):\n"
            "    recorder.write(replace(RECORD, seed=seed)); print(seed, flush=True)\n"
        )
        running.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_writer_loses_nothing_that_was_written(tmp_path, writer):
    process = writer()
    for _ in range(20):
        process.stdout.readline()
    live = merge(tmp_path)  # a part that is being written is left alone
    assert (live.written, live.in_use) == (0, 1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    written = [int(line) for line in process.stdout.read().splitlines()] or [19]
    merged = merge(tmp_path)
    assert merged.in_use == 0
    assert len(merged.lost_lines) <= 1
    assert {(RECORD.case, seed) for seed in range(written[-1] + 1)} <= read(path_of(tmp_path)).keys()
    assert not list((tmp_path / ".parts").glob("*.jsonl"))


@pytest.mark.parametrize("where", ["replace", "unlink"])
def test_a_merge_that_dies_is_made_good_by_the_next(tmp_path, monkeypatch, where):
    keep(tmp_path, at("2026-01-01T00:00:00Z"))
    before = path_of(tmp_path).read_bytes()
    write(tmp_path, RECORD, replace(RECORD, seed=4))

    def die(self, *arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "unlink":
            original = Path.unlink
            patch.setattr(Path, "unlink", lambda p, **o: die(p) if p.suffix == ".jsonl" else original(p, **o))
        else:
            patch.setattr(Path, where, die)
        with pytest.raises(KeyboardInterrupt):
            merge(tmp_path)
    if where == "replace":
        assert path_of(tmp_path).read_bytes() == before
    merged = merge(tmp_path)
    assert merged.written == 2
    assert read(path_of(tmp_path)) == {RECORD.key: RECORD, (RECORD.case, 4): replace(RECORD, seed=4)}
    assert sorted(p.name for p in path_of(tmp_path).parent.iterdir()) == ["double.jsonl"]
    assert not list((tmp_path / ".parts").glob("*.jsonl"))


def test_a_full_disk_costs_the_record_alone(tmp_path, monkeypatch):
    with Recorder(tmp_path) as recorder:
        recorder.write(RECORD)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(OSError, match="No space"):
                recorder.write(replace(RECORD, seed=4))
        recorder.write(replace(RECORD, seed=5))
    merge(tmp_path)
    assert {3, 5} <= {seed for _, seed in read(path_of(tmp_path))}


def test_an_unreadable_ledger_stops_the_merge_and_loses_nothing(tmp_path):
    keep(tmp_path, RECORD)
    whole = path_of(tmp_path).read_bytes()
    path_of(tmp_path).write_bytes(whole[:-9])
    write(tmp_path, replace(RECORD, seed=4), replace(RECORD, provenance=H200))
    with pytest.raises(RecordError, match=r"double\.jsonl:2: is not JSON"):
        merge(tmp_path)
    assert not list(tmp_path.glob("gpu/NVIDIA*"))
    path_of(tmp_path).write_bytes(whole)
    assert merge(tmp_path).written == 2


# --- many at once ---


def test_many_writers_and_merges_at_once(tmp_path):
    count, each = 8, 25
    done = threading.Event()

    def work(n):
        with Recorder(tmp_path) as recorder:
            for seed in range(n * each, (n + 1) * each):
                recorder.write(replace(RECORD, seed=seed))

    def merging():
        while not done.is_set():
            merged = merge(tmp_path)
            assert not merged.lost_lines
            time.sleep(0.01)

    with ThreadPoolExecutor(count + 2) as pool:
        merges = [pool.submit(merging) for _ in range(2)]
        for work_done in [pool.submit(work, n) for n in range(count)]:
            work_done.result()
        done.set()
        for each_merge in merges:
            each_merge.result()
    merge(tmp_path)
    assert sorted(seed for _, seed in read(path_of(tmp_path))) == list(range(count * each))


def test_writing_processes_and_merges_at_once(tmp_path, writer):
    processes = [writer(start=n * 10**6) for n in range(3)]
    last = []
    for process in processes:
        for _ in range(15):
            last.append(int(process.stdout.readline()))
            assert not merge(tmp_path).lost_lines
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with ThreadPoolExecutor(4) as pool:
        merged = list(pool.map(lambda _: merge(tmp_path), range(4)))
    assert sum(m.written > 0 for m in merged) == 1
    assert {(RECORD.case, seed) for seed in last} <= read(path_of(tmp_path)).keys()


# --- hostile files ---

_PROVENANCE_LINE, _RECORD_LINE = provenance_line(PROVENANCE), record_line(RECORD)


def line(text, **changes):
    """A line with some fields replaced, by dotted name; `...` takes a field out."""
    data = json.loads(text)
    for name, value in changes.items():
        *outer, last = name.split("__")
        place = data
        for key in outer:
            place = place[key]
        place[last] = value
        if value is ...:
            del place[last]
    return json.dumps(data)


def record(**changes):
    return f"{_PROVENANCE_LINE}\n{line(_RECORD_LINE, **changes)}\n"


def provenance(**changes):
    """Provenances that give themselves the right id."""
    data = {**asdict(PROVENANCE), **changes}
    text = canonical(data)
    return json.dumps({"id": hashlib.sha256(text.encode()).hexdigest()[:12], "provenance": data}) + "\n"


def raw(old, new, text=f"{_PROVENANCE_LINE}\n{_RECORD_LINE}\n"):
    assert old in text
    return text.replace(old, new, 1)


BAD_RECORDS = {
    "seed is text": (dict(seed="3"), "seed must be a whole number"),
    "seed is true": (dict(seed=True), "seed must be a whole number"),
    "seed is a float": (dict(seed=3.0), "seed must be a whole number"),
    "seed is negative": (dict(seed=-3), "seed must be a whole number of 0 or more, got -3"),
    "case is null": (dict(case=None), "case must be a printable string, got None"),
    "case is empty": (dict(case=""), "case must not be empty"),
    "case has an escape": (dict(case="a\x1b[2J"), "case must be a printable string"),
    "case has a surrogate": (dict(case="a\ud800"), "case must be a printable string"),
    "case is huge": (dict(case="a" * 10**6 + "\n"), "case must be a printable string"),
    "bound is a list": (dict(bound=[1]), "bound must be a number"),
    "bound is negative": (dict(bound=-1e-9), "bound must be a number of 0 or more"),
    "bound is minus infinity": (dict(bound="-inf"), "bound must be a number of 0 or more"),
    "bound is text": (dict(bound="1.0"), "bound must be a number"),
    "bound is true": (dict(bound=True), "bound must be a number"),
    "seconds are infinite": (dict(seconds="inf"), "seconds must be finite"),
    "inputs are a list": (dict(inputs=[]), "inputs must be an object"),
    "a hash is short": (dict(inputs={"x": "ab"}), "the hash of x must be 64 hexadecimal digits"),
    "a hash has a newline": (dict(inputs={"x": HASH + "\n"}), "inputs.x must be a printable string"),
    "an argument's name is a bell": (dict(inputs={"\a": HASH}), "a key of inputs must be a printable string"),
    "tiles are numbers": (dict(tiles=[1, 2]), "tiles must be a printable string"),
    "a field is missing": (dict(verdict=...), "'verdict' must be there"),
    "a field is unknown": (dict(exec="os.system"), "'exec' must be left out"),
    "metrics are text": (dict(outputs={"out": "x"}), "outputs.out must be an object, got 'x'"),
    "a metric is missing": (dict(outputs__out__epsilon=...), "outputs.out.'epsilon' must be there"),
    "a metric is unknown": (dict(outputs__out__loss=1), "outputs.out.'loss' must be left out"),
    "an index is negative": (dict(outputs__out__worst=[[0, -1]]), "outputs.out.worst[0][1] must be a whole number"),
    "too many worst": (dict(outputs__out__worst=[[0]] * 9), "at most 8 worst"),
    "too many tiles": (dict(outputs__out__tiles=[[0.0] * 9]), "8 x 8 tiles"),
    "a short histogram": (dict(outputs__out__histogram=[1, 2]), "histogram must have 64 bins, got 2"),
    "more wrong than there are": (dict(outputs__out__differing=601), "no more elements than its 600"),
    "a share above 1": (dict(outputs__out__misrounded=1.5), "no more elements"),
    "provenance is unknown": (dict(provenance="0" * 12), "provenance must be the id of an earlier line, got '0000"),
    "provenance is a list": (dict(provenance=[[]]), "provenance must be the id of an earlier line"),
    "provenance is missing": (dict(provenance=...), "provenance must be the id of an earlier line, got None"),
}  # fmt: skip

BAD_PROVENANCES = {
    "unknown schema": (dict(schema=99), "schema must be 1, the one known here, got 99"),
    "schema is true": (dict(schema=True), "schema must be 1, the one known here, got True"),
    "op climbs": (dict(op="../../etc/passwd"), "op must be letters"),
    "op is dots": (dict(op=".."), "op must be letters"),
    "op with dots": (dict(op="a..b"), "op must be letters"),
    "op is hidden": (dict(op=".git"), "op must be letters"),
    "op has a backslash": (dict(op="a\\b"), "op must be letters"),
    "op has a newline": (dict(op="a\n"), "provenance.op must be a printable string"),
    "device climbs": (dict(device_kind="../x", real=True), "device_kind must be letters"),
    "device is absolute": (dict(device_kind="/etc", real=True), "device_kind must be letters"),
    "device has a null": (dict(device_kind="a\0b", real=True), "provenance.device_kind must be a printable string"),
    "device is empty": (dict(device_kind="", real=True), "device_kind must be letters"),
    "device is too long": (dict(device_kind="x" * 101, real=True), "device_kind must be letters"),
    "backend is unknown": (dict(backend="../gpu"), "backend must be tpu or gpu"),
    "real and emulated": (dict(real=True), "real must be False on device_kind 'emulated'"),
    "real is a number": (dict(real=0), "provenance.real must be true or false, got 0"),
    "kernel is no hash": (dict(kernel="G" * 64), "the hash of kernel must be"),
    "utc is no time": (dict(utc="now"), "does not match format"),
    "utc in another spelling": (dict(utc="2026-1-31T23:59:59Z"), "utc must be written as"),
    "a revision is text": (dict(revisions={"inputs": "1"}), "provenance.revisions.inputs must be a whole number"),
    "a version is a number": (dict(versions={"jax": 1}), "provenance.versions.jax must be a printable string"),
}  # fmt: skip

DEEP = 10**5
HOSTILE = {
    **{name: (record(**changes), 2, message) for name, (changes, message) in BAD_RECORDS.items()},
    **{name: (provenance(**changes), 1, message) for name, (changes, message) in BAD_PROVENANCES.items()},
    "provenance after its record": (f"{_RECORD_LINE}\n{_PROVENANCE_LINE}\n", 1, "the id of an earlier line"),
    "provenance under another id": (line(_PROVENANCE_LINE, id="0" * 12), 1, "id must be " + PROVENANCE.id),
    "provenance is null": ('{"id":"a","provenance":null}', 1, "schema must be 1"),
    "two of one record": (f"{_PROVENANCE_LINE}\n{_RECORD_LINE}\n{_RECORD_LINE}\n", 3, "must be the only record"),
    "a duplicate key": (raw('"seed":3', '"seed":3,"seed":4'), 2, "a key twice"),
    "a duplicate key inside": (raw('"elements":600', '"elements":600,"elements":1'), 2, "a key twice"),
    "bare NaN": (raw('"bound":66.0', '"bound":NaN'), 2, "got a bare NaN"),
    "bare Infinity": (raw('"bound":66.0', '"bound":-Infinity'), 2, "got a bare -Infinity"),
    "a float beyond float64": (raw('"bound":66.0', '"bound":1e999'), 2, "float64 can hold"),
    "an int of a million digits": (raw('"bound":66.0', f'"bound":{"9" * 10**6}'), 2, "int64 can hold"),
    "an int beyond int64": (raw('"seed":3', f'"seed":{2**63}'), 2, "int64 can hold"),
    "an int beyond float64": (raw('"bound":66.0', f'"bound":{"9" * 400}'), 2, "int64 can hold"),
    "deep lists": (raw('"bound":66.0', f'"bound":{"[" * DEEP}{"]" * DEEP}'), 2, "nested too deeply"),
    "deep objects": ('{"a":' * DEEP + "1" + "}" * DEEP, 1, "nested too deeply"),
    "deep and torn": ("[" * DEEP, 1, "nested too deeply"),
    "lists deep enough to read": (raw('"bound":66.0', f'"bound":{"[" * 300}{"]" * 300}'), 2, "bound must be a number"),
    "a line over the limit": (raw('"bound":', f'"bound":{" " * LINE_LIMIT}'), 2, "must have at most 1048576"),
    "no UTF-8": (b'{"case":"\xff"}\n', 1, "utf-8"),
    "UTF-16": ("{}".encode("utf-16"), 1, "utf-8"),
    "a byte order mark": ("\ufeff{}", 1, "is not JSON"),
    "null bytes": (b"\0" * 100, 1, "is not JSON"),
    "a pickle": (b"\x80\x04cos\nsystem\n(S'true'\ntR.", 1, "utf-8"),
    "an empty line": ("\n", 1, "is not JSON"),
    "a list": ("[]\n", 1, "must be an object, got []"),
    "a number": ("1\n", 1, "must be an object, got 1"),
    "a merge conflict": (f"<<<<<<< HEAD\n{_PROVENANCE_LINE}\n", 1, "is not JSON"),
    "cut off": (f"{_PROVENANCE_LINE}\n{_RECORD_LINE[:-30]}", 2, "is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("content, number, message", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_file_gives_one_clear_error(tmp_path, content, number, message):
    path = path_of(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for reading in (lambda: read(path), lambda: read_all(tmp_path, "gpu")):
        with pytest.raises(RecordError) as error:
            reading()
        text = str(error.value)
        assert text.startswith(f"{path}:{number}: ")
        assert message in text
        assert len(text) < len(str(path)) + 400
        assert text.isprintable()
    # As a part it costs its bad lines, and no ledger takes them.
    parts = tmp_path / "other" / ".parts"
    parts.mkdir(parents=True)
    (parts / "x.jsonl").write_bytes(path.read_bytes())
    merged = merge(tmp_path / "other")
    assert merged.lost_lines or "only record" in message
    assert all(list(ledger) == [RECORD.key] for ledger in read_all(tmp_path / "other", "gpu").values())


def test_damage_anywhere_is_an_error_or_another_valid_ledger(tmp_path):
    whole = record().encode()
    rng = np.random.default_rng(0)
    path = tmp_path / "double.jsonl"
    for _ in range(1500):
        damaged = bytearray(whole)
        where = rng.integers(len(damaged), size=2)
        if rng.integers(2):
            damaged[where[0]] = rng.choice(list(b'0129-+.eE"[]{},:\\\n\0\xff naIf'))
        else:
            del damaged[where.min() : where.max()]
        path.write_bytes(damaged)
        try:
            ledger = read(path)
        except RecordError as error:
            assert str(error).startswith(f"{path}:")
        else:
            write(tmp_path / "valid", *ledger.values())


def test_a_line_without_end_is_not_loaded(tmp_path):
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)  # a hole: 100 MB of nothing
    with pytest.raises(RecordError, match=r"huge\.jsonl:1: must have at most 1048576 bytes"):
        read(path)
    with path.open("ab") as file:
        file.truncate(FILE_LIMIT + 1)
    with pytest.raises(RecordError, match=r"huge\.jsonl: must have at most 268435456 bytes"):
        read(path)


def test_only_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "loop", ".", "missing"):
        with pytest.raises(RecordError, match="must be a file"):
            read(tmp_path / name)


@pytest.mark.parametrize("link", ["gpu", "gpu/emulated", "gpu/emulated/double.jsonl"])
def test_links_that_lead_out_are_refused(tmp_path, link):
    root, outside = tmp_path / "records", tmp_path / "outside"
    for place in (root, outside):
        keep(place, RECORD)
    inside = root / link
    inside.rename(tmp_path / "aside")
    inside.symlink_to(outside / link)
    content = path_of(outside).read_bytes()
    write(root, replace(RECORD, seed=4))
    for reading in (lambda: read_all(root, "gpu"), lambda: merge(root)):
        with pytest.raises(RecordError, match="leads out of it"):
            reading()
    assert path_of(outside).read_bytes() == content
    inside.unlink()
    (tmp_path / "aside").rename(inside)
    assert merge(root).written == 1


def test_parts_that_lead_out_are_refused(tmp_path):
    root, outside = tmp_path / "records", tmp_path / "outside"
    write(outside, RECORD)
    root.mkdir()
    (root / ".parts").symlink_to(outside / ".parts")
    for using in (lambda: merge(root), lambda: write(root, RECORD)):
        with pytest.raises(RecordError, match="leads out of it"):
            using()
    assert merge(outside).written == 1


def test_records_in_another_ledgers_place_are_refused(tmp_path):
    keep(tmp_path, RECORD)
    for other in ("gpu/NVIDIA_H200/double.jsonl", "tpu/emulated/double.jsonl", "gpu/emulated/other.jsonl"):
        place = tmp_path / other
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path_of(tmp_path).read_bytes())
        assert read(place)  # the file alone is in order
        with pytest.raises(RecordError, match="must hold what belongs there"):
            read_all(tmp_path, place.parts[-3])
        place.unlink()


def test_device_kinds_become_folders():
    assert folder_name("NVIDIA H200") == "NVIDIA_H200"
    assert folder_name("TPU v5 lite") == "TPU_v5_lite"
    assert folder_name("NVIDIA RTX PRO 6000 (Blackwell) 1g.10gb") == "NVIDIA_RTX_PRO_6000_(Blackwell)_1g.10gb"
    for bad in ("", ".", "..", "a/b", "a\\b", "a..b", "a\nb", "NVIDIA_H200", "ａ", " x", "a:b", "~x", "x" * 101):
        with pytest.raises(ValueError, match="device_kind must be"):
            folder_name(bad)


# --- where from, and whether still ---


def test_here_describes_this_code_without_loading_a_framework(tmp_path):
    code = (
        "import sys; from tests.matrix.gmm import GMM; from parity.ledger.provenance import checkout, here\n"
        "for backend in ('tpu', 'gpu'): print(here(GMM, backend, 'emulated', False).id)\n"
        "print([m for m in ('jax', 'torch', 'triton') if m in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.splitlines()[-1] == "[]"


def test_here_knows_code_versions_flags_and_commit(monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", " 1\n2")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("XLA_FLAGS", "--xla_x")
    gpu, tpu = (here(GMM, backend, EMULATED, False, utc="2026-01-31T23:59:59Z") for backend in ("gpu", "tpu"))
    assert (gpu.kernel, tpu.kernel) == (identity("gpu_reference.gmm:gmm"), identity("tpu_kernels.gmm:gmm"))
    assert gpu.golden == tpu.golden == identity("cpu_golden.gmm:gmm")
    assert gpu.flags["TRITON_DEFAULT_FP_FUSION"] == "1 2"
    assert "TRITON_CACHE_DIR" not in gpu.flags and "XLA_FLAGS" not in gpu.flags
    assert tpu.flags["XLA_FLAGS"] == "--xla_x"
    assert "jax" not in gpu.versions and "torch" not in tpu.versions
    assert gpu.versions["numpy"] == np.__version__
    assert gpu.utc == "2026-01-31T23:59:59Z"
    assert (gpu.commit, gpu.dirty) == checkout(ROOT / "gpu_reference")
    with pytest.raises(ModuleNotFoundError):
        here(replace(GMM, gpu="no_such_module:gmm"), "gpu", EMULATED, False)


def test_a_folder_has_its_repositorys_commit_if_git_can_say(tmp_path, monkeypatch):
    changed = tmp_path / "repository" / "changed"
    changed.mkdir(parents=True)
    (changed / "tracked").touch()
    git(changed, "init", "-q", "..")
    git(changed, "add", "tracked")
    git(changed, "commit", "-q", "-m", "some")
    head = git(changed, "rev-parse", "HEAD")
    assert checkout(changed.parent) == (head, False)
    (changed / "tracked").write_text("otherwise")
    assert checkout(changed) == (head, True)
    assert checkout(tmp_path) == (None, None)
    monkeypatch.setenv("PATH", "")
    assert checkout(ROOT / "docs") == (None, None)


OTHER = "f" * 64
CHANGES = {
    # what differs in the provenance; in the case; status; reason
    "nothing": ({}, {}, "VALID", ""),
    "only when and by whom": (dict(utc="2027-01-01T00:00:00Z", commit=None, dirty=None), {}, "VALID", ""),
    "schema": (dict(schema=2), {}, "INVALID", "schema 1 → 2"),
    "generator": (dict(revisions={"inputs": 2, "magnitude": 2, "metrics": 3}), {}, "INVALID",
                  "revision of inputs 1 → 2"),
    "input": ({}, dict(inputs={"x": OTHER}), "INVALID", "input x 0123456789ab → ffffffffffff"),
    "an input more": ({}, dict(inputs={"x": HASH, "y": OTHER}), "INVALID", "input y none → ffffffffffff"),
    "contract": ({}, dict(contract="tf32/f32/f32"), "INVALID", "contract ieee/float32/float32 → tf32/f32/f32"),
    "units, nearly": ({}, dict(floors={"out": 0.1009}), "VALID", ""),
    "units, not nearly": ({}, dict(floors={"out": 0.1011}), "INVALID", "floor of out 0.1 → 0.101"),
    "other units": (dict(kernel=OTHER), dict(floors={"out": 2e-8}), "INVALID", "floor of out 0.1 → 2e-08"),
    "kernel": (dict(kernel=OTHER), {}, "STALE", "kernel 0123456789ab → ffffffffffff"),
    "golden": (dict(golden=OTHER), dict(floors={"out": 0.10009}), "STALE", "golden fedcba987654 → ffffffffffff"),
    "a golden's code": (dict(golden=OTHER), {}, "VALID", ""),
    "tiles": ({}, dict(tiles=None), "STALE", "tiles 64x128x128 → none"),
    "version": (dict(versions={"python": "3.11.9", "triton": "3.10.0"}), {}, "STALE", "triton 3.9.0 → 3.10.0"),
    "Python": (dict(versions={"python": "3.13.0", "triton": "3.9.0"}), {}, "VALID", ""),
    "flags": (dict(flags={"TRITON_X": "1"}), {}, "STALE", "TRITON_INTERPRET 1 → none, TRITON_X none → 1"),
    "kernel and input": (dict(kernel=OTHER), dict(inputs={}), "INVALID", "input x 0123456789ab → none"),
    "kernel and tiles": (dict(kernel=OTHER), dict(tiles="1x2x3"), "STALE",
                         "kernel 0123456789ab → ffffffffffff, tiles 64x128x128 → 1x2x3"),
}  # fmt: skip


def freshness_of(given, current, **changes):
    floors = {name: m.floor for name, m in given.outputs.items()}
    now = dict(inputs=given.inputs, contract=given.contract, tiles=given.tiles, floors=floors) | changes
    return freshness(given, current, **now)


@pytest.mark.parametrize("then, now, status, reason", CHANGES.values(), ids=list(CHANGES))
def test_freshness_names_what_changed(then, now, status, reason):
    assert freshness_of(RECORD, replace(PROVENANCE, **then), **now) == Freshness(status, reason)


def test_the_code_of_a_golden_whose_values_need_no_rounding_counts():
    exact = replace(RECORD, outputs={name: replace(m, floor=0.0) for name, m in RECORD.outputs.items()})
    assert freshness_of(exact, replace(PROVENANCE, golden=OTHER)).status == "STALE"


def test_a_record_whose_figures_are_measured_again_is_valid():
    same, moved = RECORD.outputs, replace(PROVENANCE, kernel=OTHER, versions={"triton": "3.10.0"})
    other = {name: replace(m, epsilon=m.epsilon * (1 + 1e-5)) for name, m in same.items()}
    written = {name: replace(m, epsilon=m.epsilon * (1 + 1e-8)) for name, m in same.items()}
    assert freshness_of(RECORD, moved).status == "STALE"
    assert freshness_of(RECORD, moved, measured=other).status == "STALE"
    assert freshness_of(RECORD, moved, measured=same) == Freshness("VALID")
    assert freshness_of(RECORD, moved, measured=written) == Freshness("VALID")
    assert freshness_of(RECORD, moved, measured=same, contract="tf32/f32/f32").status == "INVALID"
    assert freshness_of(RECORD, PROVENANCE, measured=other).status == "VALID"


UNITS = {
    # by how much the unit that was drawn here is smaller; what else differs of the figures; status
    "all alike": (1.008, {}, "VALID"),
    "far off": (1.012, {}, "INVALID"),
    "another error": (1.008, dict(epsilon=1.03 * RECORD.outputs["out"].epsilon), "STALE"),
    "an element more that errs": (1.008, dict(differing=8), "STALE"),
    "another element misrounded": (1.008, dict(misrounded=0.25 + 1 / 600), "STALE"),
}


@pytest.mark.parametrize(("times", "differ", "status"), UNITS.values(), ids=list(UNITS))
def test_the_same_errors_in_a_unit_that_was_drawn_a_little_otherwise(times, differ, status):
    """As where another exp turns a random rounding: figures with a unit move with it, and histogram and tiles too."""
    then = RECORD.outputs["out"]
    here = dict(floor=then.floor * times, epsilon=then.epsilon * times, eta_q999=then.eta_q999 * times, tiles=())
    now = {"out": replace(then, **(here | differ))}
    floors = {"out": now["out"].floor}
    moved = replace(PROVENANCE, versions={"triton": "3.10.0"})
    assert freshness_of(RECORD, moved, floors=floors, measured=now).status == status
    assert in_units_of(now["out"], then).epsilon == pytest.approx(then.epsilon * times, rel=1e-12)


def test_freshness_of_devices():
    given = replace(RECORD, provenance=replace(H200, versions={"driver": "570.1"}))
    other = replace(H200, device_kind="NVIDIA H100", versions={"driver": "580.2"})
    reason = "device NVIDIA H200 → NVIDIA H100, driver 570.1 → 580.2"
    assert freshness_of(given, other) == Freshness("STALE", reason)
    # Where the device is missing nothing but the sources can be compared.
    assert freshness_of(given, PROVENANCE).status == "VALID"
    assert freshness_of(given, replace(PROVENANCE, kernel=OTHER)).status == "STALE"
