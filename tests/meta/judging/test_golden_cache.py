"""Goldens that are computed once: what is read is what was computed, or it is computed again."""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
import warnings
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from parity.inputs import draw
from parity.judging import goldens
from parity.judging.goldens import GoldenCache, pack, unpack
from parity.judging.judge import judge
from parity.judging.reference import reference
from parity.ledger import sources
from parity.trial import Trial
from tests.matrix import OPS

OP = {op.name: op for op in OPS}
PLENTY = 10**9
FORK = multiprocessing.get_context("fork")


def name(n):
    """A key, each in another folder."""
    return f"{n:02x}" + "0" * 60 + f"{n:02x}"


def arrays(n, size=100):
    return {"golden.out": np.full(size, float(n)), "magnitude.out": np.arange(size) + n}


def equal(a, b):
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and a[n].tobytes() == b[n].tobytes() for n in a
    )


def must_not_compute():
    raise AssertionError("computed again")


def entries(root):
    return [path for path in Path(root).rglob("*") if path.is_file() and path.name != ".lock"]


def size_of(root):
    return sum(path.stat().st_size for path in entries(root))


def in_processes(count, target, *arguments):
    processes = [FORK.Process(target=target, args=(n, *arguments)) for n in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forked beside threads: the children load no framework
        for process in processes:
            process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


@pytest.fixture
def cache(tmp_path):
    return GoldenCache(str(tmp_path / "cache"), PLENTY, pays=0.0)


# --- what is written is what is read ---


def test_arrays_of_every_dtype_and_form_come_back_bit_for_bit(cache):
    values = np.array([[0.0, -0.0, np.nan], [np.inf, 1e-310, -3.5]])
    stored = {
        "z": values, "transposed": values.T, "view": np.broadcast_to(values[:, :1], (2, 4)),
        "scalar": np.array(2.5), "empty": np.zeros((0, 3)), "int8": np.arange(-3, 3, dtype=np.int8),
        "bool": np.array([True, False]), "a:b": np.float32([1, 2]),
        **{dtype: values[:, :2].astype(getattr(ml_dtypes, dtype)) for dtype in
           ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")},
    }  # fmt: skip
    cache.get(name(1), lambda: stored)
    assert equal(cache.get(name(1), must_not_compute), stored)


@pytest.mark.parametrize("url", ["memory://goldens-{}", "file://{}"])
def test_any_file_system_of_fsspec_will_do(url, tmp_path):
    url = url.format(tmp_path / uuid.uuid4().hex)
    GoldenCache(url, PLENTY, pays=0.0).get(name(1), lambda: arrays(1))
    assert equal(GoldenCache(url, PLENTY).get(name(1), must_not_compute), arrays(1))


def test_a_store_without_times_of_reading_keeps_within_its_bound_too():
    cache = GoldenCache(f"memory://{uuid.uuid4().hex}", limit=5 * len(pack(name(0), arrays(0))), pays=0.0)
    for n in range(20):
        cache.get(name(n), lambda n=n: arrays(n))
    assert sum(info["size"] for info in cache._store.find(cache._root, detail=True).values()) <= cache.limit
    assert equal(cache.get(name(19), must_not_compute), arrays(19))


def test_what_is_quick_to_compute_is_not_written(tmp_path):
    cache = GoldenCache(str(tmp_path), PLENTY, pays=0.05)
    cache.get(name(1), lambda: arrays(1))
    assert not entries(tmp_path)
    cache.get(name(1), lambda: time.sleep(0.06) or arrays(1))
    assert len(entries(tmp_path)) == 1


# --- what is not whole is missing ---

SPOILT = {
    "cut off": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "a bit of an array": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "a bit of the header": lambda content: content[:60] + bytes([content[60] ^ 1]) + content[61:],
    "longer": lambda content: content + b"\0",
    "another key's": lambda content: pack(name(2), arrays(2)),
    "no safetensors": lambda content: b"\0" * 500,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_entry_is_computed_again_and_replaced(cache, spoil):
    cache.get(name(1), lambda: arrays(1))
    (path,) = entries(cache.url)
    path.write_bytes(spoil(path.read_bytes()))
    assert equal(cache.get(name(1), lambda: arrays(3)), arrays(3))
    assert equal(cache.get(name(1), must_not_compute), arrays(3))


def test_a_spoilt_entry_that_is_quick_to_compute_is_removed(cache):
    cache.get(name(1), lambda: arrays(1))
    (path,) = entries(cache.url)
    path.write_bytes(b"")
    cache.pays = 1e9
    cache.get(name(1), lambda: arrays(1))
    assert not path.exists()


def test_no_single_bit_can_turn_without_being_noticed():
    content = pack(name(1), arrays(1, size=3))
    for byte in range(len(content)):
        assert unpack(name(1), content[:byte] + bytes([content[byte] ^ 16]) + content[byte + 1 :]) is None, byte


# --- what the key depends on ---


def key(op, case):
    return goldens.key(op, case, draw(op, case))


def test_every_op_of_the_matrix_has_a_key_and_no_two_cases_share_one():
    chosen = [(op, case) for op in OPS for case in op.cases if case.tier == "smoke"]
    keys = [key(op, case) for op, case in chosen]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    op, case = chosen[0]
    assert key(op, case) == keys[0]
    assert key(op, replace(case, tier="full", model="some")) == keys[0]
    assert key(op, case.with_seed(1)) != keys[0]


def test_the_key_follows_inputs_arguments_and_what_the_magnitude_closes_over():
    from parity import abs_of

    op, inputs = OP["gmm"], draw(OP["gmm"], OP["gmm"].cases[0])
    case = op.cases[0]
    other = {**inputs, "lhs": inputs["lhs"].copy()}
    other["lhs"].flat[0] += 1
    arguments = op.arguments(case)
    found = {
        goldens.key(op, case, inputs),
        goldens.key(op, case, other),
        goldens.key(replace(op, arguments=lambda c: {**arguments, "tiling": (1, 2, 3)}), case, inputs),
        goldens.key(replace(op, magnitude=abs_of("lhs")), case, inputs),
        goldens.key(replace(op, golden=OP["tgmm"].golden), case, inputs),
    }
    assert None not in found
    assert len(found) == 5


def test_what_cannot_be_named_is_not_shared():
    op, case = OP["gmm"], OP["gmm"].cases[0]
    for changed in (
        replace(op, golden=np.add),
        replace(op, arguments=lambda c: {"rounding": object()}),
        replace(op, arguments=lambda c: {"table": np.arange(3)}),
    ):
        assert key(changed, case) is None


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A golden of somebody else's project, in a package that imports within itself and from another one."""
    files = {
        "their_goldens/__init__.py": "",
        "their_goldens/op.py": "from .helper import twice\nimport their_tables\n"
        "def golden(x):\n    return twice(x) + their_tables.TABLE\n",
        "their_goldens/helper.py": "def twice(x):\n    return 2 * x\n",
        "their_tables.py": "TABLE = 1\n",
        "unrelated.py": "",
    }

    def write(path, text):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        os.utime(tmp_path / path, (1e9, 1e9))
        forget()

    for path, text in files.items():
        write(path, text)
    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for module in [m for m in sys.modules if m.startswith("their_")]:
        del sys.modules[module]
    forget()


def forget():
    goldens._sources.cache_clear()
    sources.forget()


@pytest.mark.parametrize("path", ["their_goldens/op.py", "their_goldens/helper.py", "their_tables.py"])
def test_a_changed_source_of_the_golden_misses(elsewhere, path, tmp_path):
    from their_goldens.op import golden

    op = replace(OP["gmm"], golden=golden)
    before = key(op, op.cases[0])
    assert before
    elsewhere("unrelated.py", "changed = True\n")
    assert key(op, op.cases[0]) == before
    text = (tmp_path / path).read_text()
    elsewhere(path, text + "\n# changed\n")
    assert key(op, op.cases[0]) == before
    elsewhere(path, text.replace("1", "3").replace("2 *", "3 *").replace("twice(x) +", "twice(x) -"))
    assert key(op, op.cases[0]) not in (before, None)


def test_a_source_that_is_newer_than_this_process_is_not_trusted(elsewhere, tmp_path):
    """What was imported may be what it was before."""
    from their_goldens.op import golden

    op = replace(OP["gmm"], golden=golden)
    os.utime(tmp_path / "their_goldens/helper.py", (time.time() + 10, time.time() + 10))
    forget()
    assert key(op, op.cases[0]) is None


def test_hosts_with_either_framework_agree_on_the_sources():
    found = sources.fingerprint(OP["chunk_gla_fwd"].inputs)
    assert {"code", "numpy"} <= found.keys()
    assert not {"jax", "torch", "triton", "pytest"} & found.keys()


# --- many at once ---


def get_slowly(n, url, log):
    def compute():
        with log.open("a") as file:
            file.write(f"{n}\n")
        time.sleep(0.5)
        return arrays(7)

    assert equal(GoldenCache(url, PLENTY).get(name(7), compute), arrays(7))


def test_processes_that_want_the_same_golden_compute_it_once(tmp_path):
    log = tmp_path / "log"
    assert in_processes(4, get_slowly, str(tmp_path / "cache"), log) == [0] * 4
    assert len(log.read_text().split()) == 1


def test_a_process_that_dies_holding_a_lock_holds_up_nobody(cache):
    held = FORK.Event()

    def hold():
        cache.get(name(1), lambda: held.set() or time.sleep(60))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = FORK.Process(target=hold)
        process.start()
    assert held.wait(10)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    began = time.monotonic()
    assert equal(cache.get(name(1), lambda: arrays(1)), arrays(1))
    assert time.monotonic() - began < 10


def get_many(n, url, limit):
    """Reads and writes in an order of its own; everything must be what its key says."""
    cache = GoldenCache(url, limit, pays=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in np.random.default_rng(n).integers(0, 40, 150):
            assert equal(cache.get(name(k), lambda k=k: arrays(k)), arrays(k))


def test_eviction_while_others_read_and_write_harms_nobody(tmp_path):
    limit = 10 * len(pack(name(0), arrays(0)))
    assert in_processes(4, get_many, str(tmp_path), limit) == [0] * 4
    GoldenCache(str(tmp_path), limit, pays=0.0).get(name(41), lambda: arrays(41))
    assert 0 < size_of(tmp_path) <= limit


# --- bounded ---


def test_the_bound_holds_after_every_write_and_what_was_read_last_stays(tmp_path):
    cache = GoldenCache(str(tmp_path), limit=10 * len(pack(name(0), arrays(0))), pays=0.0)
    long_ago = time.time() - 1000
    for n in range(30):
        cache.get(name(n), lambda n=n: arrays(n))
        assert size_of(tmp_path) <= cache.limit
        for k, path in enumerate(sorted(entries(tmp_path))):  # by key: in the order of writing
            os.utime(path, (long_ago + k, long_ago + k))
        assert equal(cache.get(name(0), must_not_compute), arrays(0))
    left = {path.name for path in entries(tmp_path)}
    assert {name(0), name(29), name(28)} <= left
    assert name(1) not in left


def test_what_a_dead_writer_left_goes_and_what_a_slow_one_writes_stays(tmp_path):
    cache = GoldenCache(str(tmp_path), PLENTY, pays=0.0)
    left, written = (tmp_path / "07" / f".partial-{uuid.uuid4().hex}" for _ in range(2))
    left.parent.mkdir()
    for path, age in ((left, 2 * goldens.WAIT), (written, goldens.WAIT / 2)):
        path.write_text("half")
        os.utime(path, (time.time() - age, time.time() - age))
    cache.get(name(1), lambda: arrays(1))
    assert not left.exists()
    assert written.exists()


def test_what_is_larger_than_the_bound_is_not_written(tmp_path):
    cache = GoldenCache(str(tmp_path), limit=1000, pays=0.0)
    cache.get(name(1), lambda: arrays(1))
    assert not entries(tmp_path)


def test_eviction_touches_nothing_but_entries(tmp_path):
    (tmp_path / "thesis.tex").write_text("x" * 5000)
    cache = GoldenCache(str(tmp_path), limit=3000, pays=0.0)
    for n in range(5):
        cache.get(name(n), lambda n=n: arrays(n))
    assert (tmp_path / "thesis.tex").exists()
    assert size_of(tmp_path) <= 3000 + 5000


# --- what cannot be written, or is not there ---


@pytest.fixture
def read_only():
    """A folder with an entry, which this process can only read: as another user, where it is root's."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    GoldenCache(str(root), PLENTY, pays=0.0).get(name(1), lambda: arrays(1))
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    for path in root.rglob(".lock"):
        path.unlink()
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield root
    os.seteuid(user)
    for path in folders:
        path.chmod(0o755)
    shutil.rmtree(root)


def test_a_folder_that_is_only_to_be_read_is_read_and_warned_of_once(read_only):
    cache = GoldenCache(str(read_only), PLENTY, pays=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(cache.get(name(1), must_not_compute), arrays(1))
    with pytest.warns(RuntimeWarning, match=r"PermissionError.*goldens are computed") as told:
        for n in (2, 3, 2):
            assert equal(cache.get(name(n), lambda n=n: arrays(n)), arrays(n))
    assert len(told) == 1


def test_a_store_that_fails_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    cache = GoldenCache(str(tmp_path / "file" / "below"), PLENTY, pays=0.0)
    with pytest.warns(RuntimeWarning, match="NotADirectoryError"):
        assert equal(cache.get(name(1), lambda: arrays(1)), arrays(1))


@pytest.mark.parametrize(
    ("url", "limit", "message"),
    [("nonsense://x", 1, "nonsense"), ("/tmp", 0, "limit")],
)
def test_a_cache_that_cannot_be_is_refused(url, limit, message):
    with pytest.raises(ValueError, match=message):
        GoldenCache(url, limit)


# --- verdicts ---


def test_references_are_the_same_bits_with_and_without(cache, monkeypatch):
    of_each_kind = (
        "gmm",
        "tgmm_quantized",
        "grouped_gemm",
        "mxfp8_quantize",
        "unpermute",
        "chunk_gla_fwd",
        "chunk_kda_fwd",
    )
    cases = [(OP[name], next(c for c in OP[name].cases if c.tier == "smoke")) for name in of_each_kind]
    without = [reference.__wrapped__(op, case) for op, case in cases]
    monkeypatch.setattr(goldens, "of_environment", lambda: cache)
    written = [reference.__wrapped__(op, case) for op, case in cases]
    assert len(entries(cache.url)) == len(cases)
    monkeypatch.setattr("parity.judging.reference._truth", lambda *given: must_not_compute())
    read = [reference.__wrapped__(op, case) for op, case in cases]
    for others in (written, read):
        for a, b in zip(without, others, strict=True):
            assert equal(a.golden, b.golden)
            assert equal(a.magnitude, b.magnitude)
            assert a.chain == b.chain


@pytest.mark.tpu
def test_verdicts_are_the_same_with_and_without(cache, monkeypatch):
    pytest.importorskip("jax")
    case = next(c for c in OP["tgmm"].cases if c.tier == "smoke")

    def judged():
        reference.cache_clear()
        return replace(judge(Trial(OP["tgmm"], case, "tpu")), seconds=0)

    without = judged()
    monkeypatch.setattr(goldens, "of_environment", lambda: cache)
    assert judged() == without
    monkeypatch.setattr("parity.judging.reference._truth", lambda *given: must_not_compute())
    assert judged() == without
    reference.cache_clear()


@pytest.mark.full
def test_pytest_and_its_workers_use_the_cache_that_is_asked_for(project, tmp_path):
    pytest.importorskip("jax")
    run, matrix = project(), tmp_path / "matrix.py"
    computing = 'open("calls", "a").write("x"); import time; time.sleep(0.15)\n    return 2.0'
    matrix.write_text(matrix.read_text().replace("return 2.0", computing))
    os.utime(matrix, (1e9, 1e9))
    for workers in ("-n0", "-n1"):
        done = run(workers, "-q", "--parity-tier=smoke", "--parity-golden-cache=shared")
        assert done.returncode == 0, done.stdout
        # Two kinds of data, for each a golden and the magnitude that calls it: all of them in the first run.
        assert (tmp_path / "calls").read_text() == "xxxx"
    refused = run("-q", "--parity-golden-cache=nonsense://x")
    assert refused.returncode == 4
    assert "must be a folder or an fsspec URL, got nonsense://x" in refused.stderr
