"""A trial: one case of an op on one backend, and what follows from the three, worked out once and asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from parity import matrix
from parity.backends import EMULATED, device_kind, load_kernel, runner
from parity.contact.assumptions import on_device
from parity.declared import checked_axes, contract_of
from parity.dtypes import Floats
from parity.guard import guarded, loaded
from parity.judging.fit import K
from parity.judging.metrics import Scale, floor
from parity.judging.reference import Reference, reference
from parity.judging.spread import runs
from parity.judging.verdict import holds
from parity.op import Backend, Case, Contract, Inputs, Op, outputs


@dataclass(frozen=True, eq=False)
class Trial:
    """An op, a case of it and a backend.

    other: a kernel in the place of the op's own, for instance one with a planted fault. given: inputs in the place of
    those that the case draws. device: what the framework calls the device that ran it, "" for that of this process.
    """

    op: Op
    case: Case
    backend: Backend
    other: Callable[..., Any] | None = None
    given: Inputs | None = None
    device: str = ""

    @cached_property
    def kernel(self) -> Callable[..., Any]:
        """The kernel. Raises ImportError where the backend's framework is missing, Ended as `guard.loaded`."""
        return self.other or loaded(lambda: load_kernel(getattr(self.op, self.backend)))

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The kernel's keywords beside the tensors."""
        return {**self.op.arguments(self.case), **self.op.route(self.case)}

    @cached_property
    def contract(self) -> Contract:
        """What the kernel promises, on its device. Raises DeclarationError where it is none."""
        promised = contract_of(self.op, self.case, self.backend)
        kind = self.device or device_kind(self.backend)
        if kind == EMULATED:
            return promised
        return on_device(promised, self.backend, kind, matrix.home(self.op) / "records")

    @cached_property
    def reference(self) -> Reference:
        """The inputs, and the golden of each output with what its errors are counted in."""
        op = self.op if self.given is None else self.op.with_inputs(self.given)
        return reference(op, self.case)

    @property
    def inputs(self) -> Inputs:
        """The tensors by name, None for one that this case does not have."""
        return self.reference.inputs

    def scale(self, output: str) -> Scale:
        """The units in which the errors of an output count; M of one that must be exact is 1, if none is derived."""
        expected, is_drawn = self.reference, self.op.magnitude is None
        magnitude = np.ones_like(expected.golden[output]) if is_drawn and self.exact else expected.magnitude[output]
        return Scale(magnitude, self.contract.roundoff, expected.chain)

    @property
    def floors(self) -> dict[str, float]:
        """ε of each output where it is the golden, correctly rounded."""
        if self.op.bit_exact:
            return {}
        golden = self.reference.golden
        return {name: floor(y, self.scale(name), self.contract.dtype(name)) for name, y in golden.items()}

    @property
    def bound(self) -> float:
        """What η may be: derived a priori or, where nothing is, the σ that an element may err."""
        return K if self.op.magnitude is None else self.contract.bound(self.reference.chain)

    def axes(self, name: str) -> Mapping[str, np.ndarray]:
        """The labels of an output's or an input's elements: by head, group, tile, …

        Raises DeclarationError for labels that do not fit.
        """
        return self._axes.get(name, {})

    @cached_property
    def _axes(self) -> Mapping[str, Mapping[str, np.ndarray]]:
        return checked_axes(self.op, self.case, self.inputs, self.reference.golden)

    def runs(self, *, off_grid: bool = False) -> Iterator[dict[str, Floats]]:
        """The runs of the contract: see `spread.runs`."""
        return runs(self.op, self.case, self.inputs, self.contract, self.reference.golden, off_grid=off_grid)

    def run(self) -> dict[str, np.ndarray]:
        """What the kernel returns, by output.

        Raises ImportError where the backend's framework is missing, Ended as `guard.guarded`.
        """
        device, kernel, inputs = runner(self.backend), self.kernel, self.inputs
        return guarded(lambda: outputs(device.run(kernel, inputs, self.arguments)))

    @cached_property
    def exact(self) -> bool:
        """Whether outputs must equal the golden: of an op compared bit for bit, and on integer data that stay exact."""
        if self.op.bit_exact:
            return True
        if self.case.data != "integers" or not self.op.twin:
            return False
        return all(holds(self.contract.dtype(name), golden) for name, golden in self.reference.golden.items())

    @property
    def twin(self) -> Trial:
        """The same kernel and case on integer data."""
        return replace(self, case=self.case.with_data("integers"), given=None)

    def with_case(self, case: Case) -> Trial:
        """The same kernel on another case, whose inputs it draws."""
        return replace(self, case=case, given=None)

    def with_seed(self, seed: int) -> Trial:
        """The same case on another draw of its data."""
        return self.with_case(self.case.with_seed(seed))

    def with_inputs(self, inputs: Inputs) -> Trial:
        """The same case on these inputs."""
        return replace(self, given=inputs)
