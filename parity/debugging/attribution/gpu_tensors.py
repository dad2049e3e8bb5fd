"""What PyTorch does to tensors between launches, in float64; and recorded, to be done again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from parity.debugging.attribution.gpu_frames import Errors
from parity.debugging.attribution.gpu_memory import Memory, addresses_of, ends_of
from parity.debugging.attribution.tape import Tape
from parity.dtypes import Floats, round_to
from parity.interop import to_numpy, to_torch

_MEMORY_ALONE = {"aten::set_", "aten::new_empty", "aten::empty_like", "aten::detach"}  # what computes no numbers


class Between(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What PyTorch does to tensors, in float64."""

    def __init__(self, errors: Errors, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._errors, self._memory = errors, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation, and the same one on the numbers that its tensors stand for."""
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in given}

        def called() -> Any:
            result = func(*args, **kwargs)
            new = [] if func._schema.is_mutable else [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            for x in new:
                if x.untyped_storage().data_ptr() not in storages:
                    self._memory.forget(x)
            return result

        if func._schema.name in _MEMORY_ALONE:
            return called()
        own = [x.detach().to(torch.float64) if x.is_floating_point() else x.clone() for x in given]
        wide = [torch.from_numpy(self._memory.of(x)) if x.is_floating_point() else x.clone() for x in given]
        result = called()
        is_new = isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel() > 0
        is_view = is_new and not func._schema.is_mutable and result.untyped_storage().data_ptr() in storages
        if not given or not is_new or is_view:
            return result

        def on(tensors: list[torch.Tensor]) -> Floats:
            left = iter(tensors)

            def swapped(x: Any) -> Any:
                if isinstance(x, torch.Tensor):
                    return next(left).clone()
                return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

            return np.asarray(func(*tree_map(swapped, args), **tree_map(swapped, kwargs)).to(torch.float64).numpy())

        stored = to_numpy(result)
        exact = self._errors.add(on(wide), lambda: (stored.astype(np.float64), on(own)))
        result.copy_(to_torch(round_to(exact, stored.dtype.name)))
        self._memory.store(addresses_of(result), exact)
        return result


class RecordedBetween(Between):  # type: ignore[no-untyped-call]
    """What PyTorch does to tensors, in float64, recorded."""

    def __init__(self, errors: Errors, memory: Memory, taped: Tape) -> None:
        super().__init__(errors, memory)
        self._tape = taped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation, which is a step."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in given}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        for x in (*given, *made):
            self._tape.keep(x.untyped_storage())
        is_view = not func._schema.is_mutable and all(x.untyped_storage().data_ptr() in storages for x in made)
        if func._schema.name == "aten::copy_" and given[0].data_ptr() == given[1].data_ptr():
            return result  # as Triton's interpreter copies arguments back to where they are
        if func._schema.name not in _MEMORY_ALONE and "aten::empty" not in func._schema.name and made and not is_view:
            known = [x if x.is_floating_point() else x.clone() for x in made]
            for x in given:
                self._tape.touch(ends_of(x))
            for x in made:
                self._tape.touch(ends_of(x), is_written=True)
            self._tape.add(lambda: self._again(func, args, kwargs or {}, made, known), is_host=True)
        return result

    def _again(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor], known: list[torch.Tensor]) -> None:
        """Do an operation again into what it made. known: what that was, of which integers must be the same: they may
        be addresses, and what has been recorded goes by those."""
        errors = interpreter.interpreter_builder.errors
        fresh = Between(errors, self._memory).__torch_dispatch__(func, (), args, kwargs)
        new = [x for x in tree_leaves(fresh) if isinstance(x, torch.Tensor)]
        for old, x, before in zip(made, new, known, strict=True):
            if old is not x:
                numbers = self._memory.of(x)
                old.copy_(x)
                if old.is_floating_point():
                    self._memory.store(addresses_of(old), numbers)
            is_number = old.is_floating_point() or old.element_size() == 1  # or a code
            self._tape.is_whole &= is_number or bool(torch.equal(old, before))
