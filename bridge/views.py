"""Imports kept by address: on a GPU an import of memory is a pointer with a shape, and making one is what costs.

An array of this kind holds no memory and remembers no values: a program reads what is there when it runs. It may be
used where four things hold, which `Cuda` and `Call` see to: a tensor of this call has that address; the program waits
for the caller's stream, unless that is idle; the caller's stream waits for the program's results; and the tensor is
recorded on that stream. The memory then is alive and unchanged until the program has read it, as it would be for a
kernel of torch's own. The arrays never leave the bridge: they are arguments of compiled programs, which do not donate
or return them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
import torch

from bridge.dlpack import alias

MAX_VIEWS = 4096


class Views:
    """The arrays by address, dtype, shape and strides; the first made go first."""

    def __init__(self, load: Callable[[torch.Tensor], jax.Array]) -> None:
        self._load = load
        self._views: dict[Hashable, tuple[jax.Array, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def arrays(self, values: list[Any], stream: torch.cuda.Stream, *, waits: bool) -> list[Any]:
        """Arrays for the tensors among values; one is imported anew where the program has to wait for the stream."""
        views, imported, fresh = self._views, list(values), not waits
        place, other = -1, None
        for i, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                continue
            value.record_stream(stream)
            strides = None if value.is_contiguous() else value.stride()
            key = (value.data_ptr(), value.dtype, value.shape, strides)
            view = views.get(key)
            if view is None or view[0].is_deleted():  # by jax.Array.delete on all of jax.live_arrays()
                view, fresh = self._add(key, value), True
            else:
                place, other = i, view[1]
            imported[i] = view[0]
        if other is not None and not fresh:
            imported[place] = self._load(other)
        return imported

    def clear(self) -> None:
        with self._lock:
            self._views.clear()

    def __len__(self) -> int:
        return len(self._views)

    def _add(self, key: Hashable, tensor: torch.Tensor) -> tuple[jax.Array, torch.Tensor]:
        bare = alias(tensor)
        view = self._load(bare), bare
        with self._lock:
            while len(self._views) >= MAX_VIEWS:
                del self._views[next(iter(self._views))]
            self._views[key] = view
        return view
