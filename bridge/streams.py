"""Devices that both frameworks see: order between torch's streams and JAX's, and the lifetime of shared memory."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import torch

from bridge.dlpack import ALIGNMENT, CAN_ALIAS, JaxDevice, export_array, import_tensor
from bridge.views import Views

# Of the device's memory: below this share either framework is said to starve.
STARVING = 0.3

Order = Any  # what a call is ordered on: CudaOrder on a GPU, None on a CPU


class Endpoint:
    """A device of both frameworks."""

    device: torch.device
    jax_device: JaxDevice
    alignment: int
    borrows = False  # whether there are arrays that do not keep a tensor's memory alive

    def check(self) -> None:
        """Refuses what no call can be made in, before anything is launched."""

    def enter(self) -> Order:
        """Makes JAX wait for what the caller has issued so far."""

    def take(self, tensor: torch.Tensor, order: Order) -> jax.Array:
        """The tensor's memory as a JAX array."""
        raise NotImplementedError

    def borrow(self, values: list[Any], order: Order) -> list[Any]:
        """The tensors among values as such arrays, for a program whose results will be given."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drops what is kept between calls to make imports cheap."""

    def give(self, array: jax.Array, order: Order) -> torch.Tensor:
        """The array's memory as a tensor, for which the caller's stream waits."""
        raise NotImplementedError


class Host(Endpoint):
    """The CPU: torch computes at once, so exporting waits for JAX and nothing else needs order."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.alignment = ALIGNMENT["cpu"]
        self.jax_device = jax.local_devices(backend="cpu")[0]

    def take(self, tensor: torch.Tensor, order: Order) -> jax.Array:
        return import_tensor(tensor, self.jax_device, None)

    def give(self, array: jax.Array, order: Order) -> torch.Tensor:
        return export_array(array, None)


class CudaStream:
    """A stream and its handle as DLPack writes it."""

    __slots__ = ("pointer", "stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.pointer = stream.cuda_stream or 1  # the legacy default stream, whose handle in torch is 0


class CudaOrder(NamedTuple):
    """What a call on a GPU is ordered on; `idle` where the stream held nothing that JAX would have to wait for."""

    current: CudaStream
    idle: bool


class _Lease(weakref.ref):
    """Keeps an exported array alive; called back when torch has dropped the last tensor on its memory."""

    __slots__ = ("address", "array", "streams")
    address: int
    array: jax.Array
    streams: list[CudaStream]


class Cuda(Endpoint):
    """One GPU.

    JAX waits for the caller's current stream, unless that is idle, through the stream that it offers to producers; the
    current stream waits for the results when they are exported. XLA hands memory that nobody holds to its next program
    without asking torch's streams, so an exported array is held until the streams that used the tensor have passed the
    point where torch dropped it, or a later one: the next call or `collect` marks it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.alignment = ALIGNMENT["cuda"]
        self.borrows = CAN_ALIAS
        self.jax_device = _jax_device(device)
        self._pointer = self.jax_device.get_stream_for_external_ready_events()
        self._ready = torch.cuda.ExternalStream(self._pointer, device=device)
        self._views = Views(self._import)
        self._streams: dict[int, CudaStream] = {}
        self._events: list[torch.cuda.Event] = []  # free ones; each is one thread's from its record to its wait
        self._leases: dict[int, _Lease] = {}
        self._dropped: deque[_Lease] = deque()
        self._marked: deque[tuple[list[torch.cuda.Event], list[jax.Array]]] = deque()
        self._collecting = threading.Lock()
        warn_if_starving(device, self.jax_device)

    def check(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "torch_call cannot be captured in a CUDA graph: JAX launches on a stream of its own; "
                "call it outside torch.cuda.graph, or use a torch-native function of bridge there"
            )

    def enter(self) -> CudaOrder:
        current = self._current()
        idle = current.stream.query()
        if self._dropped or self._marked:
            self._release(current if idle else None)
        if not idle:
            event = self._record(current)
            self._ready.wait_event(event)
            self._events.append(event)
        return CudaOrder(current, idle)

    def take(self, tensor: torch.Tensor, order: CudaOrder) -> jax.Array:
        # A block of another stream's pool is reused only after this stream, which will have waited for JAX.
        tensor.record_stream(order.current.stream)
        return self._import(tensor)

    def borrow(self, values: list[Any], order: CudaOrder) -> list[Any]:
        return self._views.arrays(values, order.current.stream, waits=not order.idle)

    def forget(self) -> None:
        self._views.clear()

    def give(self, array: jax.Array, order: CudaOrder) -> torch.Tensor:
        tensor = export_array(array, order.current.pointer)
        if tensor.numel():
            lease = _Lease(tensor.untyped_storage(), self._returned)
            lease.address, lease.array, lease.streams = tensor.data_ptr(), array, [order.current]
            self._leases[id(lease)] = lease
        return tensor

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        address = tensor.untyped_storage().data_ptr()
        leases = [lease for lease in list(self._leases.values()) if lease.address == address]
        for lease in leases:
            if all(stream != other.stream for other in lease.streams):
                lease.streams.append(CudaStream(stream))
        if not leases:
            tensor.record_stream(stream)

    def collect(self) -> None:
        """Lets go of exported arrays whose streams have passed the point where torch dropped them."""
        # Asking an event or a stream under capture would end the capture.
        if (self._dropped or self._marked) and not torch.cuda.is_current_stream_capturing():
            self._release()

    def _import(self, tensor: torch.Tensor) -> jax.Array:
        return import_tensor(tensor, self.jax_device, self._pointer)

    def _current(self) -> CudaStream:
        handle = current_handle(self.device.index)
        found = self._streams.get(handle)
        if found is None:
            found = self._streams[handle] = CudaStream(torch.cuda.current_stream(self.device))
        return found

    def _record(self, current: CudaStream) -> torch.cuda.Event:
        """An event at this point of a stream of this device; it is free again once nobody will ask it."""
        try:
            event = self._events.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(current.stream)
        return event

    def _release(self, idle: CudaStream | None = None) -> None:
        """Lets go of dropped arrays whose streams are idle, or have passed their mark; marks those of busy streams."""
        if not self._collecting.acquire(blocking=False):
            return
        try:
            by_streams: dict[tuple[CudaStream, ...], list[jax.Array]] = {}
            while self._dropped:
                lease = self._dropped.popleft()
                by_streams.setdefault(tuple(lease.streams), []).append(lease.array)
            for streams, arrays in by_streams.items():
                events = [self._mark(one) for one in streams if one is not idle and not one.stream.query()]
                if events:
                    self._marked.append((events, arrays))
            while self._marked and all(event.query() for event in self._marked[0][0]):
                events, _ = self._marked.popleft()
                self._events += [event for event in events if event.device == self.device]
        finally:
            self._collecting.release()

    def _mark(self, used: CudaStream) -> Any:
        if used.stream.device == self.device:
            return self._record(used)
        return used.stream.record_event()  # a stream named by the user may be of another GPU

    def _returned(self, lease: _Lease) -> None:
        # Asks nothing of the GPU, since this may run in the middle of a capture.
        del self._leases[id(lease)]
        if sys.is_finalizing():
            return
        current = self._current()
        if current not in lease.streams:
            lease.streams.append(current)
        self._dropped.append(lease)


def _handle_of_current(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# torch.cuda.current_stream makes an object at each call, which costs ten times as much.
current_handle: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _handle_of_current)


open_endpoints: dict[torch.device, Endpoint] = {}
_opening = threading.Lock()


def endpoint(device: torch.device) -> Endpoint:
    found = open_endpoints.get(device)
    if found is None:
        with _opening:
            if device not in open_endpoints:
                open_endpoints[device] = Host() if device.type == "cpu" else Cuda(device)
        found = open_endpoints[device]
    return found


def home(device: JaxDevice) -> Endpoint:
    """Where torch finds the arrays of a JAX device."""
    if device.platform == "cpu":
        return endpoint(torch.device("cpu"))
    return endpoint(torch.device("cuda", device.local_hardware_id))


def record_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Says that `stream` uses a result of `torch_call`, as `Tensor.record_stream` does for torch's own memory.

    Needed where a result is used on a stream other than the one that was current at the call, and dropped elsewhere
    before that stream is done. `Tensor.record_stream` itself ignores memory that torch did not allocate.

    Args:
        tensor: a CUDA tensor, or a view of one; torch's own memory is passed on to `Tensor.record_stream`.
        stream: the stream that uses it.
    """
    where = endpoint(tensor.device)
    if isinstance(where, Cuda):
        where.record_stream(tensor, stream)


def collect() -> None:
    """Gives JAX back the memory of results that torch has dropped, where the GPU is done with them.

    Every call does this too; it is worth calling when no call follows for a while.
    """
    for found in list(open_endpoints.values()):
        if isinstance(found, Cuda):
            found.collect()


def _jax_device(device: torch.device) -> JaxDevice:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise RuntimeError(f"tensors are on {device}, but JAX has no CUDA devices: {error}") from error
    for found in devices:
        if found.local_hardware_id == device.index:
            return found
    raise RuntimeError(f"tensors are on {device}, which JAX does not see; it has {devices}")


def warn_if_starving(device: torch.device, jax_device: JaxDevice) -> None:
    """Warns when one framework's pool leaves the other little of the GPU."""
    free, total = torch.cuda.mem_get_info(device)
    pool = (jax_device.memory_stats() or {}).get("pool_bytes", 0)
    message = starvation(total, free, torch.cuda.memory_reserved(device), pool)
    if message:
        warnings.warn(f"{device}: {message}", RuntimeWarning, stacklevel=2)


def starvation(total: int, free: int, torch_pool: int, jax_pool: int) -> str | None:
    """What to change where a framework can reach less than its share of the memory, else None."""
    for name, pool in (("torch", torch_pool), ("JAX", jax_pool)):
        if free + pool < STARVING * total:
            return (
                f"{name} can reach {(free + pool) / 2**30:.1f} of {total / 2**30:.1f} GiB "
                f"(JAX's pool {jax_pool / 2**30:.1f}, torch's {torch_pool / 2**30:.1f}); set "
                "XLA_PYTHON_CLIENT_PREALLOCATE=false, or XLA_PYTHON_CLIENT_MEM_FRACTION to JAX's share, "
                "before JAX is first used"
            )
    return None
