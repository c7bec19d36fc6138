"""Memory stays flat over many calls: of the process, of JAX's arrays and (marked gpu, elsewhere) of torch."""

import gc
import os
import random

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from bridge import torch_call, wrap  # noqa: E402

MIB = 2**20


def resident():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_arrays():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def assert_flat(action, warm_up, rounds, allowed):
    """Runs an action often; what the process holds may grow by `allowed` bytes, what JAX holds not at all."""
    for _ in range(warm_up):
        action()
    arrays, process = live_arrays(), resident()
    for _ in range(rounds):
        action()
    assert live_arrays() == arrays
    assert resident() - process < allowed


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "with backward"])
def test_ten_thousand_calls_of_random_lengths(grad):
    draw, function = random.Random(0), wrap(lambda x, w: jnp.tanh(x) * w)
    w = torch.randn(256, requires_grad=grad)

    def action():
        y = function(torch.randn(draw.randrange(16), 256), w)
        if grad:
            y.sum().backward()
            w.grad = None

    assert_flat(action, 300, 10_000 if not grad else 2_000, 16 * MIB)
    assert function.cache_info().currsize <= 16


def test_programs_that_go_give_their_memory_back():
    function, lengths = wrap(lambda x: jnp.sin(x) + 1, maxsize=4), iter(range(1, 1000))

    def action():
        x = torch.randn(next(lengths), requires_grad=True)
        function(x).sum().backward()

    # What XLA and LLVM keep of a compilation varies; a kept program would cost a megabyte or more.
    assert_flat(action, 30, 40, 48 * MIB)
    assert function.cache_info().currsize == 4


def test_a_thousand_calls_refused_by_the_function_and_by_the_bridge():
    x, wrong, wide = torch.randn(1024), torch.randn(1023), torch.full((1024,), 2**40)

    def action():
        for bad, error in ((wrong, TypeError), (wide, ValueError), (x.double(), ValueError)):
            with pytest.raises(error):
                torch_call(jax.lax.add, x, bad)

    assert_flat(action, 50, 334, 16 * MIB)


def test_a_thousand_empty_calls():
    def action():
        x = torch.empty(0, 8, requires_grad=True)
        torch_call(jnp.sin, x).sum().backward()
        assert x.grad.shape == (0, 8)

    assert_flat(action, 50, 1000, 8 * MIB)
