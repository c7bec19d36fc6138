"""bridge.torch_call and wrap: structures, static values, programs, and parameters imported once."""

import collections
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge import torch_call, wrap  # noqa: E402
from bridge.constants import constant_imports  # noqa: E402
from tests.bridge_harness import Counted, close, crossings, seed  # noqa: E402, F401

Pair = collections.namedtuple("Pair", "first second")


def test_pytrees_in_and_out():
    def function(pair, table, *, scale):
        return {"sum": pair.first + table["a"][0], "rest": (None, [pair.second * scale]), "kept": Pair("name", 3)}

    x, y = torch.randn(3), torch.randn(2)
    result = torch_call(function, Pair(x, y), {"a": [x, None]}, scale=2.0)
    close(result["sum"], 2 * x)
    assert result["rest"][0] is None
    close(result["rest"][1][0], 2 * y)
    assert result["kept"] == Pair("name", 3)


def test_static_values_reach_the_function_as_they_are():
    def function(x, *values, limits, dtype, nothing):
        assert values == (True, 2, "name") and values[0] is True
        assert limits == (0.0, float("inf")) and type(limits) is tuple
        assert dtype == jnp.bfloat16 and nothing is None
        return x.astype(dtype)

    result = torch_call(
        function, torch.ones(2), True, 2, "name", limits=(0.0, float("inf")), dtype=torch.bfloat16, nothing=None
    )
    assert result.dtype == torch.bfloat16


def test_a_float_is_traced_and_a_static_value_is_not():
    counted = Counted(lambda x, scale, *, flag=0: x * scale + float(flag))
    function = wrap(counted)
    for scale in (0.5, 1.5, -0.0, float("inf")):
        close(function(torch.ones(2), scale), torch.full((2,), scale))
    assert counted.traces == 1
    assert function(torch.ones(2), 1.0, flag=1).tolist() == [2.0, 2.0]
    function(torch.ones(2), 1.0, flag=True)  # 1 and True compare equal, and are told apart
    assert counted.traces == 3


def test_floats_of_a_tuple_without_arrays_are_static():
    counted = Counted(lambda x, bounds: jnp.clip(x, *bounds))
    function = wrap(counted)
    function(torch.ones(2), (0.0, 1.0))
    function(torch.ones(2), (0.0, 1.0))
    assert counted.traces == 1
    function(torch.ones(2), (-0.0, 1.0))
    assert counted.traces == 2


def test_a_float_keeps_the_dtype_of_its_partner():
    assert torch_call(lambda x, s: x * s, torch.ones(2, dtype=torch.bfloat16), 0.5).dtype == torch.bfloat16


def test_numpy_and_jax_arrays_are_traced():
    counted = Counted(lambda x, n, j: x + n + j)
    function, x = wrap(counted), torch.ones(3)
    for value in (1.0, 2.0):
        close(function(x, np.full(3, value, np.float32), jnp.full(3, value)), x + 2 * value)
    assert counted.traces == 1


def test_call_without_tensors():
    close(torch_call(lambda: jnp.arange(3.0)), torch.arange(3.0))
    close(torch_call(lambda scale: jnp.ones(2) * scale, 3.0), torch.full((2,), 3.0))


def test_a_result_that_is_an_argument_is_a_copy():
    x = torch.ones(100)
    first, second = torch_call(lambda x: (x, x), x)
    assert len({x.data_ptr(), first.data_ptr(), second.data_ptr()}) == 3
    constant = jnp.ones(100)
    torch_call(lambda x: (x, constant), x)[1].fill_(5.0)
    assert (constant == 1).all()


def test_zero_sized_and_scalar_tensors():
    assert torch_call(lambda x: x * 2, torch.zeros(0, 3)).shape == (0, 3)
    assert torch_call(lambda x: x * 2, torch.tensor(3.0)).item() == 6.0


# Programs


def test_one_program_for_each_structure_shape_dtype_and_static_value():
    counted = Counted(lambda x, n=1: x * n)
    function = wrap(counted)
    for _ in range(3):
        for x in (torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.int32)):
            function(x)
            function(x, 2)
    assert counted.traces == 6
    assert function.cache_info() == bridge.CacheInfo(hits=12, misses=6, maxsize=256, currsize=6)
    function.cache_clear()
    assert function.cache_info() == bridge.CacheInfo(hits=0, misses=0, maxsize=256, currsize=0)


def test_programs_are_bounded_and_the_least_recently_used_goes():
    counted = Counted(lambda x: x + 1)
    function = wrap(counted, maxsize=2)
    for length in (1, 2, 1, 3, 1, 3):
        function(torch.ones(length))
    assert counted.traces == 3 and function.cache_info().currsize == 2
    function(torch.ones(2))
    assert counted.traces == 4


def test_settings_of_jax_are_part_of_the_program():
    counted = Counted(lambda x: x @ x)
    function, x = wrap(counted), torch.ones(2, 2)
    function(x)
    with jax.default_matmul_precision("highest"):
        function(x)
    function(x)
    assert counted.traces == 2


def test_the_shared_cache_counts_too():
    bridge.cache_clear()
    torch_call(jnp.cos, torch.ones(7))
    torch_call(jnp.cos, torch.ones(7))
    assert bridge.cache_info()[:2] == (1, 1)


def test_no_retracing_and_no_recompilation_over_a_training_loop():
    counted = Counted(lambda x, w: jnp.tanh(x @ w))
    function, w = wrap(counted), torch.nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.SGD([w], lr=0.1)
    with jax.log_compiles(False):
        for step in range(5):
            optimizer.zero_grad()
            function(torch.randn(8, 4), w).square().sum().backward()
            optimizer.step()
            if step == 0:
                first = function.cache_info().misses, counted.traces
    assert (function.cache_info().misses, counted.traces) == first == (1, 1)


def test_threads_share_programs():
    counted = Counted(lambda x: jnp.sin(x) * 2)
    function, failures = wrap(counted), []

    def work(start):
        generator = torch.Generator().manual_seed(start)
        for _ in range(50):
            x = torch.randn(64, generator=generator, requires_grad=True)
            y = function(x)
            y.sum().backward()
            if not torch.allclose(x.grad, 2 * x.cos(), atol=1e-5):
                failures.append(start)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and counted.traces == 1


@pytest.mark.parametrize("value", [3, "name", None])
def test_what_is_no_function_is_refused(value):
    with pytest.raises(TypeError, match="fn: expected a hashable function"):
        torch_call(value, torch.ones(1))
    with pytest.raises(TypeError, match="fn: expected a hashable function"):
        wrap(value)


def test_an_empty_cache_is_refused():
    with pytest.raises(ValueError, match=r"maxsize: .*given 0"):
        wrap(jnp.sin, maxsize=0)


def test_unhashable_static_value_is_refused_by_name():
    with pytest.raises(TypeError, match=r"options: .*given a set"):
        torch_call(lambda x, options: x, torch.ones(1), {1, 2})


def test_an_error_in_the_function_propagates_and_nothing_is_kept():
    function = wrap(lambda x: x.reshape(7))
    with pytest.raises(TypeError, match="reshape"):
        function(torch.ones(2))
    assert function.cache_info().currsize == 0


def test_parameters_are_imported_once():
    w = torch.nn.Parameter(torch.randn(16))
    function = wrap(lambda x, w: x * w)
    with torch.no_grad(), crossings() as seen:
        for _ in range(3):
            function(torch.ones(16), w)
    assert sum(tensor == w.data_ptr() for tensor, _ in seen["in"]) == 1


@pytest.mark.parametrize("change", ["in place", "new data", "through data", "transposed data"])
def test_a_changed_parameter_is_seen(change):
    w = torch.nn.Parameter(torch.randn(16, 16))
    function = wrap(lambda x, w: x * w)
    with torch.no_grad():
        function(torch.ones(16, 16), w)
        if change == "in place":
            w.add_(1.0)
        elif change == "new data":
            w.data = torch.randn(16, 16)
        elif change == "through data":
            w.data.add_(1.0)
        else:
            w.data = w.data.t()
        close(function(torch.ones(16, 16), w), w.detach())


def test_parameters_without_a_version_are_imported_each_time():
    with torch.inference_mode(), crossings() as seen:
        w = torch.nn.Parameter(torch.randn(16), requires_grad=False)
        for _ in range(2):
            torch_call(jnp.sin, w)
    assert sum(tensor == w.data_ptr() for tensor, _ in seen["in"]) == 2


def test_a_dead_parameter_is_forgotten():
    bridge.cache_clear()
    w = torch.nn.Parameter(torch.randn(16))
    torch_call(jnp.sin, w).sum().backward()
    assert len(constant_imports) == 1
    del w
    gc.collect()
    assert len(constant_imports) == 0
