"""A record to vary, and what ledgers hold."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity.backends import EMULATED
from parity.judging.metrics import Metrics
from parity.ledger.schema import SCHEMA, Provenance, Record, ledger_path
from parity.ledger.write import Merged, Recorder, merge

HASH = "0123456789abcdef" * 4

PROVENANCE = Provenance(
    schema=SCHEMA,
    op="double",
    backend="gpu",
    device_kind=EMULATED,
    real=False,
    kernel=HASH,
    golden=HASH[::-1],
    revisions={"inputs": 1, "magnitude": 2, "metrics": 3},
    versions={"python": "3.11.9", "triton": "3.9.0"},
    flags={"TRITON_INTERPRET": "1"},
    commit="d21663a",
    dirty=True,
    utc="2026-01-31T23:59:59Z",
)
METRICS = Metrics(
    elements=600,
    scored=600,
    epsilon=1.23456789e-8,
    floor=0.1,
    misrounded=0.25,
    eta_max=math.inf,
    eta_q999=3.0,
    bias=-0.125,
    wrong_finiteness=1,
    differing=7,
    worst=((1, 2), (0, 0)),
    histogram=(7, *[0] * 63),
    tiles=((0.5, math.inf), (0.0, 1e-300)),
)
RECORD = Record(
    case="double-M8_N40-f32-s3",
    seed=3,
    contract="ieee/float32/float32",
    inputs={"x": HASH},
    tiles="64x128x128",
    verdict="OUT OF BOUND",
    bound=66.0,
    outputs={"out": METRICS},
    contract_epsilon=2.5e-8,
    seconds=0.125,
    provenance=PROVENANCE,
)
H200 = replace(PROVENANCE, device_kind="NVIDIA H200", real=True)


def path_of(root: Path, record: Record = RECORD) -> Path:
    p = record.provenance
    return ledger_path(root, p.backend, p.device_kind, p.op)


def write(root: Path, *given: Record) -> None:
    with Recorder(root) as recorder:
        for record in given:
            recorder.write(record)


def keep(root: Path, *given: Record) -> Merged:
    """Write records, and merge them into the ledgers."""
    write(root, *given)
    return merge(root)


def contents(folder: Path) -> dict[tuple[Path, str, int], dict[str, Any]]:
    """What ledgers hold, but when and from which commit it was measured, and how long it took."""
    found = {}
    for path in sorted(folder.rglob("*.jsonl")):
        provenance = {}
        for line in map(json.loads, path.read_text().splitlines()):
            if "id" in line:
                provenance[line["id"]] = {**line["provenance"], "utc": "", "commit": "", "dirty": ""}
            else:
                where = path.relative_to(folder), line["case"], line["seed"]
                found[where] = {**line, "seconds": 0, "provenance": provenance[line["provenance"]]}
    return found
