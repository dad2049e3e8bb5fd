# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Every kernel of the gated linear attentions compiles for real GPUs, as the public functions launch it; it fits the
chip, and its dots are in the machine code what the contract says."""

from typing import Any, NamedTuple
from unittest import mock

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import gla, simple_gla
from gpu_reference._lib.launch import Launch
from parity.compilers.ptx import TARGETS, case_of, compile_kernels, deviations

B, T, H, K, V, N = 2, 4096, 16, 128, 128, 8
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# Of all instructions, those that move what the registers do not hold: as small a share as is asked of the TPU kernels.
# (A few dozen words are traded for registers in most kernels of this size.)
SPILL_SHARE = 0.05
SPILLS = ("LDL", "STL", "scratch_")


class Call(NamedTuple):
    """A public function's forward or backward pass: `gates` of simple_gla, or `gk`, which is gla's."""

    form: str  # chunk, fused_chunk or fused_recurrent
    direction: str
    gates: str
    dtype: Any
    chunk: int | None = None
    options: Any = ()
    packed: bool = False
    keys: int = K
    values: int = V

    @property
    def name(self):
        chunk = () if self.chunk is None else (f"C{self.chunk}",)
        options = (f"{name}={value}" for name, value in self.options)
        sizes = () if (self.keys, self.values) == (K, V) else (f"K{self.keys}_V{self.values}",)
        dtype = str(self.dtype).removeprefix("torch.")
        packed = ("packed",) if self.packed else ()
        return "-".join((self.form, self.direction, self.gates, dtype, *chunk, *options, *packed, *sizes))

    def dots(self, target):
        """The operand types of the matrix instructions: of bfloat16 where dots are in passes of it, else of float32,
        for which only AMD has one that takes it as it is."""
        if self.chunk is None:
            return set()
        if self.dtype == BFLOAT16 or ("precision", "bf16x3") in self.options:
            return {"bfloat16"}
        return {"float32"} if target.startswith("gfx") else set()

    def launches(self):
        """What the public function launches: with tensors of the meta device, which have shapes and no data."""
        batch, sequences = (1, N) if self.packed else (B, B)
        q = meta(batch, T, H, self.keys, dtype=self.dtype)
        v = meta(batch, T, H, self.values, dtype=self.dtype)
        state = meta(sequences, H, self.keys, self.values)
        arguments = {"initial_state": state, "cu_seqlens": meta(N + 1, dtype=torch.int32) if self.packed else None}
        arguments |= dict(self.options)
        if self.chunk is not None:
            arguments["chunk_size"] = self.chunk
        if self.gates == "gk":
            module, family = gla, "gla"
            arguments["gk"] = meta(batch, T, H, self.keys)
        else:
            module, family = simple_gla, "simple_gla"
            arguments["g"] = meta(batch, T, H) if self.gates in ("g", "both") else None
            arguments["g_gamma"] = meta(H) if self.gates in ("gamma", "both") else None
        function = getattr(module, f"{self.form}_{family}_{self.direction}")
        launched = []
        with mock.patch.object(Launch, "run", lambda launch, device: launched.append(launch)):
            if self.direction == "fwd":
                function(q, q, v, output_final_state=True, **arguments)
            else:
                function(q, q, v, v, dht=state, **arguments)
        return launched


def meta(*shape, dtype=FLOAT32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def calls(form, gates, dtype, chunk=None, **options):
    """Both directions."""
    fields = {name: options.pop(name) for name in ("packed", "keys", "values") if name in options}
    return [Call(form, d, gates, dtype, chunk, tuple(options.items()), **fields) for d in ("fwd", "bwd")]


REPRESENTATIVE = [
    Call("chunk", "fwd", "g", BFLOAT16, 64, (("fused", False),)),
    Call("fused_chunk", "bwd", "gamma", FLOAT32, 64),
    Call("fused_recurrent", "bwd", "gk", BFLOAT16),
]
RECURRENT = [
    call
    for dtype in (FLOAT32, BFLOAT16)
    for found in (
        *(calls("fused_recurrent", gates, dtype) for gates in ("none", "g", "gamma", "both", "gk")),
        calls("fused_recurrent", "both", dtype, packed=True, reverse=True),
        calls("fused_recurrent", "gk", dtype, packed=True, keys=256, values=256),
        calls("fused_recurrent", "g", dtype, keys=100, values=16),
    )
    for call in found
]
CHUNKED = [
    call
    for dtype in (FLOAT32, BFLOAT16)
    for found in (
        *(
            calls("chunk", gates, dtype, chunk, fused=fused)
            for gates in ("g", "gamma", "gk")
            for chunk in (64, 128)
            for fused in (False, True)
        ),
        *(calls("fused_chunk", gates, dtype, 64) for gates in ("none", "both")),
        *(calls("chunk", gates, dtype, 64, fused=False, packed=True) for gates in ("both", "gk")),
        *(calls("chunk", gates, dtype, 16, fused=True, keys=100, values=48) for gates in ("g", "gk")),
        *(calls("chunk", gates, dtype, 64, fused=True, keys=256, values=256) for gates in ("g", "gk")),
    )
    for call in found
] + [
    call
    for gates in ("g", "gk")
    for fused in (False, True)
    for call in calls("chunk", gates, FLOAT32, 64, fused=fused, precision="bf16x3")
]
CHIPS = ("sm_80", "sm_90", "sm_100")
DEFAULT_TIER = ("sm_90", "sm_100")  # a chip takes seconds
# What the registers do not hold at the tiles there are, which were chosen on sm_80 to sm_100: two states and gradients
# of them in the backward pass of a scalar gate, and operands in two bfloat16 parts.
SPLIT_BACKWARD = (
    "chunk-bwd-g-float32-C64-fused=False-precision=bf16x3/2_backward_kernel",
    "chunk-bwd-g-float32-C64-fused=True-precision=bf16x3/1_backward_kernel",
)
ON_AMD = (
    *(
        f"chunk-bwd-{gates}-float32-C{chunk}-fused={nth}_backward_kernel"
        for gates in ("g", "gamma")
        for chunk in (64, 128)
        for nth in ("False/2", "True/1")
    ),
    *(f"fused_chunk-bwd-{gates}-float32-C64/1_backward_kernel" for gates in ("none", "both")),
    "chunk-bwd-both-float32-C64-fused=False-packed/2_backward_kernel",
    *(f"chunk-bwd-gamma-bfloat16-C{chunk}-fused=False/2_backward_kernel" for chunk in (64, 128)),
    "chunk-fwd-g-float32-C64-fused=False-precision=bf16x3/1_forward_kernel",
    "chunk-fwd-g-float32-C64-fused=True-precision=bf16x3/0_forward_kernel",
)
ON_GFX950 = (
    *ON_AMD,
    *SPLIT_BACKWARD,
    *(f"chunk-bwd-gamma-bfloat16-C{chunk}-fused=True/1_backward_kernel" for chunk in (64, 128)),
)
LIMITS = {
    # What a chip does not support, with the reason; all else must compile for every target.
    "sm_100": {SPLIT_BACKWARD[1]: "spills"},
    "sm_120": dict.fromkeys(SPLIT_BACKWARD, "spills"),
    "gfx942": dict.fromkeys(ON_AMD, "spills"),
    "gfx950": dict.fromkeys(ON_GFX950, "spills"),
}


def problem(call, result, target):
    """What is wrong with a kernel of this call as it was compiled for a target, None if nothing is."""
    if result.error is not None:
        return f"{result.outcome}: {result.error} ({result.location})"
    spills = sum(count for name, count in result.instructions.items() if name.startswith(SPILLS))
    share = spills / sum(result.instructions.values())
    if share > SPILL_SHARE:
        return f"spills: {share:.1%} of its instructions"
    operands = result.dot_operands
    if operands != call.dots(target):
        return f"its dots are of {operands or 'no matrix unit'}, its contract's of {call.dots(target) or 'none'}"
    if not {"fma", "float32"} & result.dot_kinds.keys():
        return "it has no multiply-add in float32"
    return None


def check(target, called):
    kernels = {
        f"{call.name}/{nth}{launch.kernel.__name__}": (call, launch)
        for call in called
        for nth, launch in enumerate(call.launches())
    }
    compiled = compile_kernels([case_of(launch, target) for _, launch in kernels.values()])
    problems = {
        name: problem(call, result, target) for (name, (call, _)), result in zip(kernels.items(), compiled, strict=True)
    }
    limits = {name: reason for name, reason in LIMITS.get(target, {}).items() if name in problems}
    assert deviations(problems, limits) == []


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[] if t in DEFAULT_TIER else [pytest.mark.full]) for t in CHIPS]
)
def test_compiles(target):
    check(target, REPRESENTATIVE)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_every_recurrent_kernel_compiles(target):
    check(target, RECURRENT)


@pytest.mark.full
@pytest.mark.parametrize("form", ["chunk", "fused_chunk"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_chunked_kernel_compiles(target, form):
    check(target, [call for call in CHUNKED if call.form == form])


def test_limits_name_what_there_is():
    names = {
        f"{call.name}/{nth}{launch.kernel.__name__}" for call in CHUNKED for nth, launch in enumerate(call.launches())
    }
    assert {name for limits in LIMITS.values() for name in limits} <= names
