"""Frozen digests of every distribution and pattern.

Whoever changes one changes what every recorded error was measured on: raise `parity.inputs.REVISION`, record anew, and
write down the new digest, which the failing test prints.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from parity import inputs
from parity.inputs import DISTRIBUTIONS, GATES, GROUPS, OFFSETS, SCALES, draw, group_sizes, hashes, log_decays
from parity.judging import magnitude, metrics
from parity.op import Array, Gates, Groups
from tests.matrix import OPS
from tests.matrix.gla import GATED_LINEAR_ATTENTION
from tests.matrix.gmm import GMM
from tests.matrix.quantized_gmm import GMM_QUANTIZED


def bits():
    return np.random.Philox(key=7).random_raw


def digest(arrays):
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.shape}{array.dtype}".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:12]


def arrays(data):
    """An argument of every kind; the integers also summed, swinging and quantised inside."""
    kinds = [
        dict(),
        dict(sum_over=1),
        dict(sum_over=-1, pair_sign=-1),
        dict(sum_over=0),
        dict(sum_over=0, pair_sign=-1),
    ]
    if data == "integers":
        kinds += [dict(sum_over=1, swings=True), dict(sum_over=0, swings=True, pair_sign=-1)]
        kinds += [dict(shape=(5, 36, 7), sum_over=1, swings=True)]
        kinds += [dict(sum_over=1, quantised_inside=True), dict(sum_over=0, one_in=3)]
    for dtype, out in [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("int8", "float32"),
                       ("float8_e4m3fn", "bfloat16")]:  # fmt: skip
        if dtype != "int8" or data not in ("ranges", "cancellation"):
            for kind in kinds:
                yield DISTRIBUTIONS[data](Array(**dict(shape=(134, 147), dtype=dtype) | kind), bits(), out)
    if data == "ranges":
        yield DISTRIBUTIONS[data](Array((70, 200), "bfloat16"), bits(), "bfloat16")


def sizes(pattern):
    for count, rows in [(8, 300), (5, 77), (1, 4), (0, 0), (16, 9)]:
        if count or not pattern.startswith("empty"):
            yield group_sizes(Groups(count, rows, pattern), bits())


def lengths(pattern):
    return (OFFSETS[pattern](count, rows, bits()) for count, rows in [(5, 70), (6, 300), (1, 3)])


def scales(pattern):
    return (SCALES[pattern](shape, bits()) for shape in [(40, 3), (5, 7, 9)])


def decays(pattern):
    for shape in [(2, 64, 3), (5,)]:
        yield log_decays(Gates(shape, pattern), bits(), exact=False)
        yield log_decays(Gates(shape, pattern), bits(), exact=True)


KINDS = {"data": (arrays, DISTRIBUTIONS), "groups": (sizes, GROUPS), "lengths": (lengths, OFFSETS),
         "scales": (scales, SCALES), "decays": (decays, GATES)}  # fmt: skip
DIGESTS = {
    "data": {
        "normal": "aae1e2714b22",
        "one_signed": "e1f8269c6d1a",
        "integers": "aeb4ecc22906",
        "wide": "d5d203777da8",
        "outliers": "33363be49716",
        "correlated": "2f266f49dfb2",
        "residuals": "acf21163c759",
        "cancellation": "5ddcefb00ad3",
        "poison": "aae1e2714b22",
        "nonfinite": "aae1e2714b22",
        "bits": "b91086affee8",
        "ranges": "40d64962d443",
    },
    "groups": {
        "balanced": "21427819b15e",
        "zipf": "7ee771229266",
        "empty_first": "18a6fcbb8fde",
        "empty_middle": "a56bf90e54cd",
        "empty_last": "c437ccc7f526",
        "empty_runs": "d64487bf21dc",
        "one_hot": "5eae18f48037",
        "ones": "2322c7edad80",
        "straddle": "f3366a07d3f3",
        "short": "39854ecfadef",
        "none": "7f3a1002873f",
    },
    "lengths": {
        "even": "b7f767a8de80",
        "ragged": "c5acaa1b7687",
        "zeros_and_ones": "8ec71e144ceb",
        "one": "95893c5e5fb9",
    },
    "scales": {
        "varied": "5fd6dee06de8",
        "steps": "4a948228d1bb",
        "extremes": "39179fe80815",
        "powers": "a022798436d1",
    },
    "decays": {
        "sigmoid": "85e0ed4e6f57",
        "steep": "df9226b20f15",
        "resets": "2611e39da40d",
        "zero": "91e0982c56fb",
        "positive": "cfd7d06f1e5a",
        "mixed": "179cab3f2ce5",
        "slow": "72401011cfaa",
        "bound": "688a62e6e0de",
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_every_pattern(kind):
    drawn, patterns = KINDS[kind]
    assert {name: digest(drawn(name)) for name in patterns} == DIGESTS[kind]


def case_of(op, **wanted):
    return next(c for c in op.cases if all(getattr(c, name) == value for name, value in wanted.items()))


def drawn_cases():
    """What `draw` does beside the distributions: rounding, int8's range, offsets, gates, and what is never read."""
    gla = next(op for op in GATED_LINEAR_ATTENTION if op.name == "chunk_simple_gla_bwd")
    short = case_of(GMM, dtype="float32", groups="short", data="normal", M=300)
    int8 = next(c for c in GMM_QUANTIZED.cases if "int8" in c.id and c.data == "normal")
    packed = next(c for c in gla.cases if "_N5-f32-both-h0-ht-chunk16" in c.id)
    yield from ((GMM, short.with_data(data)) for data in ("poison", "nonfinite", "bits"))
    yield from ((GMM_QUANTIZED, int8.with_data(data)) for data in ("wide", "integers"))
    yield from ((gla, packed.with_data(data)) for data in ("normal", "integers", "cancellation"))


def test_the_bytes_of_whole_cases():
    def both(op, case):
        return hashlib.sha256("".join(hashes(draw(op, case)).values()).encode()).hexdigest()[:12]

    assert {case.id: both(op, case) for op, case in drawn_cases()} == CASES


CASES = {
    "gmm-M300_K200_N160_G6-f32-tiling64x128x128-short-poison-s0": "74d7c383b384",
    "gmm-M300_K200_N160_G6-f32-tiling64x128x128-short-nonfinite-s0": "3483832b9498",
    "gmm-M300_K200_N160_G6-f32-tiling64x128x128-short-bits-s0": "ee3f2c1bd550",
    "gmm_quantized-M300_K256_N160_G6-bf16_f32-int8-plain-1x128x1-tiling64x128x128-straddle-wide-s0": "29f09b1cf66f",
    "gmm_quantized-M300_K256_N160_G6-bf16_f32-int8-plain-1x128x1-tiling64x128x128-straddle-integers-s0": "3762a429482a",
    "chunk_simple_gla_bwd-B1_T70_H2_K16_V48_N5-f32-both-h0-ht-chunk16-s0": "a32b2f5f504f",
    "chunk_simple_gla_bwd-B1_T70_H2_K16_V48_N5-f32-both-h0-ht-chunk16-integers-s0": "48f64b612ffc",
    "chunk_simple_gla_bwd-B1_T70_H2_K16_V48_N5-f32-both-h0-ht-chunk16-cancellation-s0": "8904ad4ae844",
}


def test_what_is_recorded_was_drawn_and_measured_as_it_is_now():
    """The revisions in the ledgers: whoever raises one records anew. A device's ledger waits for the device: until then
    its records are not compared."""
    ledgers = sorted(Path(__file__).parents[2].glob("records/[tg]pu/emulated/*.jsonl"))
    heads = [json.loads(line) for path in ledgers for line in path.read_text().splitlines() if '"provenance":{' in line]
    assert len(heads) >= len(ledgers) > 20
    for provenance in (head["provenance"] for head in heads):
        of_magnitude = magnitude.revision(next(op for op in OPS if op.name == provenance["op"]))
        now = {"inputs": inputs.REVISION, "magnitude": of_magnitude, "metrics": metrics.REVISION}
        assert provenance["revisions"] == now


@pytest.mark.parametrize(("shape", "edge"), [((128, 256), 128), ((256, 128), 128), ((127, 256), 32), ((33, 40), 32)])
def test_ranges_begin_with_zeros_beside_the_largest(shape, edge):
    x = DISTRIBUTIONS["ranges"](Array(shape, "bfloat16"), bits(), "bfloat16")
    assert not x[:edge, :edge].any()
    beside = x[:edge, edge : 2 * edge] if shape[1] > edge else x[edge : 2 * edge, :edge]
    assert np.abs(beside).max() > 2.0**120


def test_ranges_of_an_array_without_rows_are_those_of_one_row():
    line, row = (DISTRIBUTIONS["ranges"](Array(shape, "bfloat16"), bits(), "bfloat16") for shape in [(100,), (1, 100)])
    np.testing.assert_array_equal(line, row[0])
    assert not line[:32].any() and np.abs(line[32:64]).max() > 2.0**120
    assert DISTRIBUTIONS["ranges"](Array((), "bfloat16"), bits(), "bfloat16") == 0


def test_long_integers_quantised_inside_keep_few_enough_terms():
    """A term is up to (4 · 1.75)² of the finest step, and 2^21 of that are exact beside what is added at the end."""
    values = DISTRIBUTIONS["integers"](
        Array((1, 43_000), "float32", sum_over=1, quantised_inside=True), bits(), "float32"
    )
    assert 0 < np.count_nonzero(values) * 49 <= 2**21
