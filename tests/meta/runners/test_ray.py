"""The tests of a project on a cluster of several nodes in this machine, whole and with losses."""

import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity import cli
from parity.ledger.schema import RecordError
from parity.ledger.write import Follower, Recorder
from parity.runners import ray as ray_run
from tests.support.commands import environment, run_pytest
from tests.support.projects import BOTH, Project
from tests.support.records import RECORD, contents
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
NEITHER = """
def test_neither(record_property):
    import os
    record_property("owns", [os.environ.get(name) for name in ("TPU_VISIBLE_CHIPS", "CUDA_VISIBLE_DEVICES")])
"""

DIES = """
import os

def good(x):
    if x.shape == (3, 5) and str(x.dtype) == "torch.bfloat16":
        os._exit(7)
    return x + x
"""


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 5))
def test_tasks_have_every_test_once_in_order_and_are_of_one_file(count, slots, files):
    items = [SimpleNamespace(path=n * files // count, number=n) for n in range(count)]
    found = list(ray_run.tasks(items, slots))
    assert [item for task in found for item in task] == items
    assert all(len({item.path for item in task}) == 1 and len(task) <= ray_run.MOST for task in found)
    assert len(found) >= min(count, slots) / 2, "few slots stay idle"


def test_tests_of_one_compiled_kernel_are_in_one_task(project, tmp_path):
    run = project()
    (tmp_path / "conftest.py").write_text(
        "from parity.runners.ray import tasks\n"
        "def pytest_collection_finish(session):\n"
        "    for task in tasks(session.items, 4): print('TASK', *(item.name for item in task))\n"
    )
    found = [line.split()[1:] for line in run("-s", "--collect-only").stdout.splitlines() if line.startswith("TASK")]
    assert len(found) == 4
    cases = [{re.search(r"\[(.*?)(-integers)?-s0\]", name)[1] for name in names} for names in found]
    assert all(len(case) == 1 for case in cases), found
    assert len(set().union(*cases)) == 4


def test_what_is_being_recorded_is_read_once_and_whole(tmp_path):
    follower = Follower(tmp_path)
    assert follower.new() == []
    other = replace(RECORD, seed=4)
    with Recorder(tmp_path) as one, Recorder(tmp_path) as two:
        one.write(RECORD)
        assert follower.new() == [RECORD]
        two.write(other)
        one.write(other)
        assert follower.new() == [other, other]
        assert follower.new() == []
    part = next((tmp_path / ".parts").glob("*.jsonl"))
    line = part.read_text().splitlines()[-1]
    with part.open("a") as file:
        file.write(line[:100])
        file.flush()
        assert follower.new() == []
        file.write(f"{line[100:]}\n")
        file.flush()
        assert follower.new() == [other]
        file.write("{}\n")
        file.flush()
        with pytest.raises(RecordError, match="provenance must be the id of an earlier line"):
            follower.new()


def test_without_ray_its_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit):
        cli.main(["run", "--ray"])
    assert "--ray needs the extra 'ray': pip install 'kernel-parity[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray", "127.0.0.1:1"], "--ray cannot connect to 127.0.0.1:1: [Errno 111] Connection refused"),
        (["--ray", "ray://127.0.0.1:1"], "--ray must be HOST:PORT of a cluster that this machine belongs to"),
        (["--ray", "somewhere"], "--ray must be HOST:PORT, got somewhere"),
        (["-j", "2", "--ray"], "-j must be left out with --ray"),
        (["tests"], "ARGUMENTS are for pytest with --ray, got tests"),
    ],
)
def test_what_cannot_be_is_one_clear_error(capsys, arguments, message):
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_node_that_does_not_start_is_one_clear_error(monkeypatch, capsys):
    ray = pytest.importorskip("ray", reason="needs the extra 'ray'")

    def init(*given, **options):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--ray"])
    assert ended.value.code == 2
    assert "--ray cannot connect to a cluster: The current node timed out" in capsys.readouterr().err


# --- on a cluster ---


@pytest.fixture(scope="module")
def cluster():
    """Three nodes of one CPU: one more has a TPU, one a GPU, as far as Ray knows."""
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            started.add_node(num_cpus=1, resources={"TPU": 1})
            started.add_node(num_cpus=1, num_gpus=1)
            yield started
        finally:
            started.shutdown()


def start(cluster, folder, *arguments):
    command = [sys.executable, "-m", "parity", "run", "--ray", cluster.address, "--", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # Interrupted as in the foreground, whatever these tests are a job of.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=folder, env=environment(), preexec_fn=heard, **streams)


def on(cluster, folder, *arguments):
    """What a whole run printed, and its exit code."""
    with start(cluster, folder, *arguments) as run:
        printed, _ = run.communicate(timeout=300)
    return printed, run.returncode


def verdicts(junit):
    """Of a run its tests with their outcomes and verdicts, and where each was."""
    found, where = {}, {}
    for test in ET.parse(junit).iter("testcase"):
        name = f"{test.get('classname')}::{test.get('name')}"
        told = {p.get("name"): p.get("value") for p in test.iter("property")}
        outcome = [child.tag for child in test if child.tag not in ("properties", "system-out", "system-err")]
        where[name] = told.get("ray_node"), told.get("owns")
        found[name] = outcome, {key: told.get(key) for key in ("verdict", "epsilon", "eta", "bound", "rerun")}
    return found, where


@pytest.mark.full  # as are all tests on a cluster: it takes a minute to start, and to run eight tests
@pytest.mark.parametrize("dying", [False, True])
def test_a_run_on_a_cluster_is_one_with_two_workers_elsewhere(cluster, project, tmp_path, dying):
    run = project()
    ended = "1 failed, 8 passed" if dying else "9 passed"
    run.write("test_double.py", BOTH + NEITHER)
    if dying:
        (tmp_path / "kernels.py").write_text(DIES)
    done = run("-n2", "--parity-record", "--parity-records=local", "--junitxml=local.xml")
    assert ended in done.stdout, done.stdout
    printed, code = on(cluster, tmp_path, "--parity-record", "--junitxml=ray.xml")
    assert code == dying, printed
    assert ended in printed
    assert ", 3 nodes, 3 CPUs · tpu: 1 TPU · gpu: 1 GPU" in printed
    assert contents(tmp_path / "records") == contents(tmp_path / "local") != {}
    found, where = verdicts(tmp_path / "ray.xml")
    assert found == verdicts(tmp_path / "local.xml")[0]
    crash = "CRASH  G1: ended with status 7   test_double.py::test_gpu[double-M3_N5-bf16-s0]"
    assert (crash in printed) == dying
    nodes = [{node for name, (node, _) in where.items() if kind in name and node} for kind in ("_tpu", "_gpu")]
    assert len(nodes[0]) == len(nodes[1]) == len(nodes[0] ^ nodes[1]) / 2 == 1, "each on the node that has its device"
    (neither,) = (owned for name, (_, owned) in where.items() if "neither" in name)
    assert neither == "['', '']", "no device on whatever node"


@pytest.mark.full
def test_each_project_has_its_own_kernels_and_records_on_a_cluster(cluster, tmp_path):
    for name, kernel in (("a", "good"), ("b", "bad")):
        (tmp_path / name).mkdir()
        Project(tmp_path / name, kernel)
    given = ("--parity-record", "-k", "agrees and M8_N40 and f32")
    done = run_pytest(tmp_path, *given, "-n0")
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    alone = {name: contents(tmp_path / name / "records") for name in "ab"}
    for name in "ab":
        shutil.rmtree(tmp_path / name / "records")
    printed, code = on(cluster, tmp_path, *given)
    assert code == 1 and "1 failed, 1 passed" in printed, printed
    assert {name: contents(tmp_path / name / "records") for name in "ab"} == alone
    assert not (tmp_path / "records").exists()
    assert f"records: 1 written to {tmp_path / 'b' / 'records'}" in printed, printed


LOSES_ITS_WORKER = """
import os, signal, time
from pathlib import Path

def good(x):
    flag = Path({flag!r})
    if x.shape == (3, 5) and "bfloat16" in str(x.dtype) and flag.exists():
        {forever} or flag.unlink()
        pytest = Path(f"/proc/{{os.getppid()}}/stat").read_text()
        os.kill(int(pytest.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(100)
    return x + x
"""


@pytest.mark.full
def test_a_killed_worker_changes_nothing(cluster, project, tmp_path):
    run = project()
    run.write("kernels.py", LOSES_ITS_WORKER.format(flag=str(tmp_path / "lethal"), forever=False))
    assert "8 passed" in run("-n2", "--parity-record", "--parity-records=local").stdout
    (tmp_path / "lethal").touch()
    printed, code = on(cluster, tmp_path, "--parity-record")
    assert not (tmp_path / "lethal").exists(), "a worker was killed"
    assert code == 0, printed
    assert "8 passed" in printed
    assert printed.count("passed test_double.py::") == 8, "nothing was heard twice"
    assert contents(tmp_path / "records") == contents(tmp_path / "local") != {}


@pytest.mark.full
def test_a_case_that_kills_every_worker_costs_that_case_alone(cluster, project, tmp_path):
    project().write("kernels.py", LOSES_ITS_WORKER.format(flag=str(tmp_path / "lethal"), forever=True))
    (tmp_path / "lethal").touch()
    printed, code = on(cluster, tmp_path, "-k", "test_agrees")
    assert code == 1, printed
    assert "1 failed, 3 passed" in printed
    lost = "CRASH  G1: Ray lost its worker 4 times: WorkerCrashedError"
    assert f"{lost}   test_double.py::test_agrees[double-M3_N5-bf16-s0]" in printed
    assert "1 CRASH" in printed, "in the summary"


WAITS = """
import os, time
from pathlib import Path

def good(x):
    flag = Path({flag!r})
    if x.shape == (3, 5) and flag.exists():
        flag.write_text(f"{{os.getpid()}} {{os.environ['RAY_RAYLET_PID']}}")
        flag.rename({here!r})
        while True:
            time.sleep(1)
    return x + x
"""


def waits(tmp_path):
    """The file in which a kernel writes its process and its node before it waits for ever, where there is a flag."""
    here = tmp_path / "here"
    (tmp_path / "kernels.py").write_text(WAITS.format(flag=str(tmp_path / "flag"), here=str(here)))
    return here


def lose_the_node_of(here, cluster):
    """Take away the node on which a kernel waits; that kernel's process."""
    kernel, raylet = map(int, here.read_text().split())
    (lost,) = {node for node in cluster.list_all_nodes() if node.all_processes["raylet"][0].process.pid == raylet}
    cluster.remove_node(lost, allow_graceful=False)
    return kernel


@pytest.mark.full
def test_a_lost_node_changes_nothing(cluster, project, tmp_path):
    run = project()
    here = waits(tmp_path)
    assert "8 passed" in run("-n2", "--parity-record", "--parity-records=local").stdout
    (tmp_path / "flag").touch()
    cluster.add_node(num_cpus=1, resources={"TPU": 1})
    with start(cluster, tmp_path, "--parity-record") as driver:
        until(here.exists)
        kernel = lose_the_node_of(here, cluster)
        printed, _ = driver.communicate(timeout=240)
    assert driver.returncode == 0, printed
    assert "8 passed" in printed
    assert contents(tmp_path / "records") == contents(tmp_path / "local") != {}
    until(lambda: not Path(f"/proc/{kernel}").exists())


@pytest.mark.full
def test_a_device_that_no_node_has_left_is_named_and_awaited(cluster, project, tmp_path):
    project()
    here = waits(tmp_path)
    (tmp_path / "flag").touch()
    with start(cluster, tmp_path) as driver:
        until(here.exists)
        lose_the_node_of(here, cluster)
        told = next(line for line in driver.stdout if line.startswith("no node with a "))
        cluster.add_node(num_cpus=1, resources={"TPU": 1})
        printed, _ = driver.communicate(timeout=240)
    assert told.startswith("no node with a TPU is left: the run waits for one")
    assert driver.returncode == 0, printed
    assert "8 passed" in printed


@pytest.mark.full
def test_interrupted_it_leaves_what_was_recorded_and_resumes(cluster, project, tmp_path):
    project()
    here = waits(tmp_path)
    (tmp_path / "flag").touch()
    arguments = ("--parity-record", "-k", "test_agrees")
    with start(cluster, tmp_path, *arguments) as driver:
        until(here.exists)
        for line in driver.stdout:
            if "passed test_double.py::test_agrees[double-M8_N40-bf16-s0]" in line:
                break
        driver.send_signal(signal.SIGINT)
        printed, _ = driver.communicate(timeout=60)
    assert driver.returncode == 2, printed
    assert "2 passed" in printed
    assert {case for _, case, _ in contents(tmp_path / "records")} == {"double-M8_N40-f32-s0", "double-M8_N40-bf16-s0"}
    kernel, _ = here.read_text().split()
    until(lambda: not Path(f"/proc/{kernel}").exists())
    printed, code = on(cluster, tmp_path, *arguments, "--parity-resume")
    assert code == 0, printed
    assert "2 passed" in printed
    assert len(contents(tmp_path / "records")) == 4


@pytest.mark.full
def test_pytests_own_workers_are_refused(cluster, project, tmp_path):
    project()
    for words, refused in ((["-n", "2"], "-n must be left out with --ray"),
                           (["--parity-records=/tmp"], "--parity-records must lie in")):  # fmt: skip
        printed, code = on(cluster, tmp_path, *words)
        assert code == 4
        assert f"ERROR: {refused}" in printed


@pytest.mark.full
def test_this_project_runs_from_a_copy_of_its_folder(cluster, tmp_path):
    folder = tmp_path / "project"
    left_out = shutil.ignore_patterns(".*", "records", "examples", "benchmarks", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=left_out)
    chosen = ["tests/gmm", "-k", "bf16 and transpose_rhs and not tgmm and golden", "--parity-record"]
    done = run_pytest(folder, "--parity-tier=smoke", "-n2", *chosen, "--parity-records=local", "--junitxml=local.xml")
    printed, code = on(cluster, folder, "--parity-tier=smoke", *chosen, "--junitxml=ray.xml")
    assert code == 0, printed
    assert "6 passed" in done.stdout
    assert "6 passed" in printed
    assert verdicts(folder / "ray.xml")[0] == verdicts(folder / "local.xml")[0]
    assert contents(folder / "records") == contents(folder / "local") != {}
