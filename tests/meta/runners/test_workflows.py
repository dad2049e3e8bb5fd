"""The workflows: their labels, and their commands on pretended runners."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from parity import cli, matrix
from parity.backends.devices import Requirement
from tests.support.projects import BOTH, Project, gpu_host, tpu_host

ROOT = Path(__file__).parents[3]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
DEVICES = {label: Requirement.parse(device) for label, device in matrix.runners(ROOT).items()}


def commands(workflow, job):
    """What the steps of a job run, each as words."""
    return [shlex.split(step["run"]) for step in WORKFLOWS[workflow]["jobs"][job]["steps"] if "run" in step]


@pytest.fixture
def plan(capsys):
    """The jobs that `parity runners` plans, and what it says of absent runners."""

    def run(attached, root=ROOT):
        assert cli.main(["--root", str(root), "runners", "--attached", attached]) == 0
        out, err = capsys.readouterr()
        return {name: json.loads(jobs) for name, _, jobs in (line.partition("=") for line in out.splitlines())}, err

    return run


def test_runners_that_are_attached_have_jobs_and_the_others_are_named(plan):
    jobs, said = plan("tpu-v6e gpu-h200,gpu-mi300")
    assert jobs["tpu"] == [{"label": "tpu-v6e", "device": "tpu:v6e", "extra": "jax,libtpu,tests"}]
    assert [job["extra"] for job in jobs["gpu"]] == ["triton,tests", "tests"] and jobs["join"] is True
    absent = DEVICES.keys() - {"tpu-v6e", "gpu-h200", "gpu-mi300"}
    assert {line.split()[1] for line in said.splitlines()} == absent
    assert plan("gpu-h200")[0] | {"gpu": []} == {"tpu": [], "gpu": [], "join": False}
    assert plan("")[0] == {"tpu": [], "gpu": [], "join": False}


def test_a_runner_that_nobody_declared_is_wrong_usage(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--root", str(ROOT), "runners", "--attached", "tpu-v9"])
    said = " ".join(capsys.readouterr().err.split())
    assert f"must be labels of [tool.parity.runners], got tpu-v9 (there are {', '.join(DEVICES)})" in said


def test_every_kind_of_runner_has_a_label():
    kinds = {"tpu:v5e", "tpu:v6e", "tpu:tpu7x", "gpu:h100", "gpu:h200", "gpu:b200", "gpu:mi300"}
    assert set(map(str, DEVICES.values())) == kinds
    for device in DEVICES.values():
        assert device.meets(device.pretended)


def test_the_gate_runs_what_the_readme_tells_a_new_user():
    (job,) = WORKFLOWS["gate"]["jobs"].values()
    each = job["strategy"]["matrix"]
    readme = (ROOT / "README.md").read_text()
    assert all(f"    {command}  " in readme for command in each["command"])
    assert f'requires-python = ">={each["python"][0]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_parts_of_the_full_tier_are_all_there():
    (job,) = WORKFLOWS["full"]["jobs"].values()
    (words,) = commands("full", "cpu")
    assert " ".join(words) == "make full PART=${{ matrix.part }}/24"
    assert job["strategy"]["matrix"]["part"] == list(range(1, 25))
    asked = subprocess.run(["make", "-n", "full", "PART=3/24"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert " --parity-tier=full --parity-shard=3/24\n" in asked.stdout


@pytest.mark.full
def test_make_smoke_names_every_file_of_the_smoke_tier():
    asked = subprocess.run(["make", "-n", "smoke"], cwd=ROOT, check=True, capture_output=True, text=True)
    named = re.search(r"--parity-tier=smoke \$\((grep .*)\)$", asked.stdout.strip())
    files = subprocess.run(["bash", "-c", named[1]], cwd=ROOT, check=True, capture_output=True, text=True)
    collecting = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--parity-tier=smoke"]
    collected = subprocess.run(collecting, cwd=ROOT, check=True, capture_output=True, text=True)
    smoke = set(re.findall(r"^(\S+\.py)::", collected.stdout, re.MULTILINE))
    assert smoke and smoke <= set(files.stdout.split())


def test_jobs_use_what_others_give():
    """Every output, input and need that an expression names is there."""
    jobs = WORKFLOWS["devices"]["jobs"]
    assert jobs["plan"]["outputs"] == {
        name: f"${{{{ steps.runners.outputs.{name} }}}}" for name in ("tpu", "gpu", "join")
    }
    for backend in ("tpu", "gpu"):
        called = jobs[backend]
        assert called["uses"] == "./.github/workflows/device.yml" and called["needs"] == "plan"
        assert called["with"] == {"backend": backend, "runners": f"${{{{ needs.plan.outputs.{backend} }}}}"}
        assert called["if"] == f"needs.plan.outputs.{backend} != '[]'"
    inputs = WORKFLOWS["device"][True]["workflow_call"]["inputs"]  # `on`, to YAML a word for true
    assert inputs.keys() == jobs["tpu"]["with"].keys()


def test_the_oldest_triton_is_tried_by_a_test_there_is():
    install, (pytest_, *options, file, _, name), not_skipped = commands("oldest", "triton")
    assert install == [".ci/install", "triton,tests"] and pytest_ == ".venv/bin/pytest"
    assert options == ["-n0", "--parity-tier=full", "--junitxml=night.xml"]
    assert not_skipped == ["grep", 'skipped="0"', "night.xml"]
    assert f"def test_compiles_with_the_{name}(" in (ROOT / file).read_text()


@pytest.mark.full
def test_ledgers_of_a_tpu_and_a_gpu_host_are_joined_and_judged(plan, tmp_path, monkeypatch, capsys):
    """The commands of the workflows as they stand, on pretended runners."""
    jobs, _ = plan("tpu-v6e gpu-h200")
    hosts = {"tpu": (tpu_host("TPU v6 lite"), "torch"), "gpu": (gpu_host("NVIDIA H200"), "jax")}
    for backend, (conftest, lacks) in hosts.items():
        (runner,) = jobs[backend]
        given = {"${{ inputs.backend }}": backend}
        given |= {f"${{{{ matrix.runner.{name} }}}}": value for name, value in runner.items()}
        install, doctor, judge = ([given.get(word, word) for word in words] for words in commands("device", "judge"))
        assert install == [".ci/install", runner["extra"]] and (ROOT / install[0]).exists()
        assert doctor[0] == ".venv/bin/parity" and cli.main([*doctor[1:], "--pretend", runner["device"]]) == 0
        (tmp_path / backend).mkdir()
        host = Project(tmp_path / backend)
        host.write("test_double.py", BOTH)
        host.write("conftest.py", conftest)
        host.write(f"{lacks}.py", "raise ImportError('not on this host')\n")
        assert judge[0] == ".venv/bin/pytest"
        done = host(*judge[1:], "-q")
        assert "records: 32 written" in done.stdout, done.stdout  # eight seeds of four cases
        (tmp_path / backend / "records").rename(tmp_path / f"ledger-{runner['label']}")

    joined = Project(tmp_path)
    monkeypatch.chdir(tmp_path)
    install, merge, judge = commands("devices", "join")
    assert merge == ["parity", "merge", "ledgers/*"]
    assert cli.main(["merge", *map(str, tmp_path.glob("ledger-*"))]) == 0
    done = joined.parity(*judge[1:], "-j1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tpu: TPU v6 lite · gpu: NVIDIA H200" in done.stdout and "4 passed, 0 failed" in done.stdout
    assert "TPU v6 lite" in (tmp_path / "parity-report.html").read_text()

    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["--root", str(ROOT), "run", "--recorded", "--records", str(tmp_path / "ledger-gpu-h200")])
    assert "of TPUs none, of GPUs NVIDIA H200" in capsys.readouterr().err
