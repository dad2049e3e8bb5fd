"""The float64 numbers that addresses of a Triton program's memory stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from parity.dtypes import Floats, round_to
from parity.interop import to_numpy

_PAGE = 2**16  # bytes of memory whose numbers are kept together


class Memory:
    """The float64 number that each address stands for."""

    def __init__(self) -> None:
        self._pages: dict[int, Floats] = {}

    def store(self, addresses: np.ndarray, values: Floats) -> None:
        """Store numbers at their first bytes."""
        for page, here in self._paged(addresses):
            numbers = self._pages.setdefault(page, np.full(_PAGE, np.nan))
            numbers[addresses[here] % _PAGE] = values[here]

    def numbers(self, addresses: np.ndarray) -> Floats:
        """The number stored at each address, NaN where there is none."""
        wide = np.full(addresses.shape, np.nan)
        for page, here in self._paged(addresses):
            if page in self._pages:
                wide[here] = self._pages[page][addresses[here] % _PAGE]
        return wide

    def load(self, addresses: np.ndarray, stored: np.ndarray) -> Floats:
        """The float64 numbers behind `stored` in memory; `stored` itself where other bytes have been stored since."""
        wide = self.numbers(addresses)
        exact = stored.astype(np.float64)
        return np.where(round_to(wide, stored.dtype.name) == stored, wide, exact)

    def forget(self, tensor: torch.Tensor) -> None:
        """Of memory that is a new tensor's. What it is given without being stored here may be what an earlier number
        rounds to."""
        storage = tensor.untyped_storage()
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for page in range(begin // _PAGE, -(-end // _PAGE)):
            if page in self._pages:
                self._pages[page][max(begin - page * _PAGE, 0) : end - page * _PAGE] = np.nan

    def of(self, tensor: torch.Tensor) -> Floats:
        """The numbers of a tensor."""
        stored = to_numpy(tensor)
        if not tensor.is_floating_point():
            return stored.astype(np.float64)
        return self.load(addresses_of(tensor), stored)

    @staticmethod
    def _paged(addresses: np.ndarray) -> Iterator[tuple[int, Any]]:
        pages = addresses // _PAGE
        if pages.size and (pages == pages.flat[0]).all():  # as most are: all of them without asking which
            return iter([(int(pages.flat[0]), ...)])
        return ((int(page), pages == page) for page in np.unique(pages))


def addresses_of(tensor: torch.Tensor) -> np.ndarray:
    """The address of each element."""
    found = np.full(tensor.shape, tensor.data_ptr(), np.uint64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * tensor.element_size())
        found += steps.reshape(-1, *[1] * (tensor.ndim - axis - 1))
    return found


def ends_of(tensor: torch.Tensor) -> np.ndarray:
    """The addresses of its first and its last element; none of an empty one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return np.array([begin, begin + last * tensor.element_size()] if tensor.numel() else [], np.uint64)
