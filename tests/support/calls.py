"""Cases of any size as calls without data: what planners and compilers are given of them."""

from typing import Any

from parity.backends import load_kernel
from parity.compilers.launches import Launched, launches
from parity.compilers.mosaic import Abstract, Compilation
from parity.op import Case, Given, Groups, Offsets, Op
from tests.matrix.gla import GATED_LINEAR_ATTENTION


def point(op: Op, dtype: str | tuple[str, str], **settings: Any) -> Case:
    """The case of these sizes (capital letters) and options, each with one value."""
    sizes = {name: value for name, value in settings.items() if name.isupper()}
    options = {name: [value] for name, value in settings.items() if name not in sizes}
    (case,) = op.grid([sizes], dtype=[dtype], **options)
    return case


def scan(form: str, direction: str, gates: str, dtype: str, **settings: Any) -> tuple[Op, Case]:
    """A pass of simple_gla with these gates, or of gla ("gk")."""
    family, chosen = ("gla", {}) if gates == "gk" else ("simple_gla", {"gates": gates})
    op = next(op for op in GATED_LINEAR_ATTENTION if op.name == f"{form}_{family}_{direction}")
    return op, point(op, dtype, **settings, **chosen)


def abstract(op: Op, case: Case) -> dict[str, Any]:
    """The arguments of a case by name, tensors by shape and dtype alone."""
    tensors: dict[str, Any] = {}
    for name, spec in op.inputs(case).items():
        if isinstance(spec, Groups | Offsets):
            tensors[name] = Abstract((spec.count + isinstance(spec, Offsets),), "int32")
        elif isinstance(spec, Given):
            tensors[name] = Abstract(spec.array.shape, spec.array.dtype.name)
        else:
            tensors[name] = spec and Abstract(spec.shape, spec.dtype)
    return {**tensors, **op.arguments(case), **op.route(case)}


def launched(op: Op, case: Case, target: str) -> list[Launched]:
    """What a case launches on a GPU."""
    return launches(load_kernel(op.gpu), target=target, **abstract(op, case))


def deployed(op: Op, case: Case) -> dict[str, Any]:
    """The arguments of a case as models have them on a TPU: a shard's offset is traced, and nothing is interpreted."""
    arguments = abstract(op, case)
    offset = {"group_offset": Abstract((), "int32")} if "group_offset" in arguments else {}
    return arguments | offset | {"interpret": False}


def compilation(op: Op, case: Case, chip: str) -> Compilation:
    """What the TPU compiler is given of a case."""
    return Compilation(op.tpu, chip, (), deployed(op, case))


def traced(op: Op, case: Case) -> Any:
    """The jaxpr of the TPU's kernel on a case."""
    import jax

    arguments = abstract(op, case)
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arguments.items() if isinstance(x, Abstract)}
    options = {name: x for name, x in arguments.items() if name not in arrays}
    return jax.make_jaxpr(lambda arrays: load_kernel(op.tpu)(**arrays, **options))(arrays)
