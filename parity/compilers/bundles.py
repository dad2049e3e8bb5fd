"""The machine code of a TPU kernel, read from the compiler's dump, and what it says about speed.

The dump has a kernel as *bundles*, one VLIW instruction word each (`final_bundles`), and how many slots of each
functional unit every bundle uses (`final_hlo-static-per-bundle-utilization`). Branches name the region they jump to,
and the bundle in which a region starts says so. That gives each loop and each conditional part (`pl.when`, `lax.cond`)
as an interval of bundles.

**A step** is one iteration of the loop over the grid (which Mosaic pipelines: it fetches for the next step and writes
back for the one before). Without a grid it is the outermost loop around the hot code whose length only the data say,
or else the whole program.

**A whole middle step** is one that works on a full tile, at no end of the grid and no boundary of a group. Of the step
it runs

1. all unconditional bundles. The check of a condition is unconditional, and so are the delay slots of its branch;
2. of the conditional parts that do the kernel's work the one that does most of it, and of those that do the same the
   shortest, with its part of 5: a whole tile against a masked one. Work is `vmatmul`, in a kernel without any it is
   vector stores. What encloses this *hot* part runs too; the outermost is the compute stage of the pipeline, whose
   condition fails only in the first and the last steps;
3. in the other stages of the pipeline everything: they copy operands that XLA put into VMEM;
4. conditional parts that neither do work nor store vectors: they start copies or wait for them;
5. of the conditional parts that store vectors and do no work, one before the hot code (initial values) and one after
   it (results), the shortest of each (a whole tile against a masked one), *every few steps*: they are divided by the
   number of steps that share an output block;
6. a loop inside it as often as it runs, or once, and counted in `unknown_loops`, if only the data say how often.

Inside a stage a conditional part that does work, and that by the kernel's source not all steps run (a first walk over
the blocks, say, that makes no results), is none of these: it counts for the share of the steps that do. One that the
source calls rare counts for none, whatever it does, and what runs where that does not, in each. Its lines say which
branch of the source it is. Of the branches of the same steps, where the data decide, the one that does most counts.

Its **static cycles** are these bundles, or, where that is more, the cycles for which its `vmatmul`s occupy the matrix
units. On tpu7x they queue, so that bundles can be fewer than that; the chips before it space them in the schedule.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from parity.compilers.chips import Chip
from parity.compilers.kernels import Branch

UNITS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")
"""The columns of the utilization file; fills and spills are among the loads and the stores."""

_BUNDLE = re.compile(r"^ *(?:0x)?([0-9a-f]+) +(?:[A-Z]{2})? *: [> ]*\{", re.MULTILINE)
_COMMENT = re.compile(r" ?/\*.*?\*/", re.DOTALL)
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_END = re.compile(r"End region (\d+)")
_BRANCH = re.compile(r"= sbr\.rel (?:\((!?%\w+)\) )?target = \$region(\d+)")
_ANY_BRANCH = re.compile(r"= s(?:br|call|jmp)\b")
_VMATMUL = re.compile(r"= vmatmul\.([\w.]+)")
_PLACE = re.compile(r'loc\("([^"]+)":(\d+)')
_OPERANDS = {"f32": "f32", "bf16": "bf16", "f8": "fp8", "s8": "int8", "u8": "int8"}
_STAGE = re.compile(r"= sphi [^;]*iteration index, stage")  # loop-carried: a loop inside may load it from a spill
ALIKE = 0.3
"""What a branch of the source and its code have in common at least, see `_alike`."""
OURS = 4
"""Bundles to an instruction with a line of the source, at most, in a part that is the source's: the compiler's own
parts have a few such instructions too."""
_DELAY_SLOTS = 6  # after a branch, at most


class UnknownDump(ValueError):
    """A dump of the compiler is not in the format that this module reads."""


@dataclass(frozen=True)
class Bundle:
    """One VLIW instruction word: its text and the slots it uses of each of `UNITS`."""

    text: str
    used: tuple[int, ...]

    @cached_property
    def code(self) -> str:
        """The text without comments."""
        return _COMMENT.sub("", self.text)

    @cached_property
    def vmatmuls(self) -> Counter[str]:
        """Its `vmatmul` instructions by operand type. (Preparing them takes MATMUL slots too.)"""
        return Counter(map(_operand, _VMATMUL.findall(self.code)))

    @cached_property
    def instructions(self) -> tuple[tuple[str, Counter[str]], ...]:
        """Of each instruction the place in the source ("" for the compiler's own), and its `vmatmul`s."""
        texts = [text for text in self.text.split(";;") if "=" in _COMMENT.sub("", text)]
        places = [_PLACE.search(text) for text in texts]
        return tuple(
            (
                f"{place[1]}:{place[2]}" if place else "",
                Counter(map(_operand, _VMATMUL.findall(_COMMENT.sub("", text)))),
            )
            for text, place in zip(texts, places, strict=True)
        )

    @property
    def stores(self) -> int:
        """Vector stores, spilled registers not among them."""
        return self.used[UNITS.index("VSTORE")] - self.used[UNITS.index("VSTORE:SPILL")]


@dataclass
class Part:
    """Bundles [start, end) that run or do not run together, and the parts inside.

    trips: how often a loop runs, None where only the data say. pipelined: it is the loop over the grid.
    """

    start: int
    end: int
    loop: bool = False
    trips: int | None = 1
    pipelined: bool = False
    inner: list["Part"] = field(default_factory=list)

    @property
    def has_pipeline(self) -> bool:
        """Whether it is, or holds, the loop over the grid; a grid of one step has none."""
        return self.pipelined or any(part.has_pipeline for part in self.inner)

    @property
    def all(self) -> range:
        """Its bundles."""
        return range(self.start, self.end)

    @property
    def own(self) -> list[int]:
        """The bundles that are in no part inside."""
        inside = {i for part in self.inner for i in range(part.start, part.end)}
        return [i for i in range(self.start, self.end) if i not in inside]


@dataclass(frozen=True)
class Program:
    """A kernel's machine code: bundles, slots that a bundle has of each of `UNITS`, and the whole as a part."""

    bundles: tuple[Bundle, ...]
    capacity: tuple[int, ...]
    whole: Part


@dataclass(frozen=True)
class SourceLine:
    """What one line of the source takes of a whole middle step.

    place: "path:line", empty for what is the compiler's own (the pipeline's copies, loop counters, empty bundles).
    bundles: a bundle's instructions share it evenly, so that all lines together have those of the step.
    """

    place: str
    bundles: float
    instructions: float


@dataclass(frozen=True)
class Schedule:
    """What a kernel's machine code says about its speed (see the module). A bundle issues in one cycle of a core.

    bundles: the whole program; step_bundles: a whole middle step, without the parts that run only every few steps;
    periodic_bundles: those, spread over the steps; mxu_cycles: for how long its `vmatmul`s occupy the matrix units;
    vmatmuls: how many it has, by operand type; slots: used and there, by unit. loop_bundles: the code of the loop over
    the grid, all branches. hot_bundles, hot_vmatmuls: the straight-line region of the step with the most work.
    spills, fills: vector registers saved to VMEM and loaded back, in the whole program, and spill_share of its vector
    stores. unknown_loops: loops of the step that were counted once. lines: of the source, those that take most first; a
    dump without places has none.
    """

    bundles: int
    loop_bundles: int
    step_bundles: float
    periodic_bundles: float
    mxu_cycles: float
    vmatmuls: Mapping[str, float]
    slots: Mapping[str, tuple[float, float]]
    hot_bundles: int
    hot_vmatmuls: int
    spills: int
    fills: int
    spill_share: float
    unknown_loops: int
    lines: tuple[SourceLine, ...]

    @property
    def static_cycles(self) -> float:
        """Cycles of a whole middle step."""
        return max(self.step_bundles + self.periodic_bundles, self.mxu_cycles)


def parse(bundles: str, utilization: str) -> Program:
    """The program in the texts of a kernel's two dump files.

    Raises UnknownDump where they are not in the known format, or not of the same program.
    """
    heads = list(_BUNDLE.finditer(bundles))
    if not heads or [int(head[1], 16) for head in heads] != list(range(len(heads))):
        raise UnknownDump("bundles must be numbered from 0 on without a gap")
    ends = [head.start() for head in heads[1:]] + [len(bundles)]
    texts = [bundles[head.end() : end] for head, end in zip(heads, ends, strict=True)]
    if "/* exit bundle:" not in texts[-1]:
        raise UnknownDump("the last bundle must be the exit bundle")
    capacity, *used = _utilization(utilization)
    if len(used) != len(texts):
        raise UnknownDump(f"utilization must have one row for each of the {len(texts)} bundles, got {len(used)}")
    parsed = tuple(Bundle(text, row) for text, row in zip(texts, used, strict=True))
    return Program(parsed, capacity, Part(0, len(parsed), inner=_parts(parsed)))


def _utilization(text: str) -> list[tuple[int, ...]]:
    """The rows of the file: capacities first, then each bundle's use."""
    lines = text.splitlines()
    if len(lines) < 4 or tuple(re.split(r",\s*", lines[1].strip())) != UNITS or "UTILIZATION" not in lines[3]:
        raise UnknownDump(
            f"utilization must begin with the columns {', '.join(UNITS)}, got {' '.join(lines[:2])[:200]}"
        )
    rows = [line.split() for line in [lines[2], *lines[4:]] if line.strip()]
    if not all(len(row) == len(UNITS) and "".join(row).isdigit() for row in rows):
        raise UnknownDump(f"utilization must have {len(UNITS)} numbers in every row")
    return [tuple(map(int, row)) for row in rows]


def _operand(suffixes: str) -> str:
    """The left operand's type of a vmatmul, the first one among its suffixes: mubr.msk.f8e4m3b11.bf16.gmra is fp8."""
    for suffix in suffixes.split("."):
        for prefix, operand in _OPERANDS.items():
            if suffix.startswith(prefix):
                return operand
    raise UnknownDump(f"vmatmul must have an operand type of {', '.join(_OPERANDS)}, got {suffixes}")


def _parts(bundles: Sequence[Bundle]) -> list[Part]:
    """The outermost parts."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for address, bundle in enumerate(bundles):
        starts |= {int(region): address for region in _START.findall(bundle.text)}
        ends |= {int(region): address + 1 for region in _END.findall(bundle.text)}
    code = "\n".join(bundle.code for bundle in bundles)
    parts = []
    for address, bundle in enumerate(bundles):
        branches = _BRANCH.findall(bundle.code)
        if len(branches) != len(_ANY_BRANCH.findall(bundle.code)):
            raise UnknownDump(f"bundle {address:#x} has an unknown kind of branch")
        for condition, target in branches:
            region = int(target)
            # A check, its branch, what is skipped and what follows are numbered in this order. What follows the last
            # region of the program is not marked.
            to = starts.get(region, ends.get(region - 1, -1))
            if to < 0:
                raise UnknownDump(f"bundle {address:#x} branches to region {region}, which starts nowhere")
            if to > address:
                delayed = ends.get(region - 2, 0)
                parts.append(Part(delayed if address < delayed < to else address + 1, to))
            else:
                # The delay slots end with the branch's region, together with others.
                after = max(end for end in [address + 1, *ends.values()] if end <= address + 1 + _DELAY_SLOTS)
                pipelined = _STAGE.search(bundles[to].text) is not None
                parts.append(Part(to, after, loop=True, trips=_trips(code, condition), pipelined=pipelined))
    return nested(parts)


def nested(parts: list[Part]) -> list[Part]:
    """The outermost parts, with the others inside. Raises UnknownDump for parts that overlap.

    A loop may end with the delay slots of its branch, beyond the conditional part that is nothing but the loop.
    """
    outermost: list[Part] = []
    for part in sorted(parts, key=lambda p: (p.start, -p.end if p.loop else -p.end - _DELAY_SLOTS, p.loop)):
        siblings = outermost
        while siblings and siblings[-1].end > part.start:
            enclosing = siblings[-1]
            if part.end > enclosing.end + _DELAY_SLOTS:
                if enclosing.end <= part.start + _DELAY_SLOTS:  # it follows; the branch before has slots in it
                    part.start = enclosing.end
                    break
                raise UnknownDump(f"bundles {part.start:#x} to {part.end:#x} are not inside {enclosing.end:#x}")
            part.end = min(part.end, enclosing.end)
            siblings = enclosing.inner
        siblings.append(part)
    return outermost


def _trips(code: str, condition: str) -> int | None:
    """How often a loop runs that is left when `condition` (`!%p`) fails: its counter's start, step and bound."""
    name, predicate = r"%\w+", r"(?:\(!?%\w+\), )?"

    def find(pattern: str) -> re.Match[str] | None:
        return re.search(pattern.replace("PRED", predicate).replace("NAME", name), code)

    test = find(rf"{condition.lstrip('!')} = scmp\.ge\.s32\.totalorder PRED(NAME), (\d+)\b")
    step = test and find(rf"{test[1]} = sadd\.s32 PRED(\d+), (NAME)")
    phi = test and step and find(rf"{step[2]} = sphi (NAME), {test[1]}\b")
    start = phi and find(rf"{phi[1]} = smov\.u32 PRED(\d+)\b")
    if not (test and step and start and condition.startswith("!")):
        return None
    return max(1, -(-(int(test[2]) - int(start[1])) // int(step[1])))


@dataclass
class _Path:
    """How often each bundle runs in a step, on average: those that run in each, and those that run every few steps."""

    runs: dict[int, float] = field(default_factory=dict)
    periodic: dict[int, float] = field(default_factory=dict)
    unknown_loops: int = 0

    @classmethod
    def of(cls, bundles: Sequence[int]) -> "_Path":
        """Each of the bundles once."""
        return cls(dict.fromkeys(bundles, 1.0))

    @property
    def total(self) -> float:
        """Bundles that run in each step."""
        return sum(self.runs.values())

    def every_few_steps(self) -> "_Path":
        """What runs in each step of the path, every few steps in place of that."""
        return _Path(periodic=self.runs)

    def add(self, other: "_Path", times: float = 1) -> None:
        for mine, others in (self.runs, other.runs), (self.periodic, other.periodic):
            for address, runs in others.items():
                mine[address] = mine.get(address, 0.0) + runs * times
        self.unknown_loops += other.unknown_loops


def schedule(program: Program, chip: Chip, steps_per_block: float = 1.0, branches: Sequence[Branch] = ()) -> Schedule:
    """What the program says about the kernel's speed on the chip.

    steps_per_block: steps that share an output block; branches: what the source says about conditional parts.
    """
    reader = _Reader(program, branches, steps_per_block)
    bundles = program.bundles
    step = reader.step()
    path = reader.path(step)
    always = dict(path.runs)
    periodic = {i: times / steps_per_block for i, times in path.periodic.items()}
    runs = {i: always.get(i, 0.0) + periodic.get(i, 0.0) for i in always | periodic}
    vmatmuls: dict[str, float] = {}
    for i, times in runs.items():
        for operand, count in bundles[i].vmatmuls.items():
            vmatmuls[operand] = vmatmuls.get(operand, 0.0) + times * count
    hot = reader.hot_region(step, path)
    spills, fills, stores = (
        sum(bundle.used[UNITS.index(unit)] for bundle in bundles) for unit in ("VSTORE:SPILL", "VLOAD:FILL", "VSTORE")
    )
    return Schedule(
        bundles=len(bundles),
        loop_bundles=step.end - step.start,
        step_bundles=sum(always.values()),
        periodic_bundles=sum(periodic.values()),
        mxu_cycles=sum(count * chip.vmatmul_cycles(operand) for operand, count in vmatmuls.items()) / chip.mxus,
        vmatmuls=vmatmuls,
        slots={
            unit: (
                sum(times * bundles[i].used[n] for i, times in runs.items()),
                program.capacity[n] * sum(runs.values()),
            )
            for n, unit in enumerate(UNITS)
        },
        hot_bundles=len(hot),
        hot_vmatmuls=sum(bundles[i].vmatmuls.total() for i in hot),
        spills=spills,
        fills=fills,
        spill_share=spills / stores if stores else 0.0,
        unknown_loops=path.unknown_loops,
        lines=_lines(program, runs),
    )


def _lines(program: Program, runs: Mapping[int, float]) -> tuple[SourceLine, ...]:
    bundles: dict[str, float] = {}
    instructions: dict[str, float] = {}
    for address, times in runs.items():
        places = [place for place, _ in program.bundles[address].instructions] or [""]
        for place in places:
            bundles[place] = bundles.get(place, 0.0) + times / len(places)
            instructions[place] = instructions.get(place, 0.0) + times
    if not any(bundles):
        return ()
    hottest = sorted(bundles, key=lambda place: (-bundles[place], place))
    return tuple(SourceLine(place, bundles[place], instructions[place]) for place in hottest)


def emitted(program: Program) -> Counter[tuple[str, str]]:
    """The `vmatmul`s of one step with every condition true, by place and operand type: what all dots became."""
    counts: Counter[tuple[str, str]] = Counter()
    for address, runs in _Reader(program).everything(program.whole).runs.items():
        for place, vmatmuls in program.bundles[address].instructions:
            for operand, count in vmatmuls.items():
                counts[place, operand] += round(runs) * count
    return counts


def _alike(lines: Counter[str], places: frozenset[str]) -> float:
    """The part of the instructions that lie on a branch's lines, times that of its lines that have instructions."""
    if not lines or not places:
        return 0.0
    common = places & lines.keys()
    return sum(lines[place] for place in common) / lines.total() * len(common) / len(places)


class _Reader:
    """Which bundles a whole middle step runs; the numbers are those of the module's list."""

    def __init__(self, program: Program, branches: Sequence[Branch] = (), steps_per_block: float = 1.0) -> None:
        self.program = program
        self.steps_per_block = steps_per_block
        self.multiplies = any(bundle.vmatmuls for bundle in program.bundles)
        self.known: dict[int, Branch] = {}
        if branches:
            self.recognize(program.whole, list(branches), in_stage=not program.whole.has_pipeline)

    def recognize(self, part: Part, left: list[Branch], in_stage: bool = False) -> None:
        """Fill `known` with the branch that each conditional part of a stage is, by the lines that both have.

        left: those that are not found yet and may be here: a part inside another is a branch inside that one's. Of
        branches of the same lines the first part is the first. Their order tells branches apart where JAX gave all one
        line, as it does to what it differentiates; and where a single one's line is not in the program. XLA compiles
        equal kernels once, with the lines of another call then.
        """
        conditional = [child for child in part.inner if in_stage and not child.loop]
        by_order = len(frozenset().union(*(branch.places for branch in left))) == 1 and (
            len(left) > 1 or not any(self.likeness(child, left[0]) > ALIKE for child in conditional)
        )
        if by_order:
            self._recognize_by_order(conditional, left)
        for child in part.inner:
            inside = list(self.known[id(child)].inner) if id(child) in self.known else left
            if child in conditional and not by_order:
                alike = [self.likeness(child, branch) for branch in left]
                if max(alike, default=0.0) > ALIKE:
                    branch = self.known[id(child)] = left.pop(alike.index(max(alike)))
                    inside = list(branch.inner)
            self.recognize(child, inside, in_stage or part.pipelined)

    def _recognize_by_order(self, conditional: Sequence[Part], left: Sequence[Branch]) -> None:
        """Fill `known` with the branches that parts are by their order; the shortest branches may have no part."""
        parts = [child for child in conditional if self.lines_of(child).total() * OURS > len(child.all)]
        branches = [branch for branch in left if branch.of or branch.share < 1]  # what always runs has no condition
        if len(parts) > len(branches):
            return
        by_length = sorted(range(len(branches)), key=lambda n: -branches[n].operations)
        self.known |= zip(map(id, parts), (branches[n] for n in sorted(by_length[: len(parts)])), strict=True)

    def likeness(self, part: Part, branch: Branch) -> float:
        """How much a part is a branch, by the lines that both have; 0 where only one of them multiplies."""
        multiplies = any(self.program.bundles[i].vmatmuls for i in part.all)
        return _alike(self.lines_of(part), branch.places) * (branch.multiplies == multiplies)

    def holds_known(self, part: Part) -> bool:
        """Whether a part inside is a known branch of the source."""
        return any(id(child) in self.known or self.holds_known(child) for child in part.inner)

    def lines_of(self, part: Part) -> Counter[str]:
        """How many instructions are on each line."""
        return Counter(place for i in part.all for place, _ in self.program.bundles[i].instructions if place)

    def step(self) -> Part:
        part = step = self.program.whole
        while part.inner and self.program.whole.has_pipeline:
            part = max(part.inner, key=lambda inner: self.work(self.path(inner)))
            if part.pipelined:
                return part
            if step is self.program.whole and part.trips is None:
                step = part
        return step

    def path(self, part: Part, share: float = 1.0) -> _Path:
        """What a whole middle step runs of a part, the body of an inner loop as often as it runs.

        share: of the steps, those that run the part.
        """
        own = _Path.of(part.own)
        always = [own] + [self.path(child, share) for child in part.inner if child.loop]
        known, conditional = self.conditional(part, share)
        # The copy of an operand that XLA put into VMEM may store more than the stage; only the stage has branches.
        hot = max(
            known + conditional,
            # Means over steps of the same work differ in their last bits.
            key=lambda c: (part.pipelined and self.holds_known(c[0]), round(self.work(c[1]), 6), -self.length(c[1])),
            default=None,
        )
        hottest = max(always, key=self.work)
        if hot and self.work(hot[1]) > self.work(hottest):
            hottest = hot[1]
        else:
            hot = None
        hot_at = min((i for i in hottest.runs if self.work_of(i)), default=0)

        path = _Path()
        for each in always + [each for _, each in known]:
            path.add(each)
        before: list[_Path] = []
        after: list[_Path] = []
        for child, each in conditional:
            if hot and child is hot[0]:
                path.add(each)  # 2
            elif hot and part.pipelined:
                path.add(self.everything(child))  # 3
            elif not self.work(each) and not any(self.program.bundles[i].stores for i in each.runs):
                path.add(each)  # 4
            elif not self.work(each) or not (self.multiplies or hot):
                (before if child.start < hot_at else after).append(each)  # 5
        for alternatives in before, after:
            if alternatives:
                path.add(min(alternatives, key=lambda each: each.total).every_few_steps())
        if not part.loop or part.pipelined:
            return path
        repeated = _Path()
        repeated.add(path, times=part.trips or 1)  # 6
        repeated.unknown_loops += part.trips is None
        return repeated

    def conditional(self, part: Part, share: float) -> tuple[list[tuple[Part, _Path]], list[tuple[Part, _Path]]]:
        """The conditional parts inside: those of known work, as means over the steps of part, and the others.

        Of branches of the same steps, between which the data decide, only the one that does most.
        """
        known: dict[str, tuple[Part, _Path]] = {}
        others = []
        for child in part.inner:
            if child.loop:
                continue
            branch = self.known.get(id(child))
            path = self.path(child, (branch.share if branch else share) or share)  # what is rare runs whole, if it does
            if branch is None or (branch.share and not branch.is_usual and (branch.share == 1 or not self.work(path))):
                others.append((child, path))
            elif branch.share:
                mean = _Path()
                mean.add(path, times=branch.share / share)
                rival = known.get(branch.of)
                if rival is None or self.work(mean) > self.work(rival[1]):
                    known[branch.of or str(child.start)] = child, mean
        return [*known.values()], others

    def everything(self, part: Part) -> _Path:
        """All bundles of a part: of an inner loop as often as it runs, of the loop over the grid one step."""
        path = _Path.of(part.own)
        for child in part.inner:
            path.add(self.everything(child), times=1 if child.pipelined else child.trips or 1)
        return path

    def length(self, path: _Path) -> float:
        """Bundles of a step, with its part of those that run every few steps."""
        return path.total + sum(path.periodic.values()) / self.steps_per_block

    def work(self, path: _Path) -> float:
        return sum(runs * self.work_of(address) for address, runs in path.runs.items())

    def work_of(self, address: int) -> int:
        bundle = self.program.bundles[address]
        return bundle.vmatmuls.total() if self.multiplies else bundle.stores

    def hot_region(self, step: Part, path: _Path) -> list[int]:
        borders, parts = set(), [step]
        while parts:
            part = parts.pop()
            borders |= {part.start, part.end}
            parts += part.inner
        regions: list[list[int]] = [[]]
        for address in sorted(path.runs):
            if regions[-1] and (address != regions[-1][-1] + 1 or address in borders):
                regions.append([])
            regions[-1].append(address)
        return max(regions, key=lambda region: (sum(map(self.work_of, region)), len(region)))
