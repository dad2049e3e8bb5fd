"""What `parity explain` and `parity stages` answer of planted faults, held to what was planted.

    python -m tests.meta.faults.answers [--every N] [--only WORDS]       # the table of docs/hunting.md

An answer is right where `stages` names the planted line in its first sentence, where `explain` names the rounding by
its dtype, at a site that has at least 90 % of the error, or, of a fault of logic, where `explain` calls it one and the
planted line is among the statements that `stages` lists, or in a function that it lists of at most `SMALL` lines; or
where the answer has what `CAUSES` says of the fault. It is wrong where either command calls lost precision a
fault of logic, or logic a rounding.
"""

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from parity.backends import prepare_environment
from parity.cli import explain as explain_command
from parity.cli import stages as stages_command
from parity.debugging.attribution import lines_compared_bit_for_bit
from parity.debugging.attribution.bits import walk_bits
from parity.debugging.attribution.locate import locate, region_of_bits
from parity.debugging.bits import explain_bits
from parity.debugging.explain import explain
from parity.judging.judge import Judgement, judge
from parity.op import Op
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults import (
    test_faults,
    test_faults_delta_rule,
    test_faults_delta_rule_conv,
    test_faults_delta_rule_gates,
    test_faults_gla,
    test_faults_moe,
    test_faults_mxfp8,
    test_faults_precision,
    test_faults_quantized,
)
from tests.meta.faults.planting import OP, Fault, plant, planted_lines

FILES = (
    test_faults,
    test_faults_gla,
    test_faults_moe,
    test_faults_mxfp8,
    test_faults_quantized,
    test_faults_precision,
    test_faults_delta_rule,
    test_faults_delta_rule_gates,
    test_faults_delta_rule_conv,
)
PRECISION = (
    "bfloat16",
    "rounded",
    "float32 beyond",
    "float16",
    "21 bits",
    "pass of",
    "passes of",
    "pieces of",
    "TF32",
    "from powers",
)
"""Words in the names of faults that lose precision, and are wrong in nothing else."""
LONGEST = 60
"""Statements of a region, the nearest first, that are read."""
SMALL = 30
"""Lines of a function that may stand for the statement in it."""
RIGHT = ("line", "rounding", "statement", "function", "cause")
KINDS = (*RIGHT, "missed", "wrong")
DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "TF32": "tf32",
    "rounded twice": "tf32",
    "passes": "bf16x3",
    "one pass": "bfloat16",
}
"""What `explain` calls the roundings that a fault's name has a word for."""

CAUSES = {
    "the columnwise payload is the rowwise one": (
        "rowwise_spread in the place of the value at columnwise_spread, 100%",
    ),
    "the K tail is dropped": ("what lhs adds in K block 1 is missing",),
    "int8 is accumulated in float32 beyond 2^24": (
        "return sums if total is None else total + sums",
        "_dot_of_step(a, b",
    ),
    "a tile overwrites what it should add to": ("return decayed(state, ",),
    "the scale is not transposed with rhs": ("it is the golden of rhs_scale with its last two axes swapped",),
    "block_size is not forwarded": ("it is the golden of block_size None in the place of 64",),
    "two passes of three": ("error = bfloat16 at lhs",),
}
"""What says of a fault as well as its line does what is wrong: read, and found right. The third are the statements that
round, what was planted is the choice of a dtype; the fourth calls the function that has nothing left to compute; the
next two are what was planted, in words; without the product of lhs's low piece lhs is rounded to its high one."""


@dataclass(frozen=True)
class Answer:
    """What the tools say of a fault, and of which kind that is, one of `KINDS`."""

    fault: str
    backend: str
    op: str
    case: str
    what: str  # "precision" or "logic"
    kind: str
    explained: str  # the conclusion of explain
    located: str  # that of stages
    statements: int  # of the region


def faults() -> Iterator[tuple[Fault, Op]]:
    """Each planted fault once a backend, in the first op that must show it."""
    seen = set()
    for file in FILES:
        for fault in file.FAULTS:
            if (fault.name, fault.backend) not in seen:
                seen.add((fault.name, fault.backend))
                yield fault, OP[fault.ops[0]]


def ask(fault: Fault, op: Op, folder: Path) -> Answer:
    """What the tools say of a fault, in the first case that fails with it. Raises ValueError where none does."""
    kernel = getattr(plant(fault, folder), op.name)
    cases = [case for case in op.cases if fault.where(case)]
    cases = [case for case in cases if case.tier != "full"] or cases
    for case in cases if fault.data is None else [case.with_data(fault.data) for case in cases]:
        trial = Trial(op, case, fault.backend, kernel)
        judged = judge(trial)
        if not judged.verdict.passed:
            explained, located = _screens(trial, judged, folder)
            return _scored(fault, op, case.id, explained.splitlines()[1], located)
    raise ValueError(f"a case must fail with {fault.name} on {fault.backend}, none of {len(cases)} does")


def _screens(trial: Trial, judged: Judgement, root: Path) -> tuple[str, str]:
    """What both commands print."""
    if trial.op.bit_exact:
        stages = walk_bits(trial)
        located = stages_command.screen_of_bits(stages, region_of_bits(trial, stages), root)
        return explain_command.of_bits(explain_bits(trial)).plain, located.plain
    explained = explain_command.explanation(explain(trial, judged=judged, ops=OPS)).plain
    fixed = lines_compared_bit_for_bit(OPS, trial.op, trial.backend)
    return explained, stages_command.screen(locate(trial, judged.output, fixed), root).plain


def _scored(fault: Fault, op: Op, case: str, explained: str, located: str) -> Answer:
    is_precision = not op.bit_exact and any(word in fault.name for word in PRECISION)
    what = "precision" if is_precision else "logic"
    planted, first = planted_lines(fault), located.splitlines()[0]
    named = {int(number) for number in re.findall(rf"planted_{fault.backend}\.py:(\d+)", first)}
    listed, functions = _listed(located, f"planted_{fault.backend}.py")
    statements = len(re.findall(r"^    \d+  ", located, re.M))
    is_logic, is_rounding = "a logic fault" in explained, explained.startswith("error ") and " = " in explained
    taken_for_logic, taken_for_rounding = is_logic or "a logic fault" in first, is_rounding or "precision is" in first
    kind = "missed"
    if taken_for_logic if what == "precision" else taken_for_rounding:
        kind = "wrong"
    elif named & set(planted):
        kind = "line"
    elif what == "precision" and is_rounding and any(w in fault.name and d in explained for w, d in DTYPES.items()):
        kind = "rounding"
    elif what == "logic" and (is_logic or explained.startswith("not finite")):
        if listed & set(planted):
            kind = "statement"
        elif any(len(lines) <= SMALL and not lines.isdisjoint(planted) for lines in functions):
            kind = "function"
    if kind == "missed" and any(cause in explained + located for cause in CAUSES.get(fault.name, ())):
        kind = "cause"
    return Answer(fault.name, fault.backend, op.name, case, what, kind, explained, first, statements)


def _listed(located: str, file: str) -> tuple[set[int], list[set[int]]]:
    """The lines of a file whose statements are listed, up to `LONGEST`, and of each function that has some."""
    statements: set[int] = set()
    read = 0
    functions: list[set[int]] = []
    inside = False
    for row in located.splitlines():
        if head := re.match(r"  (\S+\.py):(\d+)–(\d+)  ", row):
            inside = head[1] == file
            functions += [{*range(int(head[2]), int(head[3]) + 1)}] if inside else []
        elif statement := re.match(r"    (\d+)  ", row):
            statements |= {int(statement[1])} if inside else set()
            read += 1
            if read == LONGEST:
                break
    return statements, functions


def table(answers: list[Answer]) -> str:
    """The score, by backend and what was planted."""
    rows = [f"| planted | faults | {' | '.join(KINDS)} |", "|---" * (2 + len(KINDS)) + "|"]
    for backend, what in sorted({(a.backend, a.what) for a in answers}):
        of = [a for a in answers if (a.backend, a.what) == (backend, what)]
        counts = Counter(a.kind for a in of)
        rows.append(f"| {what}, {backend} | {len(of)} | " + " | ".join(str(counts[kind]) for kind in KINDS) + " |")
    right = sum(a.kind in RIGHT for a in answers)
    return "\n".join([*rows, "", f"{right} of {len(answers)} right, {right / max(len(answers), 1):.1%}"])


def main() -> None:
    """Ask of every fault, or some; print the table and what is not right, and write each answer as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="ask of every Nth")
    parser.add_argument("--only", default="", help="ask of those whose backend, op and name match this")
    parser.add_argument("--out", type=Path, help="write the answers there, a line of JSON each")
    given = parser.parse_args()
    prepare_environment()
    answers = []
    chosen = [(f, op) for f, op in faults() if re.search(given.only, f"{f.backend}-{op.name}-{f.name}")]
    for fault, op in chosen[:: given.every]:
        with tempfile.TemporaryDirectory() as folder:
            answers.append(ask(fault, op, Path(folder)))
        if given.out:
            with given.out.open("a") as out:
                out.write(json.dumps(asdict(answers[-1]), ensure_ascii=False) + "\n")
    print(table(answers))
    for answer in answers:
        if answer.kind in ("missed", "wrong"):
            print(f"{answer.kind}: {answer.backend} {answer.case}: {answer.fault}")


if __name__ == "__main__":
    main()
