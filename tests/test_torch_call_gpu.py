"""torch_call on a GPU: order between streams, lifetime of shared memory, host time, memory; 200 rounds a scenario.

Each scenario makes the wrong order likely: a sleep holds back the stream that has to be waited for, programs are long
enough for the host to run ahead, and freed memory is filled with NaN at once.
"""

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge import dlpack, jax_call, record_stream, torch_call, wrap  # noqa: E402
from bridge.streams import endpoint  # noqa: E402
from tests.bridge_harness import Counted, close, gradients, seed  # noqa: E402, F401

pytestmark = pytest.mark.gpu

ROUNDS = 200
SIZE = 1 << 20
SLEEP = 500_000  # cycles, some 300 microseconds: more than a call takes on the host
MIB = 2**20


def work(x):
    """Long enough on the device for the host to be ahead of it: 64 passes over memory."""
    return jax.lax.fori_loop(0, 64, lambda _, y: y * 0.5 + x, x)


def product(x, w):
    return work(x) * w * w


def expected(x):
    y = torch_call(work, x)
    torch.cuda.synchronize()
    return y.clone()


def numbers(value=1.0):
    return torch.full((SIZE,), value, device="cuda")


def poison():
    """Takes and fills the memory that torch would hand out next, and so overwrites what was freed too early."""
    return torch.full((SIZE,), torch.nan, device="cuda")


def poison_jax():
    """The same for JAX's memory, by a program that waits for no torch stream."""
    return jax.block_until_ready(jnp.full((SIZE,), jnp.nan))


@pytest.fixture
def streams():
    return [torch.cuda.Stream() for _ in range(3)]


def test_the_producer_is_waited_for_on_the_current_stream():
    wanted = expected(numbers(3.0))
    x = numbers()
    for _ in range(ROUNDS):
        x.fill_(torch.nan)
        torch.cuda._sleep(SLEEP)
        x.fill_(3.0)
        assert torch.equal(torch_call(work, x), wanted)


def test_the_producer_is_waited_for_on_a_side_stream(streams):
    wanted, side = expected(numbers(3.0)), streams[0]
    for _ in range(ROUNDS):
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP)
            x = numbers(3.0)
            y = torch_call(work, x)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(y, wanted)


def test_a_third_stream_that_waits_reads_the_result(streams):
    wanted, (producer, caller, consumer) = expected(numbers(3.0)), streams
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        with torch.cuda.stream(producer):
            torch.cuda._sleep(SLEEP)
            x = numbers(3.0)
        caller.wait_stream(producer)
        with torch.cuda.stream(caller):
            y = torch_call(work, x)
        del x
        with torch.cuda.stream(producer):
            poison()
        consumer.wait_stream(caller)
        with torch.cuda.stream(consumer):
            torch.cuda._sleep(SLEEP)
            total = y.eq(wanted).all()
        record_stream(y, consumer)
        del y
        poison_jax()
        consumer.synchronize()
        assert total.item()


def test_overwriting_an_input_on_the_callers_stream_and_on_one_that_waited(streams):
    wanted, other = expected(numbers(3.0)), streams[0]
    for i in range(ROUNDS):
        x = numbers(3.0)
        y = torch_call(work, x)
        if i % 2:
            x.fill_(torch.nan)
        else:
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                x.fill_(torch.nan)
            torch.cuda.current_stream().wait_stream(other)
        assert torch.equal(y, wanted)


def test_overwriting_an_input_never_changes_the_gradient_unnoticed():
    x, w = numbers(3.0), torch.full((SIZE,), 2.0, device="cuda", requires_grad=True)
    torch_call(product, x, w).sum().backward()
    wanted, noticed = w.grad.clone(), 0
    for i in range(ROUNDS):
        w.grad = None
        x = numbers(3.0)
        y = torch_call(product, x, w)
        if i % 2:
            x.fill_(torch.nan)
        loss = y.sum()
        try:
            loss.backward()
        except RuntimeError as error:
            assert i % 2 and "modified by an inplace operation" in str(error)
            noticed += 1
            continue
        x.fill_(torch.nan)
        assert torch.equal(w.grad, wanted)
    assert noticed in (0, ROUNDS // 2)


def test_freed_inputs_are_not_recycled_before_they_are_read(streams):
    wanted, producer = expected(numbers(3.0)), streams[0]
    for _ in range(ROUNDS):
        with torch.cuda.stream(producer):
            x = numbers(3.0)
        torch.cuda.current_stream().wait_stream(producer)
        y = torch_call(work, x)
        del x
        with torch.cuda.stream(producer):
            poison()
        poison()
        assert torch.equal(y, wanted)


def test_an_address_used_again_is_read_anew_and_in_order(streams):
    """Blocks come back at the same addresses with other contents, made on one stream and used on another."""
    producer, function = streams[0], wrap(work)
    for i in range(ROUNDS):
        with torch.cuda.stream(producer):
            torch.cuda._sleep(SLEEP)
            x = numbers(float(i))
        torch.cuda.current_stream().wait_stream(producer)
        y = function(x)
        del x
        with torch.cuda.stream(producer):
            poison()
        assert y.eq(2.0 * i).all().item()


@pytest.mark.parametrize("place", range(3))
def test_an_argument_that_nothing_reads_still_makes_the_program_wait(place):
    function, tensors = wrap(lambda *all: work(all[place])), [numbers() for _ in range(3)]
    for i in range(ROUNDS):
        torch.cuda._sleep(SLEEP)
        for x in tensors:
            x.fill_(float(i))
        assert function(*tensors).eq(2.0 * i).all().item()


def test_memory_that_torch_unmapped_and_took_again():
    function = wrap(work)
    for i in range(5):
        x = numbers(float(i))
        for _ in range(3):
            assert function(x).eq(2.0 * i).all().item()
        del x
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def test_temporary_copies_are_not_recycled_before_they_are_read():
    wide = torch.full((SIZE, 2), 3.0, device="cuda")
    wanted = expected(numbers(3.0))
    for _ in range(ROUNDS):
        y = torch_call(work, wide[:, 0])
        poison()
        assert torch.equal(y, wanted)


def test_freed_results_are_not_recycled_before_they_are_read():
    wanted = expected(numbers(3.0))
    x = numbers(3.0)
    for _ in range(ROUNDS):
        y = torch_call(work, x)
        torch.cuda._sleep(SLEEP)
        same = y.eq(wanted).all()
        del y
        poison_jax()
        assert same.item()


def test_freed_gradients_are_not_recycled_before_they_are_read():
    x, w = numbers(3.0), torch.full((SIZE,), 2.0, device="cuda", requires_grad=True)
    (wanted,) = torch.autograd.grad(torch_call(product, x, w).sum(), w)
    wanted = wanted.clone()
    for _ in range(ROUNDS):
        (gradient,) = torch.autograd.grad(torch_call(product, x, w).sum(), w)
        torch.cuda._sleep(SLEEP)
        same = gradient.eq(wanted).all()
        del gradient
        poison_jax()
        assert same.item()


def test_views_keep_a_result_alive():
    x = numbers(3.0)
    wanted = expected(x)[:8]
    for _ in range(ROUNDS):
        view = torch_call(work, x)[:8]
        poison_jax()
        torch.cuda._sleep(SLEEP)
        assert torch.equal(view, wanted)


def test_several_threads_on_streams_of_their_own():
    counted = Counted(work)
    function, failures = wrap(counted), []

    def run(value):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(ROUNDS // 4):
                x = torch.full((1 << 16,), value, device="cuda")
                y = function(x)
                x.fill_(torch.nan)
                if not y.eq(2 * value).all().item():
                    failures.append(value)

    threads = [threading.Thread(target=run, args=(float(value),)) for value in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and counted.traces == 1


def test_a_parameter_that_an_optimizer_updates():
    w = torch.nn.Parameter(torch.full((SIZE,), 1.0, device="cuda"))
    optimizer, x = torch.optim.SGD([w], lr=1.0), torch.ones(SIZE, device="cuda")
    function = wrap(lambda x, w: work(x) * w)
    for i in range(ROUNDS):
        optimizer.zero_grad()
        torch.cuda._sleep(SLEEP)
        y = function(x, w)
        close(y.detach(), torch.full_like(x, 2.0 * (1.0 - 2.0 * i)))
        y.sum().backward()
        optimizer.step()


def test_a_parameter_written_through_data_is_waited_for():
    """Its version does not tell, and no other tensor makes the program wait."""
    w = torch.nn.Parameter(torch.full((SIZE,), 0.0, device="cuda"))
    with torch.no_grad():
        for i in range(ROUNDS):
            torch.cuda._sleep(SLEEP)
            w.data.fill_(float(i))
            assert torch_call(work, w).eq(2.0 * i).all().item()


def test_the_host_is_not_blocked():
    x, w = numbers(), torch.ones(SIZE, device="cuda", requires_grad=True)
    torch_call(product, x, w).sum().backward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(2_000_000_000)  # about a second
    y = torch_call(product, x, w)
    y.sum().backward()
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    assert issued < 0.5 * (time.perf_counter() - start)


def test_memory_is_shared_both_ways():
    where = endpoint(torch.device("cuda", 0))
    for dtype in sorted(dlpack.NARROW, key=str):
        x = torch.arange(64, device="cuda").to(torch.uint8).repeat(16).view(torch.uint8)[: 64 * 8]
        x = (x % 2).bool() if dtype == torch.bool else x.view(dtype)
        order = where.enter()
        array = where.take(x, order)
        assert array.unsafe_buffer_pointer() == x.data_ptr()
        (borrowed,) = where.borrow([x], order)
        assert borrowed.unsafe_buffer_pointer() == x.data_ptr()
        back = where.give(array, order)
        assert back.data_ptr() == x.data_ptr() and back.dtype == dtype
    permuted = torch.randn(4, 5, 6, device="cuda").permute(2, 0, 1)
    assert where.take(permuted, where.enter()).unsafe_buffer_pointer() == permuted.data_ptr()
    close(torch_call(lambda x: x * 2, permuted), permuted * 2)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_slices_at_any_address(offset):
    x = torch.randn(4096, device="cuda")[offset : offset + 1024]
    close(torch_call(lambda x: jnp.tanh(x) + 1, x), torch.tanh(x) + 1)
    (gradient,) = gradients(lambda x: torch_call(lambda x: x * x, x), x)
    close(gradient, 2 * x)


def test_int64_is_looked_at_and_narrowed():
    assert torch_call(lambda i: i + 1, torch.tensor([5, 2**31 - 2], device="cuda")).tolist() == [6, 2**31 - 1]
    with pytest.raises(ValueError, match=r"i: .*int64"):
        torch_call(lambda i: i + 1, torch.tensor([2**31], device="cuda"))


def test_mixed_devices_are_refused_by_name():
    with pytest.raises(ValueError, match="second: expected a tensor on cuda:0 like the others, given one on cpu"):
        torch_call(lambda first, second: first, torch.ones(2, device="cuda"), torch.ones(2))


def test_capture_is_refused_and_the_graph_goes_on():
    x = torch.ones(SIZE, device="cuda", requires_grad=True)
    kept, dropped = torch_call(work, x), torch_call(work, x.detach())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x.detach() * 2
        with pytest.raises(NotImplementedError, match="CUDA graph"):
            torch_call(work, x)
        del dropped  # memory that goes back during a capture must not disturb it
    with torch.no_grad():
        x.fill_(3.0)
    graph.replay()
    assert y.eq(6.0).all()
    assert torch_call(work, x.detach()).eq(6.0).all()
    del kept
    torch.cuda.synchronize()
    bridge.collect()
    where: Any = endpoint(torch.device("cuda", 0))
    assert not where._dropped and not where._marked


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch's, of a part that holds no kernel
def test_torch_compile_with_cuda_graphs_leaves_the_call_out():
    torch.compiler.reset()
    graph = torch.compile(lambda x: torch_call(work, x * 2) + 1, fullgraph=True, mode="reduce-overhead")
    for value in (1.0, 2.0, 3.0, 4.0):
        x = torch.full((1024,), value, device="cuda")
        close(graph(x).clone(), 4 * x + 1)


def used():
    """Bytes in use by torch and by JAX on the GPU once everything is done."""
    torch.cuda.synchronize()
    bridge.collect()
    poison_jax()  # JAX frees what torch gave back when it next runs
    return torch.cuda.memory_allocated(), jax.local_devices(backend="cuda")[0].memory_stats()["bytes_in_use"]


@pytest.mark.parametrize("kind", ["calls", "with backward", "refused", "empty"])
def test_memory_on_the_gpu_is_flat(kind):
    function = wrap(lambda x, w: jnp.tanh(x) * w)
    w = torch.randn(4096, device="cuda", requires_grad=kind == "with backward")

    def action(i):
        x = torch.randn(0 if kind == "empty" else i * 7 % 13, 4096, device="cuda")
        if kind == "refused":
            with pytest.raises(ValueError):
                function(x, w.double())
            return
        y = function(x, w)
        if kind == "with backward":
            y.sum().backward()
            w.grad = None

    for i in range(200):
        action(i)
    before = used()
    for i in range(10_000 if kind == "calls" else 1000):
        action(i)
    assert used() == before


def test_jax_call_orders_and_keeps_memory():
    x = jax.jit(work)(jnp.full((SIZE,), 3.0))
    wanted = jax.block_until_ready(x) * 2
    for _ in range(ROUNDS):
        y = jax_call(lambda t: t * 2, jax.jit(work)(jnp.full((SIZE,), 3.0)))
        poison()
        poison_jax()
        assert bool((y == wanted).all())
    gradient = jax.grad(lambda x: jnp.sum(jax_call(lambda t: t * t, x)))(x)
    assert bool((gradient == 2 * x).all())


@pytest.mark.multi_gpu
def test_two_devices_at_once():
    tensors = [torch.full((SIZE,), 3.0, device=f"cuda:{i}") for i in range(2)]
    for _ in range(ROUNDS):
        results = [torch_call(work, x) for x in tensors]
        for i, y in enumerate(results):
            assert y.device == torch.device("cuda", i) and y.eq(6.0).all().item()
    x = tensors[1].clone().requires_grad_()
    torch_call(work, x).sum().backward()
    assert x.grad.device == x.device and x.grad.eq(2.0).all()
