"""What an op may not declare: each error names the op, the case, the field, and what there is."""

from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest

import parity
from parity import matrix
from parity.declared import DeclarationError
from parity.op import Array, Contract, Gates, Given, Groups, Offsets, Op, OutputsError, Scales, outputs
from parity.trial import Trial

SIZES = dict(M=4, N=6)


def halved(x, stages=lambda site, value: value):
    return stages("quotient", stages("doubled", x.astype(np.float64) * 2) / 4)


HALVED = Op(
    "halved",
    golden=halved,
    tpu="kernels:halved",
    gpu="kernels:halved",
    inputs=lambda case: {"x": Array((case.M, case.N), case.dtype)},
    contract=lambda case, backend: Contract(out=case.out, sites={"quotient": "float32"}),
)


def declared(data="normal", **changes):
    """All that a judgement asks of an op before its kernel runs."""
    op = replace(HALVED, **changes)
    (case,) = op.grid([SIZES], dtype=["float32"], data=[data])
    trial = Trial(op, case, "gpu")
    for name in trial.reference.golden:
        trial.axes(name)
    return list(islice(trial.runs(), 1))


def contract(**fields):
    return dict(contract=lambda case, backend: Contract(out=case.out, **{"sites": {"quotient": "float32"}} | fields))


def of_x(spec):
    return dict(inputs=lambda case: {"x": spec})


def golden(result):
    return dict(golden=lambda x, stages=lambda site, value: value: result(halved(x, stages)))


def magnitude(value, chain=3):
    return dict(magnitude=lambda op, case, inputs: value, chain=lambda case, inputs: chain)


SQUARE = np.ones((4, 6))
REFUSED = {
    "golden of float32": (golden(np.float32), "golden must return float64 arrays, got a float32 array as out"),
    "golden of complex": (golden(np.complex128), "golden must return float64 arrays, got a complex128 array as out"),
    "golden's tuple": (golden(lambda y: (y, y)), "golden must return an array, or a NamedTuple .* a tuple of 2"),
    "golden's None": (golden(lambda y: None), "golden must return an array, .*got None"),
    "no golden": (dict(golden=None), "golden must be a function, got None"),
    "no stages": (dict(golden=lambda x: x.astype(float)), "golden must take stages"),
    "float32 at a site": (
        dict(golden=lambda x, stages=lambda site, value: value: stages("quotient", x / np.float32(2)).astype(float)),
        "golden must hand float64 to its sites, got float32 at 'quotient'",
    ),
    "number at a site": (
        dict(golden=lambda x, stages=lambda site, value: value: x.astype(float) + stages("quotient", 0)),
        "golden must hand float64 to its sites, got int at 'quotient'",
    ),
    "out": (contract(outs={"ot": "float32"}), "contract.outs must be one of out, got 'ot' .nearest: out"),
    "function": (
        contract(functions={"quotient": ("reciprocl",)}),
        r"contract.functions\['quotient'\] must be one of .*'reciprocl' .nearest: reciprocal",
    ),
    "functions": (contract(functions={"quotient": "exp"}), "contract.functions.* must be a tuple of names, got 'exp'"),
    "property": (
        contract(unless={"exp": Contract()}), r"contract.unless must be one of .*fp8 sums keep float32's digits.*'exp'"
    ),
    "function's site": (contract(functions={"quot": ("exp",)}), "functions' sites must be one of .*nearest: quotient"),
    "dot": (contract(dot="ieeee"), "contract of the tpu: dot must be one of .*'ieeee' .nearest: ieee"),
    "field": (contract(site={}), "contract of the tpu: .*unexpected keyword argument 'site'"),
    "site": (contract(sites={"quotent": "float32"}), "contract.sites must be one of .*'quotent' .nearest: quotient"),
    "step": (contract(schedule={"dpth": 2}), "contract.schedule must be one of .*'dpth' .nearest: depth"),
    "contract": (dict(contract=lambda case, backend: {}), "contract must return a parity.Contract, got dict"),
    "no inputs": (dict(inputs=lambda case: [None]), "inputs must return a dict by name, got list"),
    "input": (dict(inputs=lambda case: {"y": None}), "inputs must be one of x, got 'y'"),
    "missing input": (dict(inputs=lambda case: {}), "inputs must have x, which the golden takes"),
    "argument": (dict(arguments=lambda case: {"axis": 1}), "arguments must be one of x, got 'axis'"),
    "array as it is": (of_x(SQUARE), r"inputs\['x'\] must be a parity.Array, .* got ndarray"),
    "dtype": (of_x(Array((4, 6), "flt32")), r"inputs\['x'\].dtype must be one of .*'flt32' .nearest: float32"),
    "shape": (of_x(Array([4, 6], "float32")), r"inputs\['x'\] must have a tuple of sizes as its shape, got \[4, 6\]"),
    "axis": (of_x(Array((4, 6), "float32", sum_over=2)), r"inputs\['x'\].sum_over must be one of 2 axes, got 2"),
    "groups": (of_x(Groups(2, 4, "zip")), r"inputs\['x'\].pattern must be one of .*'zip' .nearest: zipf"),
    "offsets": (of_x(Offsets(2, 4, "raged")), r"inputs\['x'\].pattern must be one of .*'raged' .nearest: ragged"),
    "gates": (of_x(Gates((4,), "sigmod")), r"inputs\['x'\].pattern must be one of .*'sigmod' .nearest: sigmoid"),
    "scales": (of_x(Scales((4,), "step")), r"inputs\['x'\].pattern must be one of .*'step' .nearest: steps"),
    "data": (dict(data="cancelling"), "data must be one of normal, .*'cancelling' .nearest: cancellation"),
    "outliers": (dict(data="outliers"), r"data 'outliers' must be along an axis: .*sum_over=…\) of one of x"),
    "cancellation": (dict(data="cancellation"), r"data 'cancellation' must be along an axis: .* of one of x"),
    "poison": (dict(data="poison"), "unread must say what is not read"),
    "nonfinite": (dict(data="nonfinite"), "unread must say what is not read"),
    "unread": (
        dict(data="poison", unread=lambda case, inputs: {"z": SQUARE > 0}),
        "unread must be one of x, got 'z'",
    ),
    "unread mask": (
        dict(data="poison", unread=lambda case, inputs: {"x": SQUARE}),
        r"unread\['x'\] must be a bool mask \[4, 6\], got float64 \[4, 6\]",
    ),
    "magnitude's name": (magnitude({"lse": SQUARE}), "magnitude must be .* one of out, got 'lse'"),
    "magnitude's lack": (magnitude({}), "magnitude must have each output, lacks out"),
    "magnitude's shape": (magnitude(np.ones(3)), r"magnitude of out must have its shape \[4, 6\], got \[3\]"),
    "magnitude's sign": (magnitude(-SQUARE), "magnitude of out must be at least 0, got -1"),
    "magnitude alone": (dict(magnitude=lambda op, case, inputs: SQUARE), "chain must be given where magnitude is"),
    "chain": (magnitude(SQUARE, SQUARE), "chain must return how many additions there are"),
    "axes": (dict(axes=lambda case, inputs: {"ot": {}}), "axes must be one of out, got 'ot' .nearest: out"),
    "labels": (
        dict(axes=lambda case, inputs: {"out": {"row": np.arange(5)[:, None]}}),
        r"axes\['out'\]\['row'\] must broadcast to \[4, 6\], got \[5, 1\]",
    ),
}  # fmt: skip


def test_what_is_declared_as_it_should_be_is_taken():
    (run,) = declared()
    assert set(run) == {"out"}
    assert declared(**golden(lambda y: {"out": y}))
    assert declared(data="of its own", **of_x(Given(np.ones((4, 6), np.float32))))
    assert declared(data="poison", unread=lambda case, inputs: {"x": SQUARE > 2})
    for data in ("outliers", "cancellation"):
        assert declared(data=data, **of_x(Array((4, 6), "float32", sum_over=1)))


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_declaration_is_refused_by_name(what):
    changes, says = REFUSED[what]
    data = changes.get("data", "normal")
    spelled = "" if data == "normal" else f"-{data}"
    with pytest.raises(DeclarationError, match=f"^op halved, case halved-M4_N6-f32{spelled}-s0: .*{says}"):
        declared(**changes)


@pytest.mark.parametrize("what", ["data", "groups", "offsets", "gates", "scales", "dtype", "function", "dot"])
def test_names_that_there_are_not_are_refused_before_anything_is_drawn(what):
    changes = dict(REFUSED[what][0])
    op = replace(HALVED, **{name: value for name, value in changes.items() if name != "data"})
    with pytest.raises(DeclarationError, match=f"^op halved, case .*{REFUSED[what][1]}"):
        matrix.check(op.with_cases(op.grid([SIZES], dtype=["float32"], data=[changes.get("data", "normal")])))


def test_an_op_without_cases_or_with_a_golden_that_has_no_code_is_refused_by_name():
    with pytest.raises(ValueError, match="op halved must have cases"):
        matrix.check(HALVED)
    bound = HALVED.with_cases(HALVED.grid([SIZES], dtype=["float32"]))
    with pytest.raises(ValueError, match=r"op halved: golden must be a function, def or lambda, got functools.partial"):
        matrix.check(replace(bound, golden=partial(halved)))


def test_the_backend_of_a_test_is_refused_by_name():
    with pytest.raises(ValueError, match=r"backend of parity.cases must be one of tpu, gpu, got 'tup' .nearest: tpu"):
        parity.cases(HALVED, backend="tup")


def test_what_this_case_does_not_reach_may_be_in_the_contract():
    sites = ("quotient", "never here", "level7", "top_mass", "log2 sum")
    rarely = dict(sites=dict.fromkeys(sites, "float32"), outs={"lse": "float32", "top": "float32"})
    assert declared(golden=branching, **contract(**rarely))
    with pytest.raises(DeclarationError, match=r"contract.sites must be one of .*'lvl7'"):
        declared(golden=branching, **contract(sites={"lvl7": "float32"}))


def test_sites_and_outputs_named_by_nothing_but_what_is_filled_in_are_those_of_the_cases():
    def asked(**fields):
        op = replace(HALVED, golden=filling, **contract(**fields))
        op = op.with_cases(op.grid([SIZES, dict(M=2, N=3)], dtype=["float32"]))
        return list(islice(Trial(op, op.cases[0], "gpu").runs(), 1))

    assert asked(sites=dict.fromkeys(("quotient", "x4", "x2"), "float32"), outs={"y2": "float32"})
    with pytest.raises(DeclarationError, match=r"contract.sites must be one of .*'x3'"):
        asked(sites={"x3": "float32"})
    with pytest.raises(DeclarationError, match=r"contract.outs must be one of out, y4, got 'y3'"):
        asked(outs={"y3": "float32"})


def filling(x, stages=lambda site, value: value):
    return {"out": stages(f"{'x'}{len(x)}", halved(x, stages)), f"{'y'}{len(x)}": 0.0 + x.astype(np.float64)}


def branching(x, stages=lambda site, value: value):
    if x.shape[0] < 99:
        return halved(x, stages)
    part, number = str(x.shape[0]), x.shape[1]
    steps = [
        stages("never here", x),
        stages(f"level{number}", x),
        stages(part + "_mass", x),
        stages(f"log{number} sum", x),
    ]
    return {"out": steps[0], "lse": steps[1]} if number else dict(out=steps[0], top=steps[2])


def test_a_size_or_option_that_a_case_lacks_is_refused_by_name():
    (case,) = HALVED.grid([dict(Rows=4, N=6)], dtype=["float32"])
    with pytest.raises(AttributeError, match=r"a size or option must be one of Rows, N, got 'Row' \(nearest: Rows\)"):
        _ = case.Row
    with pytest.raises(ValueError, match=r"^op halved, case .*: a size or option must be one of Rows, N, got 'M'"):
        matrix.check(HALVED.with_cases([case]))
    with pytest.raises(ValueError, match=r"op halved: options must be among its defaults \(none\), got tile"):
        HALVED.grid([SIZES], dtype=["float32"], tile=[1])


def test_a_size_that_is_no_whole_number_is_refused_by_name():
    """An id's sizes are whole numbers, and `parity shrink` halves them."""
    with pytest.raises(ValueError, match=r"op halved: size eps must be a whole number, got 0.1; .*\{'eps': 0.1\}"):
        HALVED.grid([SIZES | {"eps": 0.1}], dtype=["float32"])


def test_outputs_are_told_apart_by_name():
    assert outputs({"a": 1, "b": None}) == {"a": 1}
    for unnamed, got in (((1, 2), "a tuple of 2"), ([1], "a list of 1"), (None, "None")):
        with pytest.raises(OutputsError, match=f"by name, got {got}"):
            outputs(unnamed)
