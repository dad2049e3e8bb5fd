"""The plan ledger: what differs is told in one line a program, and what is traced or launched is what is recorded."""

import json
from dataclasses import replace

import pytest

from parity.cli import main
from parity.cli.plans import cut
from parity.compilers import plans
from parity.compilers.mosaic import Abstract
from parity.compilers.plans import LEDGER, Plan, shown
from parity.compilers.programs import Program
from parity.compilers.recorded import differences

TPU_KERNEL = {
    "name": "gmm", "grid": [2, None], "inputs": [[256, 512], [512, 128]], "outputs": [[256, 128]],
    "dots": [[256, 512, 128, "bf16", 2]], "vmem_bytes": 2**21,
}  # fmt: skip
GPU_KERNEL = {"name": "_kernel", "grid": [64], "constants": {"TILE.m": 128, "EVEN": True}, "warps": 8, "stages": 3}
TPU, GPU = Plan("tpu7x", "gmm", "model", (TPU_KERNEL,)), Plan("sm_90", "gmm", "model", (GPU_KERNEL,))


def ledger(*lines):
    return {line.key: line for line in lines}


def test_plans_come_back(tmp_path):
    LEDGER.write(tmp_path, [TPU, GPU])
    assert LEDGER.read(tmp_path) == ledger(TPU, GPU)
    assert (tmp_path / "records" / "plans" / "sm_90" / "gmm.jsonl").read_text().count("\n") == 1


def test_what_differs_is_told_in_a_line_for_each_program():
    assert differences(ledger(TPU, GPU), ledger(TPU, GPU)) == []
    wider = replace(TPU, kernels=({**TPU_KERNEL, "grid": [1, None], "outputs": [[256, 256]]},))
    smaller = replace(GPU, kernels=({**GPU_KERNEL, "constants": {"TILE.m": 64}},))
    assert differences(ledger(TPU, GPU), ledger(wider, smaller)) == [
        "gmm-model on sm_90: _kernel.EVEN True → none, _kernel.TILE.m 128 → 64",
        "gmm-model on tpu7x: gmm.grid 2×? → 1×?, gmm.outputs [256×128] → [256×256]",
    ]
    assert differences(ledger(TPU), ledger(GPU)) == ["gmm-model on sm_90: new", "gmm-model on tpu7x: gone"]
    assert differences(ledger(TPU), ledger(replace(TPU, kernels=()))) == ["gmm-model on tpu7x: kernels gmm → none"]


def test_a_plan_is_shown_on_a_line():
    assert cut(TPU_KERNEL) == "[256×512, 512×128] → [256×128]; dots: 2 of 256×512×128 bf16; VMEM 2.0 MiB"
    assert cut(GPU_KERNEL) == "TILE.m=128 EVEN=True warps=8 stages=3"
    assert (shown([]), shown([1, None]), shown(7)) == ("[]", "1×?", "7")


def test_the_command_exits_with_1_where_a_plan_differs(tmp_path, capsys, monkeypatch):
    program = Program("gmm", "model", "module:gmm", ())
    monkeypatch.setattr("parity.cli.plans.load", lambda root, planned: (program,))
    monkeypatch.setattr("parity.cli.plans.plan_all", lambda root, programs, chips: iter((TPU, GPU)))

    def output(*arguments, code=0):
        assert main(["--root", str(tmp_path), "plans", *arguments]) == code
        return capsys.readouterr().out

    assert output("--check", code=1).splitlines() == ["gmm-model on sm_90: new", "gmm-model on tpu7x: new"]
    output("--record")
    assert output("--check") == "as recorded\n"
    assert [line["chip"] for line in json.loads(output("--json", "--chip", "sm_90"))] == ["sm_90"]
    assert "256×512" in output("-k", "model")
    LEDGER.write(tmp_path, [replace(GPU, kernels=({**GPU_KERNEL, "warps": 4},))])
    assert output("--check", code=1) == "gmm-model on sm_90: _kernel.warps 4 → 8\n"


def test_vmem_holds_blocks_twice_and_scratch_once():
    pytest.importorskip("jax")
    program = Program("op", "name", f"{__name__}:doubled", (Abstract((1024, 256), "float32"),))
    (kernel,) = plans.tpu_plan(program, "tpu7x").kernels
    assert (
        kernel["name"] == "double" and kernel["grid"] == [4] and kernel["inputs"] == kernel["outputs"] == [[256, 256]]
    )
    assert kernel["vmem_bytes"] == 2 * (256 * 256 * 4) * 2 + 8 * 128 * 4
    with pytest.raises(ValueError, match="chip must be one of"):
        plans.trace(program, "v2")


def doubled(x):
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def body(x, out, scratch):
        out[...] = 2 * x[...]

    block = pl.BlockSpec((256, 256), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        grid=(4,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((8, 128), "float32")],
        name="double",
    )(x)


def test_launches_are_those_of_the_gpu_that_is_asked_for():
    torch = pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    from parity.compilers.launches import PROCESSORS, launches
    from parity.compilers.ptx import TARGETS

    @triton.jit
    def kernel(x, n, BLOCK: triton.language.constexpr):
        pass

    def launch(x, block):
        device = torch.cuda.get_device_properties(x.device)
        target = device.gcnArchName if torch.version.hip else f"sm_{device.major}{device.minor}"
        kernel[lambda given: (triton.cdiv(given["n"], given["BLOCK"]),)](x, x.numel(), BLOCK=block, num_warps=4)
        x.copy_(torch.zeros_like(x))
        seen.append((target, device.multi_processor_count, str(x.device)))

    seen = []
    for target in TARGETS:
        (launched,) = launches(launch, Abstract((8, 128), "bfloat16"), target=target, block=256)
        assert (launched.name, launched.grid, launched.constants) == ("kernel", (4,), {"BLOCK": 256})
        assert (launched.arguments["n"], launched.options) == (1024, {"num_warps": 4})
    assert seen == [(target, PROCESSORS[target], "cuda:0") for target in TARGETS]
    with pytest.raises(ValueError, match="target must be one of"):
        launches(launch, target="sm_1", block=1)
