"""Order and lifetime on a GPU, as far as a CPU can tell: calls on a device whose streams only keep a record."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from bridge import cache_clear, dlpack, streams, torch_call, views, wrap  # noqa: E402
from tests.bridge_harness import close, gradients, seed  # noqa: E402, F401

DEVICE = torch.device("cpu")


class Event:
    """Done when as many things as stood before it on its stream are done."""

    def __init__(self):
        self.stream, self.place, self.device = None, 0, DEVICE

    def record(self, stream):
        self.stream = stream
        stream.issued += 1
        self.place = stream.issued
        stream.log.append(("record", stream.name))

    def query(self):
        return self.place <= self.stream.done


class Stream:
    """What is issued on it stays undone until `finish`."""

    def __init__(self, name, log):
        self.name, self.log, self.device = name, log, DEVICE
        self.issued, self.done = 1, 0
        self.cuda_stream = 0 if name == "default" else hash(name)

    def wait_event(self, event):
        self.log.append(("wait", self.name, event.stream.name))

    def query(self):
        return self.issued <= self.done

    def finish(self):
        self.done = self.issued


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
        patch.setattr(streams, "current_handle", lambda index: self.current.cuda_stream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.log.append(("used on", stream.name)))
        patch.setattr(streams, "import_tensor", self.import_tensor)
        patch.setattr(streams, "export_array", self.export_array)
        self.where = streams.Cuda(DEVICE)
        self.where.jax_device = cpu
        patch.setitem(streams.open_endpoints, DEVICE, self.where)

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
            if stream.name in names:
                stream.finish()

    def held(self):
        """How many arrays that torch has dropped are still kept, after what may go has gone."""
        gc.collect()
        self.where.collect()
        return len(self.where._dropped) + sum(len(arrays) for _, arrays in self.where._marked)

    def kinds(self):
        kinds = [entry[0] for entry in self.log]
        self.log.clear()
        return kinds


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
    results.pop()
    assert machine.held() == 1
    machine.default.done = machine.default.issued
    machine.default.issued += 1  # work that came after what was marked
    results.pop()
    assert machine.held() == 1
    results.clear()
    assert machine.held() == 2
    machine.finish("default")
    torch_call(jnp.sin, torch.ones(0))
    assert not machine.where._dropped and not machine.where._marked


def test_an_idle_stream_gives_back_at_once(machine):
    y = torch_call(jnp.sin, torch.ones(16))
    machine.finish("default")
    del y
    machine.log.clear()
    assert machine.held() == 0 and machine.log == []


def test_events_are_used_again(machine):
    for _ in range(50):
        torch_call(jnp.sin, torch.ones(16))
        machine.default.done, machine.default.issued = machine.default.issued, machine.default.issued + 1
    machine.held()
    assert len(machine.where._events) <= 2


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
    assert machine.log == [] and len(machine.where._dropped) == 1
    machine.capturing = False
    assert machine.held() == 1
    machine.finish("default")
    assert machine.held() == 0


def test_a_call_of_parameters_alone_still_waits_for_the_caller(machine):
    w = torch.nn.Parameter(torch.ones(16), requires_grad=False)
    function = wrap(jnp.sin)
    for _ in range(4):
        machine.log.clear()
        function(w)
        assert machine.kinds().count("import") == 1


def test_one_array_exported_twice_is_held_twice(machine):
    order = machine.where.enter()
    array = jnp.ones(16)
    first, second = (machine.where.give(array, order) for _ in range(2))
    del first
    assert machine.held() == 1
    machine.finish("default")
    assert machine.held() == 0 and len(machine.where._leases) == 1
    machine.default.issued += 1
    del second
    assert machine.held() == 1


def test_an_address_is_imported_once_and_every_call_still_waits(machine):
    function, tensors = wrap(lambda *all: sum(all)), [torch.randn(16) for _ in range(7)]
    counts = []
    for _ in range(4):
        close(function(*tensors), torch.stack(tensors).sum(0))
        counts.append(machine.kinds().count("import"))
    assert counts == [7, 7, 1, 1]  # the first call traces, the second meets the addresses


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_argument_that_nothing_reads_still_makes_the_program_wait(machine, place):
    """The import that waits must reach the program, whichever it is."""
    function, tensors = wrap(lambda *all: all[place] * 2), [torch.randn(16) for _ in range(3)]
    for _ in range(3):
        close(function(*tensors), tensors[place] * 2)
    (program,) = function._programs._programs.values()
    assert len(program._forward.in_avals[0]) == len(tensors)
    assert program._forward._executable._kept_var_idx == {0, 1, 2}


def test_kept_imports_read_what_is_there_and_hold_no_memory(machine):
    function, x = wrap(lambda x: x * 2), torch.zeros(16)
    alive = weakref.ref(x.untyped_storage())
    for value in range(5):
        x.fill_(float(value))
        close(function(x), torch.full((16,), 2.0 * value))
    del x
    gc.collect()
    assert alive() is None and len(machine.where._views) == 1


def test_an_address_with_another_dtype_shape_or_stride_is_another_import(machine):
    function, x = wrap(lambda x: x + 0), torch.arange(64.0).reshape(4, 16)
    for view in (x, x, x.reshape(-1), x.view(torch.int32), x.t(), x[:2], x[:2]):
        for _ in range(2):
            result = function(view)
            assert result.dtype == view.dtype and torch.equal(result, view)
    assert len(machine.where._views) == 5


def test_kept_imports_are_bounded_and_may_be_deleted_or_dropped(machine, monkeypatch):
    monkeypatch.setattr(views, "MAX_VIEWS", 3)
    function, tensors = wrap(lambda x: x + 1), [torch.randn(16) for _ in range(5)]
    for x in tensors * 2:
        close(function(x), x + 1)
    assert len(machine.where._views) == 3
    for array, _ in machine.where._views._views.values():
        array.delete()
    for x in tensors:
        close(function(x), x + 1)
    cache_clear()
    assert len(machine.where._views) == 0
    close(function(tensors[0]), tensors[0] + 1)


def test_a_program_without_results_keeps_its_arguments_itself(machine):
    """Nothing that the caller's stream waits for says when it has read them."""
    seen = []
    function = wrap(lambda x: jax.debug.callback(lambda value: seen.append(float(value[0])), x))
    for _ in range(3):
        function(torch.ones(16))
    jax.effects_barrier()
    assert seen == [1.0] * 3 and len(machine.where._views) == 0


def test_backward_takes_kept_imports_too(machine):
    function, x, w = wrap(lambda x, w: jnp.sin(x) * w), torch.randn(16), torch.randn(16)
    for _ in range(3):
        found = gradients(function, x, w)
        close(found[0], torch.cos(x) * w)
        close(found[1], torch.sin(x))


def test_every_call_records_its_tensors_on_its_stream(machine):
    w = torch.nn.Parameter(torch.ones(16), requires_grad=False)
    function, x = wrap(jnp.add), torch.ones(16)
    for stream in (machine.default, machine.side, machine.default):
        machine.current = stream
        machine.log.clear()
        function(x, w)
        assert machine.log.count(("used on", stream.name)) == 2


def test_without_kept_imports_every_call_makes_its_own(machine):
    machine.where.borrows = False
    w, x = torch.nn.Parameter(torch.ones(16), requires_grad=False), torch.ones(16)
    function = wrap(jnp.add)
    for _ in range(3):
        machine.log.clear()
        close(function(x, w), x + w)
        assert machine.kinds().count("import") == 2


def test_torch_func_grad_takes_kept_imports_too(machine):
    function, x = wrap(lambda x: jnp.sum(jnp.sin(x))), torch.randn(16)
    for _ in range(3):
        close(torch.func.grad(function)(x), torch.cos(x))


def test_an_idle_stream_is_not_waited_for(machine):
    function, tensors = wrap(jnp.add), [torch.randn(16) for _ in range(2)]
    for _ in range(2):
        function(*tensors)
    machine.finish("default")
    machine.log.clear()
    close(function(*tensors), sum(tensors))
    assert machine.kinds() == ["used on", "used on", "export"]
    machine.where.collect()
    machine.default.issued += 1
    machine.log.clear()
    function(*tensors)
    assert machine.kinds() == ["record", "wait", "used on", "used on", "import", "export"]


@pytest.mark.parametrize("dtype", sorted(dlpack.WIDE, key=str))
@pytest.mark.parametrize("shape", [(4, 6), (0, 3), ()])
def test_an_alias_has_the_memory_and_not_its_life(dtype, shape):
    x = torch.zeros(shape, dtype=dtype)
    bare = dlpack.alias(x)
    assert (bare.data_ptr(), bare.dtype, bare.shape, bare.stride()) == (x.data_ptr(), dtype, x.shape, x.stride())
    alive = weakref.ref(x.untyped_storage())
    del x
    gc.collect()
    assert alive() is None


def test_marks_of_other_devices_streams_are_not_used_again(machine):
    far = Stream("far", machine.log)
    far.device = torch.device("cuda", 1)

    def record_event():
        event = Event()
        event.record(far)
        event.device = far.device
        return event

    far.record_event = record_event  # pyright: ignore[reportAttributeAccessIssue]
    y = torch_call(jnp.sin, torch.ones(16))
    streams.record_stream(y, far)
    del y
    assert machine.held() == 1
    machine.finish("default")
    assert machine.held() == 1
    far.finish()
    assert machine.held() == 0
    assert all(event.device == DEVICE for event in machine.where._events)
