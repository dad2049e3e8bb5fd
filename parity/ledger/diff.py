"""Two sets of records compared: what got better or worse beyond noise, and who moved. And one record, for a person.

A and B are compared case by case on the seeds that both have with the same input bytes. What is compared, and how much
it must differ to count, are the verdict's: the mean over seeds of ln T_B - ln T_A with its z standard errors, the tail
and the bias.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from _pytest.mark.expression import Expression

from parity import git
from parity.backends import EMULATED
from parity.judging.metrics import Metrics
from parity.judging.verdict import PASSING, TAIL, Bias, Statistic, parity, tail_log_ratio
from parity.ledger.read import check_size, content_of, parse
from parity.ledger.schema import Ledger, Record, RecordError
from parity.op import Contract
from parity.report.text import heat_map, sparkline

FOLDER = "records"
"""Where a revision keeps its ledgers, below the project's root."""
SCHEDULES, PLANS = "schedule", "plans"
"""The folders in it that hold what compilers say and how kernels are cut, which are not records of a case."""
WORST = 5
"""Changed cases of an op that are named, and held to their contract."""
BETWEEN = " → "
"""What is between two kinds of device that are compared; no kind's name has it."""
SCHEMA = 1
"""Of the JSON that `to_json` writes."""

Key = tuple[str, str, str]
"""Backend, device kind, op."""
ByContract = Callable[[Record], Mapping[str, float]]
"""Of a record, how many times its contract's the error of each output is, as a whole; of those where that is known."""
Change = Literal["worse", "better", "not comparable", "unchanged", "only in A", "only in B"]

# Who can move a result, the likeliest first.
_MOVERS = (
    "kernel", "tiles", "compiler", "framework", "flags", "device", "driver", "contract",
    "golden", "generator", "metrics",
)  # fmt: skip
_CHANGE: Mapping[str, Change] = {"LOSS": "worse", "WIN": "better", "TIE": "unchanged"}
_ORDER: tuple[Change, ...] = get_args(Change)
_COMPILERS = ("libtpu", "triton")


# --- reading ---


def load(source: str, root: Path) -> dict[Key, Ledger]:
    """The records that `source` names: a ledger, a folder of ledgers at any depth, or a git revision.

    Of a revision of the repository at `root` these are the ledgers committed under `records/`. Where a path and a
    revision have the same name, the path is meant. Raises ValueError where `source` is none of them or holds no
    ledger, RecordError (a ValueError) for a ledger that cannot be trusted.
    """
    if _is_path(source):
        path, name = Path(source), source
        files = {file: file.relative_to(path) for file in path.rglob("*.jsonl")} if path.is_dir() else {path: Path()}
        contents = {str(file): content_of(file) for file in sorted(files) if _is_ledger(files[file])}
    else:
        contents, name = _committed(source, root), f"{source}:{FOLDER}"
    if not contents:
        raise ValueError(f"{name} must be a ledger or hold some (*.jsonl), got none")
    ledgers: dict[Key, Ledger] = {}
    for file, text in contents.items():
        for record in parse(text, file).values():
            p = record.provenance
            ledger = ledgers.setdefault((p.backend, p.device_kind, p.op), {})
            if ledger.setdefault(record.key, record) is not record:
                raise RecordError(f"{file}: must not hold {record.case!r}, seed {record.seed}: another ledger has it")
    return ledgers


def _is_path(source: str) -> bool:
    try:
        return bool(source) and Path(source).exists()
    except (OSError, ValueError):  # no path could be written so
        return False


def _is_ledger(file: Path) -> bool:
    """Whether a file below `records` holds records: not a plan, a schedule, or (in a hidden folder) a part to merge."""
    folders = file.parts[:-1]
    return not {SCHEDULES, PLANS} & {*folders} and not any(folder.startswith(".") for folder in folders)


def _committed(revision: str, root: Path) -> dict[str, bytes]:
    """The ledgers of a revision, by the name that errors have for them."""
    try:
        blobs = git.ledgers_in(root, git.commit(root, revision), FOLDER)
        contents = {}
        for file, blob in sorted(blobs.items()):
            if _is_ledger(file):
                check_size(f"{revision}:{file}", blob.size)
                contents[f"{revision}:{file}"] = git.content(root, blob)
    except RecordError:
        raise
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"must be a ledger, a folder of ledgers or a revision of the repository at {root}, got {revision!r}: "
            "no such file or folder, and git knows no such commit"
        ) from error
    return contents


# --- comparing ---


@dataclass(frozen=True)
class Ratio:
    """T of B over T of A, with its interval, of the output that decided."""

    output: str
    statistic: str  # T: ε, or the misround rate
    ratio: float
    low: float
    high: float

    @property
    def size(self) -> float:
        """How far from 1, up or down."""
        return abs(math.log(self.ratio)) if self.ratio else math.inf

    def __str__(self) -> str:
        near = abs(self.ratio - 1) < 0.05
        ratio, low, high = (
            f"{x:.{4 if near else 2}f}" if 0.01 <= x < 1000 else f"{x:.3g}" for x in (self.ratio, self.low, self.high)
        )
        return f"{ratio}× [{low}, {high}]"


@dataclass(frozen=True)
class CaseDiff:
    """What became of one case, over all its seeds."""

    case: str
    change: Change
    seeds: int = 0  # that could be compared
    ratio: Ratio | None = None  # None where nothing could be measured
    beyond: tuple[str, ...] = ()  # tails and biases that changed by more than the verdict allows
    verdicts: tuple[str, ...] = ()  # outcome in A and in B; of several seeds the first that fails
    moved: tuple[str, ...] = ()  # what differs between A and B, the likeliest cause first
    contract: tuple[float, float] | None = None  # that output's error over its contract's in A and B: `in_contracts`

    @property
    def cause(self) -> str:
        """Who moved, in words."""
        if self.moved or self.change.startswith("only"):
            return ", ".join(self.moved)
        if self.change == "not comparable":
            return "no seed in common"
        return "noise only" if self.change == "unchanged" else "unexplained (same kernel, versions, device and inputs)"


@dataclass(frozen=True)
class OpDiff:
    """What became of the cases of one op on one device kind."""

    backend: str
    device_kind: str  # "NVIDIA H100 → NVIDIA H200" where A and B are of different kinds
    op: str
    cases: tuple[CaseDiff, ...]

    @property
    def device_kinds(self) -> tuple[str, ...]:
        """One, or that of A and that of B."""
        return tuple(self.device_kind.split(BETWEEN))

    @property
    def changed(self) -> list[CaseDiff]:
        """The cases that are not what they were: those that got worse first, most first."""
        return sorted((c for c in self.cases if c.change in ("worse", "better", "not comparable")), key=_severity)

    @property
    def counts(self) -> dict[str, int]:
        """How many cases changed how."""
        return dict(Counter(case.change for case in self.cases))

    @property
    def cause(self) -> str:
        """Who moved, in words: what is behind the changed cases, or behind all where none changed."""
        shared = [case for case in self.cases if not case.change.startswith("only")]
        changed = [case for case in shared if case.change != "unchanged"]
        moved = _likeliest_first(mover for case in changed or shared for mover in case.moved)
        return ", ".join(moved or dict.fromkeys(case.cause for case in changed or shared))


def diff(a: Mapping[Key, Ledger], b: Mapping[Key, Ledger]) -> list[OpDiff]:
    """Compare two sets of ledgers, by backend, device kind, op and case.

    Where A and B have an op on one kind of accelerator each that the other has not, these two are compared; hardware
    and emulation never are. Raises ValueError for a record whose contract is not one.
    """
    found = {}
    for backend, kind, op in sorted({*a, *b}):
        old, new = (_kinds_alone(one, other, backend, op) for one, other in ((a, b), (b, a)))
        before = after = kind
        if kind in old + new and len(old) == len(new) == 1:
            before, after = old[0], new[0]
        kinds = kind if before == after else before + BETWEEN + after
        ledgers = _by_case(a.get((backend, before, op), {})), _by_case(b.get((backend, after, op), {}))
        names = sorted({*ledgers[0], *ledgers[1]})
        cases = tuple(_diff_case(name, *(ledger.get(name, {}) for ledger in ledgers)) for name in names)
        found[backend, kinds, op] = OpDiff(backend, kinds, op, cases)
    return list(found.values())


def in_contracts(
    diffs: Iterable[OpDiff], a: Mapping[Key, Ledger], b: Mapping[Key, Ledger], by_contract: ByContract
) -> list[OpDiff]:
    """What `diff(a, b)` has found, with the errors of the `WORST` changed cases of each op in terms of their contract.

    They are root mean squares over the seeds that were compared; None where one of these is not known.
    """
    found = []
    for of_op in diffs:
        before, *_, after = (*of_op.device_kinds, *of_op.device_kinds)
        old, new = (_by_case(x.get((of_op.backend, kind, of_op.op), {})) for x, kind in ((a, before), (b, after)))
        known = {
            case.case: _in_contract(case.ratio.output, _compared(old[case.case], new[case.case]), by_contract)
            for case in of_op.changed[:WORST]
            if case.ratio
        }
        cases = tuple(replace(case, contract=known.get(case.case)) for case in of_op.cases)
        found.append(replace(of_op, cases=cases))
    return found


def _in_contract(
    output: str, pairs: Sequence[tuple[Record, Record]], by_contract: ByContract
) -> tuple[float, float] | None:
    ratios = np.array([[by_contract(record).get(output, math.nan) for record in pair] for pair in pairs])
    before, now = np.sqrt(np.mean(ratios**2, axis=0))
    return None if math.isnan(before + now) else (float(before), float(now))


def regressed(diffs: Iterable[OpDiff]) -> bool:
    """Whether any case got worse."""
    return any(case.change == "worse" for of_op in diffs for case in of_op.cases)


def _kinds_alone(one: Iterable[Key], other: Iterable[Key], backend: str, op: str) -> list[str]:
    """Kinds of accelerator that only `one` has records of."""
    return [key[1] for key in one if key not in other and (key[0], key[2]) == (backend, op) and key[1] != EMULATED]


def _by_case(ledger: Ledger) -> dict[str, dict[int, Record]]:
    cases: dict[str, dict[int, Record]] = {}
    for record in ledger.values():
        cases.setdefault(record.case, {})[record.seed] = record
    return cases


def _diff_case(name: str, a: Mapping[int, Record], b: Mapping[int, Record]) -> CaseDiff:
    if not a or not b:
        return CaseDiff(name, "only in A" if a else "only in B")
    pairs = _pairs(a, b)
    compared = _compared(a, b)
    change, ratio, beyond = _measured(compared)
    sound = {(_sound(old), _sound(new)) for old, new in pairs}
    if (True, False) in sound:  # whatever became of ε
        change = "worse"
    elif (False, True) in sound:
        change = "better"
    elif not compared:
        change = "not comparable"
    verdicts = tuple(_outcome(side) for side in zip(*pairs, strict=True))
    moved = _likeliest_first(mover for pair in pairs for mover in _movers(*pair))
    return CaseDiff(name, change, len(compared), ratio, beyond, verdicts, moved)


def _pairs(a: Mapping[int, Record], b: Mapping[int, Record]) -> list[tuple[Record, Record]]:
    """The records of both of each seed. Those not recorded again say nothing of what moved, and would hide it."""
    pairs = [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]
    return [(old, new) for old, new in pairs if old != new] or pairs


def _compared(a: Mapping[int, Record], b: Mapping[int, Record]) -> list[tuple[Record, Record]]:
    return [pair for pair in _pairs(a, b) if _comparable(*pair)]


def _comparable(a: Record, b: Record) -> bool:
    """Whether the errors of both are of the same inputs in the same measure."""
    measures = ("magnitude", "metrics")
    before, now = a.provenance.revisions, b.provenance.revisions
    return a.inputs == b.inputs and all(before.get(name) == now.get(name) for name in measures)


def _sound(record: Record) -> bool:
    return record.verdict in PASSING and all(map(_finite, record.outputs.values()))


def _finite(m: Metrics) -> bool:
    """Whether T can be taken of it: a file may say anything, and the verdict squares ε."""
    return math.isfinite(m.epsilon * m.epsilon) and math.isfinite(m.misrounded)


def _outcome(records: Sequence[Record]) -> str:
    return next((record.verdict for record in records if not _sound(record)), records[0].verdict)


def _measured(pairs: Sequence[tuple[Record, Record]]) -> tuple[Change, Ratio | None, tuple[str, ...]]:
    """What became of T, by the output that got worse most, or where none did, better most; of all tails and biases."""
    records = [record for pair in pairs for record in pair]
    names = [name for name in records[0].outputs if all(name in r.outputs for r in records)] if records else []
    narrow = {_narrow_output(record.contract) for record in records} == {True}
    found: list[tuple[Change, Ratio]] = []
    beyond: list[str] = []
    for name in names:
        a, b = ([pair[side].outputs[name] for pair in pairs] for side in (0, 1))
        if all(map(_finite, (*a, *b))):
            statistic = Statistic.of((*a, *b), narrow)
            with np.errstate(over="ignore"):  # where a faultless output no longer is
                compared = parity(b, a, statistic, 0.0)
            ratio = Ratio(name, statistic.name, compared.ratio, compared.low, compared.high)
            changes = {_CHANGE[compared.verdict.outcome]}
            for change, words in _beyond(a, b):
                changes.add(change)
                beyond.append(words if name == "out" else f"{words} of {name}")
            found.append((min(changes, key=_ORDER.index), ratio))
    worst = min(found, key=lambda f: (_ORDER.index(f[0]), -f[1].size), default=("unchanged", None))
    return (*worst, tuple(beyond))


def _beyond(a: Sequence[Metrics], b: Sequence[Metrics]) -> Iterator[tuple[Change, str]]:
    """G6 and G7 between A and B, in both directions. They fail a kernel however good its ε is, so either outweighs."""
    ratio, margin = tail_log_ratio(b, a)
    if abs(ratio) > np.log(TAIL) + margin:
        yield "worse" if ratio > 0 else "better", f"tail {np.exp(ratio):.3g}×"
    before, now = Bias.of(a), Bias.of(b)
    if now.exceeds(before) or before.exceeds(now):
        yield "worse" if now.size > before.size else "better", f"bias {before.size:.3g} → {now.size:.3g}"


def _narrow_output(contract: str) -> bool:
    try:
        dot, accumulate, out = contract.split("/")
        return Contract(dot, out, accumulate).is_narrow("out")
    except ValueError as error:
        raise RecordError(f"contract must be dot/accumulator/output, got {contract[:100]!r}") from error


def _movers(a: Record, b: Record) -> Iterator[str]:
    """What differs between two records of one case and seed. The first word is one of `_MOVERS`."""
    old, new = a.provenance, b.provenance
    if old.kernel != new.kernel:
        yield "kernel"
    if old.golden != new.golden:
        yield "golden"
    revisions = {
        name for name in ("inputs", "magnitude", "metrics") if old.revisions.get(name) != new.revisions.get(name)
    }
    if "inputs" in revisions or a.inputs != b.inputs:
        yield "generator"
    if revisions - {"inputs"}:
        yield "metrics"
    versions = ({name: _version(name, v) for name, v in p.versions.items()} for p in (old, new))
    yield from (f"{_role(name)}{change}" for name, change in _changes(*versions))
    yield from (f"flags {name}{change}" for name, change in _changes(old.flags, new.flags))
    named = [{"device": r.provenance.device_kind, "contract": r.contract, "tiles": r.tiles} for r in (a, b)]
    yield from (f"{name}{change}" for name, change in _changes(*named))


def _version(name: str, version: str) -> str:
    """Of Python without the patch: it moves no figure."""
    return ".".join(version.split(".")[:2]) if name == "python" else version


def _role(name: str) -> str:
    return name if name == "driver" else f"compiler {name}" if name in _COMPILERS else f"framework {name}"


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if before != now:
            yield name, f" {'none' if before is None else before} → {'none' if now is None else now}"


def _likeliest_first(movers: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(dict.fromkeys(movers), key=lambda mover: _MOVERS.index(mover.split(" ")[0])))


# --- telling ---


def describe(diffs: Sequence[OpDiff], worst: int = WORST) -> str:
    """One line per op that moved, then its `worst` changed cases: those that got worse first, most first. One line for
    all that did not move."""
    lines = []
    still = [of_op for of_op in diffs if of_op.counts.keys() <= {"unchanged"}]
    for of_op in (of_op for of_op in diffs if of_op not in still):
        counts = ", ".join(f"{of_op.counts[name]} {name}" for name in _ORDER if name in of_op.counts)
        cause = f"   who moved: {of_op.cause}" if of_op.cause else ""
        lines.append(f"{of_op.op}  {of_op.backend} {of_op.device_kind}: {counts}{cause}")
        lines += [f"  {_line(case)}" for case in of_op.changed[:worst]]
        if len(of_op.changed) > worst:
            lines.append(f"  … and {len(of_op.changed) - worst} more")
    if still:
        cases = [case for of_op in still for case in of_op.cases]
        moved = _likeliest_first(mover for case in cases for mover in case.moved)
        cause = f"   who moved: {', '.join(moved)}" if moved else ""
        lines.append(f"unchanged: {len(cases)} cases of {len(still)} ledgers{cause}")
    return "\n".join(lines)


def _severity(case: CaseDiff) -> tuple[int, bool, float, str]:
    """Worse before better, a changed verdict before a changed ε, much before little."""
    outcomes_differ = len(set(case.verdicts)) > 1
    size = case.ratio.size if case.ratio else 0.0
    return _ORDER.index(case.change), not outcomes_differ, -size, case.case


def _line(case: CaseDiff) -> str:
    parts = [f"{case.change:<6} {case.case}"]
    if case.ratio:
        name = case.ratio.statistic if case.ratio.output == "out" else f"{case.ratio.statistic} of {case.ratio.output}"
        parts.append(f"{name} {case.ratio} over {case.seeds} seed{'s' if case.seeds > 1 else ''}")
    if case.contract:
        parts.append("{:.3g} → {:.3g} × its contract".format(*case.contract))
    parts += case.beyond
    if len(set(case.verdicts)) > 1:
        parts.append(" → ".join(case.verdicts))
    return "   ".join([*parts, case.cause])


def to_json(diffs: Sequence[OpDiff]) -> str:
    """Everything as JSON; ratios and ends of intervals that are not finite are null."""
    ops = [
        {**asdict(of_op), "counts": of_op.counts, "cause": of_op.cause, "cases": [_plain(c) for c in of_op.cases]}
        for of_op in diffs
    ]
    document = {"schema": SCHEMA, "regressed": regressed(diffs), "ops": ops}
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)


def _plain(case: CaseDiff) -> dict[str, Any]:
    plain = {**asdict(case), "cause": case.cause}
    if case.ratio:
        plain["ratio"] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(case.ratio).items()
        }
    return plain


def show(records: Sequence[Record], by_contract: ByContract = lambda record: {}) -> str:
    """Records for a person: a block for every case, backend and recording, with a line for each of its seeds."""

    def block(record: Record) -> tuple[str, ...]:
        p = record.provenance
        return record.case, p.backend, p.device_kind, p.utc, p.id, record.contract, record.tiles or ""

    ordered = sorted(records, key=lambda record: (block(record), record.seed))
    return "\n\n".join("\n".join(_show_block(list(together), by_contract)) for _, together in groupby(ordered, block))


def _show_block(records: Sequence[Record], by_contract: ByContract) -> Iterator[str]:
    record, p = records[0], records[0].provenance
    outcomes = Counter(r.verdict for r in records)
    tree = {True: " with local changes", False: "", None: ""}[p.dirty]
    yield f"{record.case}   {'  '.join(f'{count} {outcome}' for outcome, count in outcomes.items())}"
    yield f"{p.backend} {p.device_kind}   contract {record.contract}   tiles {record.tiles or 'chosen by the kernel'}"
    yield f"recorded {p.utc} at commit {p.commit or 'unknown'}{tree}   kernel {p.kernel[:12]}   golden {p.golden[:12]}"
    yield "versions " + ", ".join(f"{name} {version}" for name, version in sorted(p.versions.items()))
    if p.flags:
        yield "flags " + " ".join(f"{name}={value!r}" for name, value in sorted(p.flags.items()))
    ratios = [by_contract(r) for r in records]
    for name in dict.fromkeys(name for r in records for name in r.outputs):
        measured = [(r, r.outputs[name]) for r in records if name in r.outputs]
        yield from _show_output(
            name, measured, [x.get(name) for r, x in zip(records, ratios, strict=True) if name in r.outputs]
        )


def _show_output(
    name: str, measured: Sequence[tuple[Record, Metrics]], ratios: Sequence[float | None]
) -> Iterator[str]:
    rms = math.hypot(*(m.epsilon for _, m in measured)) / math.sqrt(len(measured))
    yield f"{name}: ε = {rms:.3g} over {len(measured)} seed{'s' if len(measured) > 1 else ''}"
    yield f"  {'seed':>5} {'ε':>9} {'floor':>9} {'misrounded':>10} {'× its contract':>15}  verdict"
    for (r, m), ratio in zip(measured, ratios, strict=True):
        figures = f"{m.epsilon:>9.3g} {m.floor:>9.3g} {m.misrounded:>10.2%}"
        yield f"  {r.seed:>5} {figures} {'–' if ratio is None else f'{ratio:.2f}':>15}  {r.verdict}"
    record, worst = max(measured, key=lambda pair: pair[1].eta_max)
    if worst.worst:
        at = ", ".join(map(str, worst.worst[0]))
        yield f"  worst η {worst.eta_max:.3g} at [{at}], seed {record.seed}"
    counts = [sum(bin) for bin in zip(*(m.histogram for _, m in measured), strict=True)]
    if any(counts):
        yield f"  η  {sparkline(counts)}"
    if any(any(row) for row in worst.tiles):
        yield f"  rms η by tile, seed {record.seed}"
        yield from (f"    |{row}|" for row in heat_map(worst.tiles))


def matches(expression: str, text: str) -> bool:
    """Whether `text` matches an expression as pytest's -k takes it: words, whatever their case, and, or, not, ( ).

    An empty expression matches everything. Raises ValueError, with pytest's message, for one that is malformed.
    """

    def contains(word: str, /, **given: str | int | bool | None) -> bool:
        if given:
            raise ValueError(f"-k {expression!r}: keyword expressions do not support call parameters")
        return word.lower() in text.lower()

    try:
        compiled = Expression.compile(expression)
    except Exception as error:  # SyntaxError; before pytest 9 an error of its own
        raise ValueError(f"-k {expression!r}: {getattr(error, 'msg', error)}") from error
    return not expression.strip() or compiled.evaluate(contains)
