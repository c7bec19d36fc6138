"""Order and lifetime on a GPU, as far as a CPU can tell: calls on a device whose streams only keep a record."""

import gc
import weakref

import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from bridge import dlpack, streams, torch_call, wrap  # noqa: E402
from tests.bridge_harness import close, seed  # noqa: E402, F401


class Event:
    done = False

    def __init__(self, log=None, stream=None):
        self.log, self.stream = log, stream

    def record(self, stream):
        self.stream = stream
        stream.log.append(("record", stream.name))

    def query(self):
        return self.done


class Stream:
    def __init__(self, name, log):
        self.name, self.log, self.events = name, log, []
        self.cuda_stream = 0 if name == "default" else hash(name)

    def record_event(self):
        self.events.append(Event(self.log, self))
        return self.events[-1]

    def wait_event(self, event):
        self.log.append(("wait", self.name, event.stream.name))


class Machine:
    """A GPU endpoint whose memory is the CPU's and whose streams are `Stream`s."""

    def __init__(self, patch):
        self.log, self.capturing = [], False
        self.default, self.side = Stream("default", self.log), Stream("side", self.log)
        self.current = self.default
        cpu = streams.Host().jax_device
        patch.setattr(streams, "_jax_device", lambda device: self)
        patch.setattr(streams, "warn_if_starving", lambda *_: None)
        patch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: Stream("ready", self.log))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.log.append(("used on", stream.name)))
        patch.setattr(streams, "import_tensor", self.import_tensor)
        patch.setattr(streams, "export_array", self.export_array)
        self.where = streams.Cuda(torch.device("cpu"))
        self.where.jax_device = cpu
        patch.setitem(streams.open_endpoints, torch.device("cpu"), self.where)

    def get_stream_for_external_ready_events(self):
        return 77

    def import_tensor(self, tensor, device, stream):
        self.log.append(("import", stream))
        return dlpack.import_tensor(tensor, device, None)

    def export_array(self, array, stream):
        self.log.append(("export", stream))
        return dlpack.export_array(array, None)

    def finish(self, *names):
        for stream in (self.default, self.side):
            for event in stream.events if stream.name in names else ():
                event.done = True

    def held(self):
        gc.collect()
        self.where.collect()
        return len(self.where._dropped)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_jax_waits_for_the_caller_and_the_caller_for_jax(machine):
    x, w = torch.randn(16), torch.randn(16)
    close(torch_call(jnp.add, x, w), x + w)
    assert machine.log == [
        ("record", "default"),
        ("wait", "ready", "default"),
        ("used on", "default"),
        ("import", 77),
        ("used on", "default"),
        ("import", 77),
        ("export", 1),
    ]


def test_copies_are_made_before_the_order_is_taken(machine):
    close(torch_call(lambda x: x + 1, torch.ones(4, 6)[:, ::2]), torch.full((4, 3), 2.0))
    assert [entry[0] for entry in machine.log] == ["record", "wait", "used on", "import", "export"]


def test_the_current_stream_is_the_one_that_is_ordered(machine):
    machine.current = machine.side
    torch_call(jnp.sin, torch.ones(16))
    assert ("record", "side") in machine.log and ("export", machine.side.cuda_stream) in machine.log
    assert not any("default" in entry for entry in machine.log)


def test_backward_is_ordered_on_the_stream_that_is_current_then(machine):
    x = torch.randn(16, requires_grad=True)
    y = torch_call(lambda x: x * x, x)
    machine.log.clear()
    machine.current = machine.side
    y.sum().backward()
    close(x.grad, 2 * x.detach())
    assert machine.log[:2] == [("record", "side"), ("wait", "ready", "side")]


def test_a_dropped_result_is_held_until_its_streams_are_done(machine):
    y = torch_call(jnp.sin, torch.ones(16))
    (lease,) = machine.where._leases.values()
    array = weakref.ref(lease.array)
    del lease
    machine.current = machine.side
    del y
    assert machine.held() == 1 and array() is not None
    machine.finish("side")
    assert machine.held() == 1
    machine.finish("default")
    assert machine.held() == 0 and array() is None
    assert not machine.where._leases


def test_views_saved_tensors_and_results_passed_on_keep_the_memory(machine):
    y = torch_call(jnp.sin, torch.ones(16))
    view = y[3:5].detach()
    del y
    assert machine.held() == 0
    view.requires_grad_()
    z = view * view
    del view
    assert machine.held() == 0
    z.sum().backward()
    del z
    assert machine.held() == 1


def test_another_stream_can_be_named(machine):
    y = torch_call(jnp.sin, torch.ones(16))
    streams.record_stream(y[2:], machine.side)
    streams.record_stream(y, machine.side)
    del y
    machine.finish("default")
    assert machine.held() == 1
    machine.finish("side")
    assert machine.held() == 0
    machine.log.clear()
    streams.record_stream(torch.ones(4), machine.side)
    assert machine.log == [("used on", "side")]


def test_results_are_given_back_in_turn_and_by_the_next_call(machine):
    results = [torch_call(jnp.sin, torch.ones(16)) for _ in range(3)]
    while results:
        results.pop()
    machine.default.events[1].done = True
    assert machine.held() == 3
    machine.finish("default")
    torch_call(jnp.sin, torch.ones(0))
    assert len(machine.where._dropped) == 0


def test_under_capture_nothing_is_launched_and_drops_wait_for_its_end(machine):
    x, y = torch.ones(16, requires_grad=True), torch_call(jnp.sin, torch.ones(16))
    z = torch_call(jnp.sin, x)
    machine.log.clear()
    machine.capturing = True
    with pytest.raises(NotImplementedError, match="CUDA graph"):
        torch_call(jnp.sin, torch.ones(16)[::2])
    with pytest.raises(NotImplementedError, match="CUDA graph"):
        z.sum().backward()
    del y
    gc.collect()
    machine.where.collect()
    assert machine.log == [] and not machine.default.events
    machine.capturing = False
    assert machine.held() == 1
    machine.finish("default")
    assert machine.held() == 0


def test_a_call_of_parameters_alone_still_waits_for_the_caller(machine):
    w = torch.nn.Parameter(torch.ones(16), requires_grad=False)
    function = wrap(jnp.sin)
    for _ in range(2):
        machine.log.clear()
        function(w)
        assert [entry[0] for entry in machine.log].count("import") == 1
    machine.log.clear()
    wrap(jnp.add)(w, torch.ones(16))
    assert [entry[0] for entry in machine.log].count("import") == 1


def test_one_array_exported_twice_is_held_twice(machine):
    order = machine.where.enter()
    array = jnp.ones(16)
    first, second = (machine.where.give(array, order) for _ in range(2))
    del first
    assert machine.held() == 1
    machine.finish("default")
    assert machine.held() == 0 and len(machine.where._leases) == 1
    del second
    assert machine.held() == 1
