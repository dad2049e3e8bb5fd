"""The ledger in use: recording, what a record is worth later, regressions, other machines, killed workers."""

import json
import re

import pytest

RECORD = ("-q", "--parity-record")


def ledgers(folder):
    return sorted(p.relative_to(folder / "records").as_posix() for p in (folder / "records").glob("*/*/*.jsonl"))


def test_what_is_recorded_is_valid_afterwards(project, tmp_path):
    run = project()
    recorded = run(*RECORD)
    assert "records: 4 written" in recorded.stdout, recorded.stdout
    assert ledgers(tmp_path) == ["tpu/emulated/double.jsonl"]
    again = run("-q")
    assert again.returncode == 0
    assert "NO-RECORD" not in again.stdout


def test_xdist_records_the_same(project, tmp_path):
    run = project()
    run(*RECORD)
    path = tmp_path / "records/tpu/emulated/double.jsonl"

    def content():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in ("seconds", "provenance", "id")} for line in lines]

    alone = content()
    run(*RECORD, "-n", "2")
    assert content() == alone
    assert sum("id" in json.loads(line) for line in path.read_text().splitlines()) == 1  # one run, one provenance


def test_no_record_is_counted_with_the_command_that_makes_one(project, tmp_path):
    (tmp_path / "records").mkdir()
    run = project()("-q")
    assert re.search(r"records: 4 NO-RECORD +\(measure them anew: pytest --parity-record\)", run.stdout), run.stdout


def test_a_worse_kernel_is_a_regression_and_names_what_moved(project, tmp_path):
    run = project()
    run(*RECORD)
    kernels = tmp_path / "kernels.py"
    kernels.write_text(kernels.read_text().replace("return x + x", "return x + x * (1 + 2**-23)", 1))
    worse = run("-q")
    assert worse.returncode == 1
    assert "REGRESSION" in worse.stdout
    assert "moved since: kernel" in worse.stdout, worse.stdout
    run(*RECORD)  # accepted
    assert run("-q").returncode == 0


def test_a_changed_kernel_of_the_same_quality_is_stale_and_fails_only_if_strict(project, tmp_path):
    run = project()
    run(*RECORD)
    kernels = tmp_path / "kernels.py"
    kernels.write_text(kernels.read_text() + "\n# nothing that matters\n")
    stale = run("-q")
    assert stale.returncode == 0
    assert "records: 4 STALE" in stale.stdout, stale.stdout
    strict = run("-q", "--parity-strict-records")
    assert strict.returncode == 1
    assert "STALE  G0: kernel" in strict.stdout, strict.stdout


def test_records_of_other_inputs_are_invalid_and_compared_with_nothing(project, tmp_path):
    run = project()
    run(*RECORD)
    path = tmp_path / "records/tpu/emulated/double.jsonl"
    path.write_text(re.sub(r'"x":"[0-9a-f]{64}"', f'"x":"{"0" * 64}"', path.read_text()))
    done = run("-q")
    assert "records: 4 INVALID" in done.stdout, done.stdout
    assert done.returncode == 0


def test_a_broken_ledger_is_one_clear_error(project, tmp_path):
    run = project()
    run(*RECORD)
    path = tmp_path / "records/tpu/emulated/double.jsonl"
    path.write_text(path.read_text()[:-40])
    done = run("-q", "-x")
    assert done.returncode != 0
    assert re.search(r"double\.jsonl:\d+: ", done.stdout), done.stdout


KILLER = """
import os, signal
import pytest

@pytest.fixture(autouse=True)
def die(request):
    yield
    if "M3_N5-bf16-s0" in request.node.name and os.environ.get("PYTEST_XDIST_WORKER"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_loses_nothing_that_was_recorded_before(project, tmp_path):
    run = project()
    (tmp_path / "conftest.py").write_text(KILLER)
    done = run("-q", "-n", "2", "--parity-record", "-k", "test_agrees")
    assert done.returncode == 1
    assert "crashed" in done.stdout
    assert re.search(r"records: nothing of \S+M3_N5-bf16-s0\], whose worker died: pytest --parity-record", done.stdout)
    text = (tmp_path / "records/tpu/emulated/double.jsonl").read_text()
    recorded = {json.loads(line)["case"] for line in text.splitlines() if '"case"' in line}
    assert recorded == {"double-M8_N40-f32-s0", "double-M8_N40-bf16-s0", "double-M3_N5-f32-s0", "double-M3_N5-bf16-s0"}


COMPARED = """
import parity
from matrix import DOUBLE

@parity.cases(DOUBLE, backend="tpu", compared=True)
def test_is_no_worse(run):
    run.is_no_worse()
"""

TPU_HOST = """
from parity.backends import prepare_environment, tpu
prepare_environment()

class PretendedTpu(tpu.TpuRunner):
    real = property(lambda self: True, lambda self, value: None)
    device_kind = "TPU pretended"

    def __init__(self):
        import jax
        self._device = jax.devices("cpu")[0]

tpu.make_runner = PretendedTpu
"""


@pytest.fixture
def tpu_host(project, tmp_path):
    """A host with a TPU (pretended) and without a GPU, whose ledger came from elsewhere."""
    run = project()
    gpu = tmp_path / "records/gpu"
    tests = tmp_path / "test_double.py"
    tests.write_text(tests.read_text().replace('"tpu"', '"gpu"'))
    for seed in range(2):
        run(*RECORD, f"--parity-seed={seed}", "-k", "test_agrees")
    (tmp_path / "test_compared.py").write_text(COMPARED)
    ledger = (gpu / "emulated/double.jsonl").read_text()
    (gpu / "NVIDIA_Pretended").mkdir()
    real = ledger.replace('"device_kind":"emulated"', '"device_kind":"NVIDIA Pretended"').replace(
        '"real":false', '"real":true'
    )
    ids = re.findall(r'"id":"([0-9a-f]{12})"', real)
    assert ids
    (gpu / "emulated/double.jsonl").unlink()
    (tmp_path / "conftest.py").write_text(TPU_HOST)
    return run, gpu / "NVIDIA_Pretended/double.jsonl", real


def rewritten(real):
    """The ledger's lines as `records` itself writes them: a provenance goes by the hash of its content."""
    import hashlib

    names, lines = {}, []
    for line in map(json.loads, real.splitlines()):
        if "id" in line:
            spelled = json.dumps(line["provenance"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            names[line["id"]] = line["id"] = hashlib.sha256(spelled.encode()).hexdigest()[:12]
        else:
            line["provenance"] = names[line["provenance"]]
        lines.append(json.dumps(line, sort_keys=True, separators=(",", ":"), ensure_ascii=False))
    return "".join(f"{line}\n" for line in lines)


def test_a_tpu_is_judged_against_the_records_of_a_gpu(tpu_host):
    run, path, real = tpu_host
    path.write_text(rewritten(real))
    done = run("-q", "test_compared.py", "--parity-seeds=2", "-rs")
    assert "4 passed" in done.stdout, done.stdout
    assert re.search(r"double +tpu +4 .* 4 TIE", done.stdout), done.stdout


def test_a_tpu_host_without_the_gpus_framework_can_read_its_records(tpu_host, tmp_path):
    run, path, real = tpu_host
    path.write_text(rewritten(real))
    (tmp_path / "torch.py").write_text("raise ImportError('not on this host')\n")
    done = run("-q", "test_compared.py", "--parity-seeds=2")
    assert "4 passed" in done.stdout, done.stdout


def test_a_tpu_without_records_of_a_gpu_says_which_command_makes_them(tpu_host):
    run, _, _ = tpu_host
    done = run("-q", "test_compared.py", "--parity-seeds=2", "-rs")
    assert "4 skipped" in done.stdout, done.stdout
    assert "NO-RECORD: no gpu has recorded double-M8_N40-f32-s0" in done.stdout
    assert "on a GPU runner: pytest --parity-record -k double-M8_N40-f32-s0" in done.stdout
    assert re.search(r"double +tpu .* 4 NO-RECORD", done.stdout), done.stdout
