"""What is compared: an operation, one case of it, and what its kernels promise. Data; nothing runs here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from parity.dtypes import SHORT_NAMES, SITES, UNIT_ROUNDOFF
from parity.words import one_of

Backend = Literal["tpu", "gpu"]
BACKENDS: tuple[Backend, ...] = ("tpu", "gpu")
Inputs = Mapping[str, np.ndarray | None]
"""One array per tensor argument; None where a case leaves an optional one out."""

TIERS = ("smoke", "default", "full")


@dataclass(frozen=True)
class Array:
    """A tensor argument: its shape, its dtype's name, and how it enters the sum.

    `sum_over` is the axis that the operation sums over (None: the argument is not summed). `pair_sign` is the sign
    that the second of two neighbours along it carries in cancelling data: +1 in one factor, -1 in the other.
    `quantised_inside`: the operation rounds it to fp8 itself. `swings`: an int8 factor whose products the operation
    sums exactly over the whole axis, however large the sum gets on its way. `one_in`: in integer data no more than
    about one in that many is other than zero, so that sums over several axes at once stay exact.
    """

    shape: tuple[int, ...]
    dtype: str
    sum_over: int | None = None
    pair_sign: int = 1
    quantised_inside: bool = False
    swings: bool = False
    one_in: int = 1


@dataclass(frozen=True)
class Scales:
    """A tensor of the positive scales of a quantised argument, by `pattern` (`parity.inputs.SCALES`)."""

    shape: tuple[int, ...]
    pattern: str
    dtype: str = "float32"


@dataclass(frozen=True)
class Groups:
    """An int32 vector of `count` group sizes that cut `rows` rows, drawn by `pattern` (`parity.inputs.GROUPS`)."""

    count: int
    rows: int
    pattern: str


@dataclass(frozen=True)
class Offsets:
    """An int32 vector [count + 1] of where each of `count` sequences begins in `rows` rows, and where the last ends.

    `pattern` is one of `parity.inputs.OFFSETS`; the sequences cover all rows.
    """

    count: int
    rows: int
    pattern: str


@dataclass(frozen=True)
class Gates:
    """A tensor of log decays per step: drawn by `pattern` (`parity.inputs.GATES`), or these values themselves.

    In integer data every decay is exactly 1 or 0, whatever the pattern.
    """

    shape: tuple[int, ...]
    pattern: str | tuple[float, ...]
    dtype: str = "float32"


@dataclass(frozen=True, eq=False)
class Given:
    """An argument that is not drawn but this array, whatever the data and the seed of the case."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return self.array.shape

    @property
    def dtype(self) -> str:
        """The name of the array's."""
        return self.array.dtype.name


Spec = Array | Scales | Groups | Offsets | Gates | Given | None
"""What an argument is drawn by; None where a case leaves an optional one out."""


@dataclass(frozen=True)
class Contract:
    """What a kernel promises: how its dots round their operands, what it accumulates in, what it returns.

    dot: `native` (exact products of 16-bit operands), `fp8`, `int8` (exact products, and of int8 exact sums wherever no
    scale changes), `fp8 in 14 digits` (sums of less than a float32: `judging.passes`), `ieee` (exact products of
    float32), `bf16x6`, `bf16x3`, `bf16x1` (float32 operands in that many bfloat16 passes), `bf16x2` (one float32
    operand in two pieces beside one of 16 bits), `bf16x3x3` (both in three, and all products but those below the first
    piece and the last), `tf32`, or `none` (an elementwise operation). Source of the roundoffs: `DOTS`.
    outs: the dtypes of the outputs that are not of dtype `out`, by name.
    depth, tile, sites and schedule say where the staged golden rounds as such a kernel does: what the judge holds it to
    (`judging.spread`), and how it is emulated (`judging.stages.emulate`). Without sites only a derived bound decides.
    functions: the functions of the hardware that a site's value comes out of, by the names of docs/assumptions.md: on a
    device the site is what is known of them there (`contact.assumptions.on_device`), and not the dtype in `sites`.
    unless: the contract in this one's place on a device of which a property does not hold, by the property's name.
    """

    dot: str = "none"
    out: str = "float32"
    accumulate: str = "float32"
    outs: Mapping[str, str] = field(default_factory=dict)
    depth: int = 1  # products that are summed before the accumulator is rounded
    tile: int | None = None  # products that are summed by themselves, before they are added to those before
    sites: Mapping[str, str] = field(default_factory=dict)  # of the staged golden, and the dtype they are rounded to
    schedule: Mapping[str, Any] = field(default_factory=dict)  # other fields of the golden's `Stages`
    functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unless: Mapping[str, Contract] = field(default_factory=dict)

    DOTS: ClassVar[Mapping[str, tuple[float, int]]] = {
        # dot: (relative error of a product, from rounding its operands; passes added into one sum)
        "none": (0.0, 1),
        "native": (0.0, 1),
        "fp8": (0.0, 1),
        # In steps of 32: products, the sum before them and that after them are each cut off at 2^-13 of the largest.
        "fp8 in 14 digits": (4 * 34 * 2.0**-13, 1),  # of 128 products, whose sum is then added to others in float32
        "int8": (0.0, 1),
        "ieee": (0.0, 1),
        # Pieces of 8 bits, cut off by truncation: what is left after one is up to 2^-7, after two 2^-14 of the whole.
        # x6 rounds both rests (2^-8 each) in their own product; x3 rounds them in two products and drops the third.
        "bf16x6": (2 * 2.0**-8 * 2.0**-14, 6),
        "bf16x3": (2 * 2.0**-8 * 2.0**-7 + 2.0**-14, 3),
        "bf16x2": (UNIT_ROUNDOFF["bfloat16"] ** 2, 2),  # both pieces rounded to nearest
        "bf16x3x3": (4 * UNIT_ROUNDOFF["bfloat16"] ** 3, 6),  # two products left out, and the ends of both operands
        "bf16x1": (2 * UNIT_ROUNDOFF["bfloat16"], 1),
        "tf32": (2 * 2.0**-10, 1),  # the instruction ignores the low 13 bits: truncation
    }  # fmt: skip

    def __post_init__(self) -> None:
        if self.dot not in self.DOTS:
            raise ValueError(f"dot {one_of(self.DOTS, self.dot)}")
        dtypes = {"accumulate": self.accumulate, "out": self.out, **{f"outs[{n!r}]": d for n, d in self.outs.items()}}
        for name, dtype in dtypes.items():
            if dtype not in UNIT_ROUNDOFF:
                raise ValueError(f"{name} {one_of(UNIT_ROUNDOFF, dtype)}")
        for site, dtype in self.sites.items():
            if dtype not in SITES:
                raise ValueError(f"sites[{site!r}] {one_of(sorted(SITES), dtype)}")
        for site in self.functions.keys() - self.sites.keys():
            raise ValueError(f"functions' sites {one_of(self.sites, site)}")

    @property
    def name(self) -> str:
        """How records call it: dot/accumulator/output."""
        return f"{self.dot}/{self.accumulate}/{self.out}"

    @property
    def roundoff(self) -> float:
        """u_c, the unit roundoff that errors are counted in: the accumulator's."""
        return UNIT_ROUNDOFF[self.accumulate]

    def dtype(self, output: str) -> str:
        """The dtype of the output of that name."""
        return self.outs.get(output, self.out)

    def is_narrow(self, output: str) -> bool:
        """Whether rounding the output of that name loses more than one operation of the accumulator."""
        return UNIT_ROUNDOFF[self.dtype(output)] > self.roundoff

    def bound(self, chain: int) -> float:
        """The a-priori bound on η for sums whose longest chain has `chain` additions.

        The smaller of the deterministic n + 2 and the probabilistic 8·√n (Higham & Mary 2019, SIAM J. Sci. Comput.
        41:A2815, with λ = 8), plus what the operands lose when they are rounded on the fly.
        """
        operands, passes = self.DOTS[self.dot]
        n = max(chain, 1) + passes - 1
        return float(min(n + 2, 8 * np.sqrt(n)) + operands / self.roundoff)


class CaseError(AttributeError):
    """A size or option that a case does not have."""


@dataclass(frozen=True)
class Case:
    """One point of an op's matrix. Its sizes and options read as attributes: `case.M`, `case.transpose_rhs`."""

    op: str
    dims: tuple[tuple[str, int], ...]
    dtype: str  # of the inputs
    out: str  # of the outputs
    options: tuple[tuple[str, Any], ...] = ()
    data: str = "normal"
    seed: int = 0
    tier: str = "default"
    model: str = ""  # of a line of `parity run`'s table: the published model whose shape this is
    hidden: tuple[str, ...] = field(default=(), repr=False)  # options at their default: not in the id

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy and pickle before any field is set
            raise AttributeError(name)
        for pairs in (self.dims, self.options):
            for key, value in pairs:
                if key == name:
                    return value
        there = [key for key, _ in (*self.dims, *self.options)]
        raise CaseError(f"case {self.id}: a size or option {one_of(there, name)}")

    @cached_property
    def id(self) -> str:
        """Readable, stable and unique in the matrix: `gmm-M512_K256_N384_G8-bf16-zipf-s3`."""
        sizes = "_".join(f"{name}{size}" for name, size in self.dims)
        options = [_spell(name, value) for name, value in self.options if name not in self.hidden]
        data = [] if self.data == "normal" else [self.data]
        dtypes = "_".join(SHORT_NAMES.get(name, name) for name in dict.fromkeys([self.dtype, self.out]))
        return "-".join([self.op, sizes, dtypes, *options, *data, f"s{self.seed}"])

    def with_data(self, data: str) -> Case:
        """The same case on other data."""
        return replace(self, data=data)

    def with_seed(self, seed: int) -> Case:
        """The same case on another draw of its data."""
        return replace(self, seed=seed)


@dataclass(frozen=True, eq=False)
class Expected:
    """A failure of the rule ε_TPU ≤ ε_GPU that is known and has a reason; strict, as pytest's `xfail(strict=True)`.

    The cases that `where` admits must end in `verdict` (one of `FAILURES`), and then count as passed; one that passes
    fails, and so does a matrix with a declaration that matches none of its cases. Where an `output` is named, that of
    another one stays a failure. ratio: ε_TPU / ε_GPU by contract, where that is known: a TIE whose interval reaches it
    is no pass, but seeds too few to tell. explained: of many cases, in which the contracts say how much: a LOSS is
    expected as far as they explain it, and what passes passes.
    Raises ValueError for a verdict that cannot be expected (a broken kernel, or a GPU that is no reference, never is),
    for a missing reason, and for one that is explained and no LOSS.
    """

    where: Callable[[Case], bool]
    verdict: str
    reason: str
    output: str = ""
    ratio: float = math.inf
    explained: bool = False

    FAILURES: ClassVar[tuple[str, ...]] = ("LOSS", "TAIL", "BIAS")

    def __post_init__(self) -> None:
        if self.verdict not in self.FAILURES:
            raise ValueError(f"verdict must be one of {', '.join(self.FAILURES)}, got {self.verdict!r}")
        if not self.reason:
            raise ValueError("reason must say why the failure is expected, got none")
        if self.explained and self.verdict != "LOSS":
            raise ValueError(f"verdict must be LOSS where the contracts explain it, got {self.verdict!r}")

    def admits(self, verdict: str, output: str, low: float, high: float, explained: float) -> bool:
        """Whether an output's verdict is the expected failure. low, high: the interval of its ratio; explained: what
        that is at most by contract.
        """
        failed = verdict == self.verdict or (verdict == "TIE" and high >= self.ratio)
        return failed and self.output in ("", output) and (low <= explained or not self.explained)


def _spell(name: str, value: Any) -> str:
    if value is True:
        return name
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return name + "x".join(map(str, value))
    return f"{name}{value}"


@dataclass(frozen=True, eq=False)
class Op:
    """An operation with its golden, its two kernels and its cases.

    golden: a NumPy function; tpu, gpu: `"module:function"`, imported only where they run. All three take the
    tensors of `inputs(case)` and the keywords of `arguments(case)` under the same names, and the kernels those of
    `route(case)` as well: which of their ways to the same result they are to take.
    defaults: the options of a case and what they are when a case does not say; one that is at its default is left
    out of the case id unless `spelled` names it.
    contract(case, backend): what is judged by, an output rounded at random at its sites;
    chain(case, inputs) and magnitude(op, case, inputs), where they have been derived: the longest chain of additions
    behind one output element, and Σ|terms| behind each element, shaped as the output;
    steps(case, contract): the fields of the golden's `Stages` that are the steps of a kernel under that contract;
    unread(case, inputs): masks of elements that the operation must not read, poisoned in `poison` data;
    axes(case, inputs): what an error is looked for along. Of an output, by name: labels (numbers or words) that
    broadcast to it and say what each element belongs to. Of an input those of what the operation sums over.
    """

    name: str
    golden: Callable[..., Any]
    tpu: str
    gpu: str
    inputs: Callable[[Case], Mapping[str, Spec]]
    contract: Callable[[Case, Backend], Contract]
    arguments: Callable[[Case], Mapping[str, Any]] = lambda case: {}
    chain: Callable[[Case, Inputs], int] | None = None
    magnitude: Callable[[Op, Case, Inputs], Any] | None = None
    unread: Callable[[Case, Inputs], Mapping[str, np.ndarray]] = lambda case, inputs: {}
    defaults: Mapping[str, Any] = field(default_factory=dict)
    steps: Callable[[Case, Contract], Mapping[str, Any]] = lambda case, contract: {
        "depth": contract.depth,
        **contract.schedule,
    }
    route: Callable[[Case], Mapping[str, Any]] = lambda case: {}
    spelled: tuple[str, ...] = ()
    axes: Callable[[Case, Inputs], Mapping[str, Mapping[str, np.ndarray]]] = lambda case, inputs: {}
    representative: Callable[[Case], bool] = lambda case: True  # cases whose ε are compared in the default tier too
    tau: float = 0.0  # how much larger ε_TPU may be than ε_GPU; anything but 0 needs a reason beside it
    twin: bool = True  # data `integers` come out exact; False where they cannot, as behind a square root
    at_once: bool = False  # the golden takes `Stages.runs`: several roundings of it are drawn together, which is faster
    bit_exact: bool = False  # the golden returns the outputs' own dtypes, and every bit must be its
    expected: tuple[Expected, ...] = ()  # known failures of the comparison; of several that match, the first counts
    indifferent: tuple[str, ...] = ("interpret",)  # arguments that change no result: a replayed call may have any
    cases: tuple[Case, ...] = ()

    def expectation(self, case: Case) -> Expected | None:
        """The known failure of a case in comparison with the GPU, if one is declared."""
        return next((expected for expected in self.expected if expected.where(case)), None)

    def with_inputs(self, inputs: Inputs) -> Op:
        """This op with these arrays in place of drawn ones, in every case: what is real, or reduced, is judged so."""
        given = {name: None if array is None else Given(array) for name, array in inputs.items()}
        return replace(self, inputs=lambda case: given)

    def grid(
        self,
        shapes: Iterable[Mapping[str, int]],
        *,
        dtype: Sequence[str | tuple[str, str]],
        data: Sequence[str] = ("normal",),
        tier: str = "default",
        model: str = "",
        **options: Sequence[Any],
    ) -> tuple[Case, ...]:
        """Every combination of shapes, dtypes, data and option values, as cases.

        A dtype is that of inputs and outputs, or a pair (inputs, outputs). Raises ValueError for a size that is no
        whole number and for an option that is none of the op's defaults.
        """
        if tier not in TIERS:
            raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {tier!r}")
        if unknown := set(options) - set(self.defaults):
            known = ", ".join(self.defaults) or "none"
            raise ValueError(
                f"op {self.name}: options must be among its defaults ({known}), got {', '.join(sorted(unknown))}"
            )
        shapes = tuple(shapes)
        for name, size in itertools.chain.from_iterable(shape.items() for shape in shapes):
            if not isinstance(size, int | np.integer):
                raise ValueError(
                    f"op {self.name}: size {name} must be a whole number, got {size!r}; anything else is an option:"
                    f" Op(…, defaults={{{name!r}: {size!r}}})"
                )
        axes = [options.get(name, (default,)) for name, default in self.defaults.items()]

        def build() -> Iterator[Case]:
            for shape, kind, drawn, values in itertools.product(shapes, dtype, data, itertools.product(*axes)):
                chosen = tuple(zip(self.defaults, values, strict=True))
                hidden = tuple(n for n, v in chosen if v == self.defaults[n] and n not in self.spelled)
                given, out = (kind, kind) if isinstance(kind, str) else kind
                yield Case(self.name, tuple(shape.items()), given, out, chosen, drawn, 0, tier, model, hidden)

        return tuple(build())

    def with_cases(self, *parts: Iterable[Case]) -> Op:
        """This op with the union of `parts` as its matrix; where two cases share an id the first one stays."""
        unique: dict[str, Case] = {}
        for case in itertools.chain(*parts):
            unique.setdefault(case.id, case)
        return replace(self, cases=tuple(unique.values()))


class OutputsError(TypeError):
    """A result whose outputs have no names."""


def outputs(result: Any) -> dict[str, Any]:
    """A kernel's or golden's result by name: what a NamedTuple or a dict holds that is not None, or the array as `out`.

    Raises OutputsError for anything else that holds arrays, and for None.
    """
    fields = result._asdict() if hasattr(result, "_asdict") else result
    if isinstance(fields, Mapping):
        return {str(name): value for name, value in fields.items() if value is not None}
    if result is None or isinstance(result, tuple | list):
        got = "None" if result is None else f"a {type(result).__name__} of {len(result)}"
        raise OutputsError(f"must return an array, or a NamedTuple or dict of arrays by name, got {got}")
    return {"out": result}
