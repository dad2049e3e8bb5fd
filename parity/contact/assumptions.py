"""What contracts and kernels take for granted of a device's arithmetic, until it is measured there. Data alone.

docs/assumptions.md says where each is relied upon. On a device whose measured table is in the ledger
(`measured_path`), that takes the place of the assumption: `of_device`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Assumption:
    """A function's largest error on a kind of device, in units of the result's last place (ulp) in float32.

    device: "tpu", "cuda" or "hip". slope: ulps more per unit of the argument's magnitude (an exponential is a product
    and a power of two: the product's rounding grows with it). holds: of what is no error but a property, whether it is
    assumed to hold; its name says which. source: who says so.
    """

    name: str
    device: str
    ulps: float = 0.0
    slope: float = 0.0
    holds: bool | None = None
    source: str = ""

    def allows(self, argument: float) -> float:
        """The ulps that a result at this argument may be off."""
        return self.ulps + self.slope * abs(argument)


PTX = "PTX ISA, floating-point instructions; Triton takes the .approx forms"
AMD = "AMD CDNA3 ISA: 1 ulp, subnormals kept; Triton multiplies by log2(e) first"
TPU = "the compiled code: a multiply, one vector instruction, a correction; its error is published nowhere"
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
                "to_bfloat16 rounds to nearest even": (True, PTX),
                "to_float8_e4m3fn rounds to nearest even": (True, PTX),
                "minimum keeps NaN": (False, PTX + ": min.f32 returns the number"),
                "dot of one sign is rounded to nearest": (False, "arXiv:2512.07004: tensor cores truncate"),
                "subnormals are kept": (True, PTX + ", without .ftz"),
            },
            "hip": {
                "to_bfloat16 rounds to nearest even": (True, AMD),
                "to_float8_e4m3fn rounds to nearest even": (True, AMD),
                "minimum keeps NaN": (False, AMD + ": v_min_f32 returns the number"),
                "dot of one sign is rounded to nearest": (True, AMD),
                "subnormals are kept": (True, AMD),
            },
            "tpu": {
                "to_bfloat16 rounds to nearest even": (True, TPU),
                "to_float8_e4m3fn rounds to nearest even": (True, TPU),
                "minimum keeps NaN": (True, "XLA's minimum does; the instruction's choice is published nowhere"),
                "dot of one sign is rounded to nearest": (True, TPU),
                "subnormals are kept": (False, "TPUs flush subnormals to zero"),
            },
        }.items()
        for name, (holds, source) in properties.items()
    ),
)  # fmt: skip


def measured_path(records: Path, backend: str, device_kind: str) -> Path:
    """Where what was measured on a device is kept."""
    return records / backend / device_kind.replace(" ", "_") / "assumptions.json"


def of_device(device: str, measured: Path | None = None) -> Mapping[str, Assumption]:
    """The assumptions about a kind of device by name, each replaced by what was measured where that is recorded."""
    assumed = {assumption.name: assumption for assumption in ASSUMPTIONS if assumption.device == device}
    if measured is None or not measured.exists():
        return assumed
    found = json.loads(measured.read_text())
    return {name: replace(x, **found.get(name, {}), source=x.source) for name, x in assumed.items()}
