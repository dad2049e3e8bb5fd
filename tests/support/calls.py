"""Cases of any size as calls without data: what planners and compilers are given of them."""

from typing import Any

from parity.backends import load_kernel
from parity.compilers.launches import Launched, launches
from parity.compilers.mosaic import Abstract
from parity.op import Case, Given, Groups, Offsets, Op


def point(op: Op, dtype: str | tuple[str, str], **settings: Any) -> Case:
    """The case of these sizes (capital letters) and options, each with one value."""
    sizes = {name: value for name, value in settings.items() if name.isupper()}
    options = {name: [value] for name, value in settings.items() if name not in sizes}
    (case,) = op.grid([sizes], dtype=[dtype], **options)
    return case


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
