"""Each pytest-xdist worker owns its accelerator, on faked device files; what it got is read in the worker."""

import json

import pytest

from parity.runners.workers import Plan, gpus, plan, tpu_chips
from tests.support.commands import run_pytest

FAKE = """
import os
from pathlib import Path
import parity.runners.workers
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
parity.runners.workers.DEV = Path(__file__).parent / "dev"
"""
OWNS = """
import json, os, sys, time, pytest
FRAMEWORKS = [name for name in ("jax", "torch") if name in sys.modules]

@pytest.mark.parametrize("n", range(24))
def test_owns(n, tmp_path):
    names = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS", "CUDA_VISIBLE_DEVICES",
             "XLA_PYTHON_CLIENT_PREALLOCATE")
    owned = {name: os.environ[name] for name in names if name in os.environ}
    assert FRAMEWORKS == []
    with open("owned.jsonl", "a") as file:
        file.write(json.dumps([os.environ["PYTEST_XDIST_WORKER"], owned]) + "\\n")
    if os.environ["PYTEST_XDIST_WORKER"] == "gw1" and os.path.exists("dev/accel0"):
        os._exit(1)
    while os.path.exists("dev/accel0") and "gw4" not in open("owned.jsonl").read():
        time.sleep(0.1)
"""


@pytest.fixture
def owned(tmp_path):
    """What every worker owns on a host with these device files, and what pytest printed."""

    def run(devices, *arguments):
        for device in devices:
            (tmp_path / "dev" / device).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "dev" / device).touch()
        (tmp_path / "fake.py").write_text(FAKE)
        (tmp_path / "test_owns.py").write_text(OWNS)
        (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
        done = run_pytest(tmp_path, "-p", "fake", *arguments)
        lines = map(json.loads, (tmp_path / "owned.jsonl").read_text().splitlines())
        return dict(lines), done.stdout

    return run


@pytest.mark.full
def test_a_worker_per_tpu_chip_and_its_successor_owns_the_same(owned):
    workers, printed = owned([f"accel{n}" for n in range(4)], "-n", "7")
    assert "parity workers: 4 of 4 TPU chips, a worker each (7 asked for: a chip belongs to one process)" in printed
    chips = {name: owns.pop("TPU_VISIBLE_CHIPS") for name, owns in workers.items()}
    assert set(chips.values()) == set("0123"), chips
    assert len(chips) == 5, "four workers and the one that replaced one of them"
    assert all(
        owns == {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"} for owns in workers.values()
    )


@pytest.mark.full
def test_workers_share_gpus_in_turn(owned):
    workers, printed = owned(["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], "-n", "3")
    assert "parity workers: 3 workers, in turn on 2 GPUs, without reserving memory" in printed
    assert [workers[f"gw{n}"]["CUDA_VISIBLE_DEVICES"] for n in range(3)] == ["0", "1", "0"]
    assert all(owns["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false" for owns in workers.values())


@pytest.mark.full
def test_auto_means_a_worker_per_chip(owned):
    _, printed = owned(["vfio/0", "vfio/1", "vfio/vfio"], "-n", "auto")
    assert "parity workers: 2 of 2 TPU chips, a worker each\n" in printed


def test_what_the_user_made_visible_is_all_there_is(tmp_path):
    (tmp_path / "nvidia0").touch()
    assert gpus(tmp_path, {}) == ["0"]
    assert gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "3,GPU-1a,-1"}) == ["3", "GPU-1a"]
    assert tpu_chips(tmp_path, {"TPU_VISIBLE_CHIPS": "2,3"}) == ["2", "3"]


def test_two_workers_on_two_gpus_keep_their_memory_pools():
    assert [dict(owns) for owns in plan(2, [], ["0", "1"]).environments] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    assert plan(5, [], []) == Plan(5)
