"""torch_call inside torch.compile(fullgraph=True): the same results, gradients and structures as without it."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from bridge import compiled, torch_call, wrap  # noqa: E402
from tests.bridge_harness import Counted, close, seed  # noqa: E402, F401

Pair = collections.namedtuple("Pair", "first second")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def layer(x, table, pair, *, scale, name, flag, bounds, nothing, dtype):
    assert (name, flag, nothing, bounds) == ("name", True, None, (0.0, float("inf"))) and dtype == jnp.float32
    y = jnp.tanh(x * table["w"]) * scale + pair.first * pair.second
    return Pair(y, {"largest": jnp.argmax(y), "exp": [jnp.exp(x), None], "three": 3})


def options():
    return dict(scale=0.5, name="name", flag=True, bounds=(0.0, float("inf")), nothing=None, dtype=torch.float32)


CALLS = {
    "torch_call": lambda *args, **kwargs: torch_call(layer, *args, **kwargs),
    "wrap": wrap(layer),
    "wrapped closure": wrap(lambda *args, **kwargs: layer(*args, **kwargs)),
}
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_graph_equals_eager(name, backend, dynamic):
    call = CALLS[name]

    def module(x, w):
        result = call(x * 1.5, {"w": w}, Pair(x, 2), **options())
        return result.first.sin() + result.second["exp"][0] * result.second["three"]

    torch.compiler.reset()
    graph = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
    for length in (3, 3, 4):
        x, w = torch.randn(length, 2, requires_grad=True), torch.randn(2, requires_grad=True)
        found = torch.autograd.grad(graph(x, w).sum(), (x, w))
        for gradient, expected in zip(found, torch.autograd.grad(module(x, w).sum(), (x, w)), strict=True):
            close(gradient, expected)
        with torch.no_grad():
            close(graph(x, w), module(x, w))


@pytest.mark.parametrize("function", [jnp.sin, jax.jit(jnp.sin), lambda x: jnp.sin(x)], ids=["jnp", "jit", "lambda"])
def test_any_kind_of_function(function):
    torch.compiler.reset()
    x = torch.randn(3)
    graph = torch.compile(lambda x: torch_call(function, x) + 1, fullgraph=True, backend="aot_eager")
    close(graph(x), x.sin() + 1)


def test_fake_kernels_trace_once_a_shape_and_never_run_the_function():
    counted = Counted(lambda x: jnp.sin(x) * 2)
    torch.compiler.reset()
    graph = torch.compile(lambda x: torch_call(counted, x), fullgraph=True, backend="aot_eager", dynamic=False)
    for length in (3, 4, 3, 4, 3):
        close(graph(torch.ones(length)), torch.ones(length).sin() * 2)
    assert counted.traces == 2


def test_integers_strides_and_unused_results():
    def module(x, i):
        picked, _, largest = torch_call(lambda x, i: (x[i], jnp.cos(x), jnp.argmax(x)), x.t()[:, ::2], i)
        return picked, largest

    torch.compiler.reset()
    graph = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, i = torch.randn(4, 5, requires_grad=True), torch.tensor([2, 0, 2])
    picked, largest = graph(x, i)
    expected = x.t()[:, ::2]
    close(picked, expected[i])
    assert largest.item() == expected.argmax() and not largest.requires_grad
    (found,) = torch.autograd.grad(picked.sum(), x)
    close(found, torch.autograd.grad(expected[i].sum(), x)[0])


def test_operators_pass_torchs_own_check():
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    site = compiled._site(lambda x, w: (jnp.tanh(x) * w, jnp.argmax(x)), compiled.form_of(((x, w), {}), []))
    torch.library.opcheck(torch.ops.jax_bridge.call, ([x, w], site, [0]))
    torch.library.opcheck(torch.ops.jax_bridge.call, ([x.detach(), w], site, []))


def test_a_refused_dtype_is_refused_while_compiling():
    torch.compiler.reset()
    graph = torch.compile(lambda x: torch_call(jnp.sin, x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="float64"):
        graph(torch.ones(2, dtype=torch.float64))


def test_a_result_of_another_kind_is_refused_with_the_reason():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box:
        value: jax.Array

    torch.compiler.reset()
    graph = torch.compile(lambda x: torch_call(lambda x: Box(x), x).value, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="tuples, lists and dicts, not a Box"):
        graph(torch.ones(2))
