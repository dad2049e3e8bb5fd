"""What contracts and kernels take for granted of a device's arithmetic, until it is measured there. Data alone.

docs/assumptions.md says where each is relied upon. On a device whose measured table is in the ledger
(`measured_path`), that takes the place of the assumption: `of_device`. What is known of a device's functions is what
its contracts' sites are there: `on_device`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parity.dtypes import OF_POWER, SITES, TOWARD_ZERO
from parity.judging.passes import cut_at_26_digits
from parity.op import Backend, Contract


@dataclass(frozen=True)
class Assumption:
    """A function's largest error on a kind of device, in units of the result's last place (ulp) in float32.

    device: "tpu", "cuda", "hopper" (CUDA's sm_89 and sm_90) or "hip". slope: ulps more per unit of the argument's
    magnitude (an exponential is a product and a power of two: the product's rounding grows with it). holds: of what is
    no error but a property, whether it is assumed to hold; its name says which. source: who says so. patterns: at how
    many float32 bit patterns it was measured, 0 where it is assumed.
    """

    name: str
    device: str
    ulps: float = 0.0
    slope: float = 0.0
    holds: bool | None = None
    source: str = ""
    patterns: int = 0


DOT_ROUNDS = "dot rounds to nearest"
"""Whether sums of the matrix unit are rounded to nearest, and not toward zero: seen in sums of one sign."""
FP8_SUMS = "fp8 sums keep float32's digits"
"""Whether the matrix unit keeps as much of a sum of fp8 products as of any other."""
BFLOAT16_ROUNDS, FLOAT8_ROUNDS = "to_bfloat16 rounds to nearest even", "to_float8_e4m3fn rounds to nearest even"
CONVERSIONS = {
    "bfloat16": (BFLOAT16_ROUNDS,),
    "bf16x2": (BFLOAT16_ROUNDS,),
    "float8_e4m3fn": (FLOAT8_ROUNDS,),
}
"""What a site of such a dtype comes out of, whatever else: a conversion of the hardware."""

PTX = "PTX ISA, floating-point instructions; Triton takes the .approx forms"
AMD = "AMD CDNA3 ISA: 1 ulp, subnormals kept; Triton multiplies by log2(e) first"
TPU = "the compiled code: a multiply, one vector instruction, a correction; its error is published nowhere"
HOPPER = "arXiv:2512.07004: tensor cores of Ada and Hopper keep 13 bits of a fraction"
LOG2E_ROUNDED = 1.5
"""x · log2(e), rounded, as an exponent of two: half an ulp of it is up to this many of the result, times |x|."""

ASSUMPTIONS = (
    Assumption("exp", "cuda", 4, LOG2E_ROUNDED, source=PTX + ": ex2.approx 2^-22.5"),
    Assumption("exp2", "cuda", 3, source=PTX + ": ex2.approx 2^-22.5"),
    Assumption("log", "cuda", 4, source=PTX + ": lg2.approx 2^-22 absolute near 1"),
    Assumption("reciprocal", "cuda", 2, source=PTX + ": div.full 2 ulp"),
    Assumption("rsqrt", "cuda", 2, source=PTX + ": rsqrt.approx 2^-22.9"),
    Assumption("exp", "hip", 3, LOG2E_ROUNDED, source=AMD),
    Assumption("exp2", "hip", 2, source=AMD),
    Assumption("log", "hip", 4, source=AMD),
    Assumption("reciprocal", "hip", 3, source=AMD + "; division 2.5 ulp"),
    Assumption("rsqrt", "hip", 2, source=AMD),
    Assumption("exp", "tpu", 4, LOG2E_ROUNDED, source=TPU),
    Assumption("exp2", "tpu", 4, 1.0, source=TPU + "; XLA takes exp of a product"),
    Assumption("log", "tpu", 4, source=TPU),
    Assumption("reciprocal", "tpu", 4, source=TPU + ": vrcp, corrected once on v5e"),
    Assumption("rsqrt", "tpu", 4, source=TPU),
    *(
        Assumption(name, device, holds=holds, source=source)
        for device, properties in {
            "cuda": {
                BFLOAT16_ROUNDS: (True, PTX),
                FLOAT8_ROUNDS: (True, PTX),
                "minimum keeps NaN": (False, PTX + ": min.f32 returns the number"),
                DOT_ROUNDS: (False, "arXiv:2512.07004: tensor cores truncate"),
                FP8_SUMS: (True, "arXiv:2512.07004: from sm_100 on; before, of fp8 products by way of float16"),
                "subnormals are kept": (True, PTX + ", without .ftz"),
            },
            "hip": {
                BFLOAT16_ROUNDS: (True, AMD),
                FLOAT8_ROUNDS: (True, AMD),
                "minimum keeps NaN": (False, AMD + ": v_min_f32 returns the number"),
                DOT_ROUNDS: (True, AMD),
                FP8_SUMS: (True, AMD),
                "subnormals are kept": (True, AMD),
            },
            "tpu": {
                BFLOAT16_ROUNDS: (True, TPU),
                FLOAT8_ROUNDS: (True, TPU),
                "minimum keeps NaN": (True, "XLA's minimum does; the instruction's choice is published nowhere"),
                DOT_ROUNDS: (True, TPU),
                FP8_SUMS: (True, TPU),
                "subnormals are kept": (False, "TPUs flush subnormals to zero"),
            },
        }.items()
        for name, (holds, source) in properties.items()
    ),
)  # fmt: skip


ASSUMPTIONS += tuple(
    Assumption(FP8_SUMS, "hopper", holds=False, source=HOPPER)
    if known.name == FP8_SUMS
    else replace(known, device="hopper")
    for known in ASSUMPTIONS
    if known.device == "cuda"
)


def measured_path(records: Path, backend: str, device_kind: str) -> Path:
    """Where what was measured on a device is kept."""
    return records / backend / device_kind.replace(" ", "_") / "assumptions.json"


def of_device(device: str, measured: Path | None = None) -> Mapping[str, Assumption]:
    """The assumptions about a kind of device by name, each replaced by what was measured where that is recorded.

    Raises ValueError for a table that is not what `parity contact --record` writes.
    """
    assumed = {assumption.name: assumption for assumption in ASSUMPTIONS if assumption.device == device}
    if measured is None or not measured.exists():
        return assumed
    try:
        found = json.loads(measured.read_text(encoding="utf-8"))
        table = {name: replace(assumed[name], **figures) for name, figures in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{measured} must be a table that parity contact --record wrote, got {error}") from None
    return {**assumed, **table}


def keep(path: Path, figures: Mapping[str, Mapping[str, float | bool]]) -> None:
    """Write figures by the names of their functions into a device's table; what it has of other functions stays."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**before, **figures}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def on_device(contract: Contract, backend: Backend, kind: str, records: Path) -> Contract:
    """A contract on a device: each of its sites at what is known of the hardware's functions that it comes out of.

    Where a property in its `unless` does not hold, the contract is that one. Errors of several functions are added. A
    sum or a conversion that is cut off is a site toward zero; a matrix unit that does so cuts what it adds, too. kind:
    what the device's framework calls it; records: a ledger's folder, for the measured table.
    Raises ValueError for a function that is off by more than any site may be.
    """
    known = of_device(_maker(backend, kind), measured_path(records, backend, kind))
    contract = next((other for name, other in contract.unless.items() if not known[name].holds), contract)
    sites = {
        site: _result(dtype, [known[name] for name in (*contract.functions.get(site, ()), *CONVERSIONS.get(dtype, ()))])
        for site, dtype in contract.sites.items()
    }
    cut = [] if known[DOT_ROUNDS].holds else [site for site, of in contract.functions.items() if DOT_ROUNDS in of]
    schedule = {**contract.schedule, "sums": dict.fromkeys(cut, cut_at_26_digits)} if cut else contract.schedule
    return replace(contract, sites=sites, schedule=schedule)


def _maker(backend: Backend, kind: str) -> str:
    """The kind of device, as in `Assumption`."""
    if backend == "tpu":
        return "tpu"
    if kind.startswith("AMD"):
        return "hip"
    return "hopper" if _ADA_OR_HOPPER.match(kind) else "cuda"


_ADA_OR_HOPPER = re.compile(r"NVIDIA (GH|H\d|L\d|.*Ada|GeForce RTX 40)")
"""Of the names that CUDA calls its devices by."""


def _result(dtype: str, functions: Sequence[Assumption]) -> str:
    """What a site of `dtype` is rounded to where its value comes out of these functions.

    One that is rounded to less than a float32 loses more by that.
    """
    if any(function.holds is False for function in functions):
        return dtype.removesuffix(TOWARD_ZERO) + TOWARD_ZERO
    ulps = [function.ulps for function in functions if function.holds is None]
    if not ulps or dtype.partition("/")[0] != "float32":
        return dtype
    off = sum(ulps)
    lost = math.ceil(math.log2(max(off, 1.0))) if math.isfinite(off) else math.inf
    site = f"float32/{2**lost}" if 0 < lost < math.inf else "float32"
    if lost == math.inf or site not in SITES:
        names = ", ".join(function.name for function in functions)
        raise ValueError(f"{names} must be off by at most 1024 ulps for a contract to hold, got {off:g}")
    return site + OF_POWER * any(function.slope for function in functions)
