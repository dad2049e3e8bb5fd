"""Every way to misbehave, through every way to run: nothing green that is not, nothing lost, nothing left behind."""

import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.meta.audit.ways import CHANGES, CRASH, DIES, DIRTY, HANGS, RAISES, RETURNS, WRONG, kernels
from tests.support.commands import environment
from tests.support.projects import BOTH

pytestmark = pytest.mark.full

FIRST = 100
PLAIN = ["-q", "-rN", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
EXPECTED = {**dict.fromkeys(RAISES, CRASH), **dict.fromkeys(CHANGES, DIRTY), **dict.fromkeys(RETURNS, WRONG)}
EXPECTED |= {**dict.fromkeys(DIES, CRASH), **dict.fromkeys(HANGS, ("TIMEOUT",))}


class Watched:
    """A project whose commands are told from all other processes, so that none is left and nothing stays behind."""

    def __init__(self, project, ways):
        self.run, self.ways, self.mark = project(), ways, uuid.uuid4().hex
        dims = ", ".join(f"dict(M={FIRST + n}, N=4)" for n in range(len(ways)))
        grid = f'    _DOUBLE.grid([{dims}], dtype=["float32"], model="Odd"),\n)\nOPS'
        self.run.replace("matrix.py", ")\nOPS", grid)
        self.run.write("kernels.py", kernels(ways, FIRST))
        self.run.write("test_double.py", BOTH)
        self.temporary = self.run.folder / ".tmp"  # others run here too
        self.temporary.mkdir()

    def __call__(self, *words, kill_after=None):
        mine = environment() | {"PARITY_AUDIT": self.mark, "TMPDIR": str(self.temporary)}
        process = subprocess.Popen([sys.executable, "-m", *words], cwd=self.run.folder, env=mine, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        if kill_after is not None:
            time.sleep(kill_after)
            process.kill()
        printed, _ = process.communicate(timeout=1500)
        return process.returncode, printed

    def assert_nothing_left(self):
        end = time.monotonic() + 30  # pytest-xdist's workers look for their controller
        while (orphans := self.processes()) and time.monotonic() < end:
            time.sleep(0.5)
        assert not orphans
        assert not [*self.temporary.glob("parity-*")]

    def processes(self):
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"PARITY_AUDIT={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes())
            except OSError:
                continue
        return [words for words in found if words]


def outcomes(printed, backend):
    """What pytest says of each way's case on a backend, by its number."""
    where = rf"(?:{backend}: emulated   |test_{backend}\[)double-M(\d+)_N4-f32-s0"
    found = re.findall(rf"^([A-Z-]+)[ A-Z]*  G\d: .*?{where}", printed, re.MULTILINE)
    return {int(rows) - FIRST: outcome for outcome, rows in found}


IGNORED = re.compile(r"^Exception ignored in: .*\nTraceback .*\n(?:  .*\n)+.*\n", re.MULTILINE)
"""What Python itself says of an exception in `__del__`."""


def assert_sound(code, printed):
    assert code == 1, printed[-3000:]
    assert "INTERNALERROR" not in printed
    assert "Traceback (most recent call last)" not in IGNORED.sub("", printed)
    assert "\x1b[2J" not in printed and "\x00" not in printed and "\u202e" not in printed


def assert_named(watched, printed, backend):
    found = outcomes(printed, backend)
    for n, way in enumerate(watched.ways):
        assert found.get(n, "") in EXPECTED[way], (backend, way, found.get(n))


QUIET = [*RAISES, *CHANGES, *RETURNS]


def test_without_workers_each_is_named(project):
    watched = Watched(project, QUIET)
    code, printed = watched("pytest", *PLAIN, "--parity-tier=full")
    assert_sound(code, printed)
    for backend in ("tpu", "gpu"):
        assert_named(watched, printed, backend)
    assert f"{2 * len(QUIET)} failed, 10 passed" in printed, "the healthy ones"
    watched.assert_nothing_left()


@pytest.mark.parametrize("way", [*DIES, *HANGS])
def test_without_workers_a_death_is_named_and_not_green(way, project):
    watched = Watched(project, [way])
    code, printed = watched("pytest", "-q", "-p", "no:cacheprovider", "--parity-timeout=20", "-k", "tpu")
    if way == "os.kill(os.getpid(), signal.SIGTERM)":  # which is a user's: pytest ends in order
        assert code == 2
    else:
        assert_sound(code, printed)
        assert_named(watched, printed, "tpu")
    watched.assert_nothing_left()


def test_with_workers_each_is_named(project):
    watched = Watched(project, [*QUIET, *DIES, *HANGS])
    code, printed = watched("pytest", *PLAIN, "-n", "2", "--parity-timeout=30")
    assert_sound(code, printed)
    for backend in ("tpu", "gpu"):
        assert_named(watched, printed, backend)
    watched.assert_nothing_left()


def test_in_the_table_each_has_its_line(project):
    watched = Watched(project, [*QUIET, *DIES, *HANGS])
    code, printed = watched("parity", "run", "--seeds", "1", "-j", "2", "--timeout", "60")
    assert_sound(code, printed)
    failed = dict(re.findall(r"^([A-Z-]+)[ A-Z]*: double-M(\d+)_N4-f32-s0: ", printed, re.MULTILINE))
    named = {int(rows) - FIRST: outcome for outcome, rows in
             re.findall(r"^([A-Z-]+)[ A-Z]*: double-M(\d+)_N4-f32-s0: ", printed, re.MULTILINE)}  # fmt: skip
    assert failed
    for n, way in enumerate(watched.ways):
        assert named.get(n) in EXPECTED[way], (way, named.get(n))
    watched.assert_nothing_left()


# --- kills ---


@pytest.mark.parametrize("seed", range(25))
def test_a_kill_at_any_moment_loses_nothing_and_leaves_nothing(seed, project, tmp_path):
    """Of recording (with and without workers), resuming, merging, bisecting, shrinking: five moments of each."""
    watched = Watched(project, [])
    moment = 0.4 + (seed * 0.6180339887 % 1) * 6
    kind = seed % 5
    record = ["pytest", "-q", "--parity-record", *(["-n", "2"] if seed % 2 else [])]
    if kind in (0, 1):
        killed, _ = watched(*record, kill_after=moment)
        if kind == 1:
            watched(*record, "--parity-resume", kill_after=moment / 2)
        code, printed = watched(*record, "--parity-resume")
        assert code == 0 or "no tests ran" in printed, printed[-2000:]
        assert killed in (0, -signal.SIGKILL)
        assert records(tmp_path) == 8
    elif kind == 2:
        watched(*record)
        watched("parity", "merge", "records", "--records", "into", kill_after=moment / 6)
        assert watched("parity", "merge", "records", "--records", "into")[0] == 0
        assert records(tmp_path) == records(tmp_path, "into") == 8
    else:
        watched.run.replace("kernels.py", "    return x + x", "    return x * 3")
        words = ["shrink", "double-M8_N40-f32-s0"]
        if kind == 4:
            words = ["bisect", "HEAD~2", "HEAD", "double-M8_N40-f32-s0", "--cache", "cache"]
            history(watched)
        watched("parity", *words, kill_after=moment)
        code, printed = watched("parity", *words)
        assert code == (0 if kind == 4 else 1), printed
        assert ("first bad commit" if kind == 4 else "smallest case") in printed, printed
        assert not [*tmp_path.glob("cache/*-*")]
    watched.assert_nothing_left()


def records(folder, name="records"):
    return sum(path.read_text().count('"case"') for path in (folder / name).glob("*/*/*.jsonl"))


def history(watched):
    """Three commits, of which the last one has broken the kernel."""
    from tests.support.commands import git

    bad = (watched.run.folder / "kernels.py").read_text()
    git(watched.run.folder, "init", "-q")
    (watched.run.folder / ".gitignore").write_text(".tmp\ncache\n__pycache__\n.pytest_cache\n")
    for n, text in enumerate([bad.replace("x * 3", "x + x"), bad.replace("x * 3", "2 * x"), bad]):
        watched.run.write("kernels.py", f"{text}\n# {n}\n")
        git(watched.run.folder, "add", "-A")
        git(watched.run.folder, "commit", "-q", "-m", f"commit {n}")


# --- odd machines ---

ODD = {
    "no home": {"HOME": None}, "a home that is not there": {"HOME": "/nowhere"}, "C": {"LC_ALL": "C", "LANG": "C"},
    "ASCII": {"PYTHONIOENCODING": "ascii"}, "no path": {"PATH": "/nowhere"}, "no user": {"HOME": None, "USER": None},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("folder", ["plain", "with space and 'quotes' $HOME", "dé日本", "a;b & %s {0}"])
def test_an_odd_machine_gives_the_same_verdicts(name, folder, tmp_path):
    from tests.support.projects import Project

    (tmp_path / folder).mkdir()
    run = Project(tmp_path / folder, kernel="bad")
    changed = environment() | {k: v for k, v in ODD[name].items() if v is not None}
    mine = {k: v for k, v in changed.items() if ODD[name].get(k, "") is not None}
    command = [sys.executable, "-m", "pytest", "-q", "--parity-record"]
    done = subprocess.run(command, cwd=run.folder, env=mine, capture_output=True, timeout=600)
    assert done.returncode == 1 and b"4 LOGIC FAULT" in done.stdout and b"INTERNALERROR" not in done.stdout, done.stdout
    for words in (["show", "double-M8_N40-f32-s0"], ["list"]):
        command = [sys.executable, "-m", "parity", *words]
        shown = subprocess.run(command, cwd=run.folder, env=mine, capture_output=True, timeout=600)
        assert shown.returncode == 0 and b"Traceback" not in shown.stderr, shown.stderr


def test_a_full_disk_under_the_output_is_not_green(project):
    run = project()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "parity", "list"], cwd=run.folder, env=environment(), stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 2 and "No space left on device" in done.stderr and "Traceback" not in done.stderr
