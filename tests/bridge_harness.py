"""What the tests of the bridge share."""

import contextlib
import os

# JAX would take three quarters of a GPU before torch has any of it; read when JAX first looks for devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pytest

torch = pytest.importorskip("torch")

from bridge.streams import endpoint  # noqa: E402

close = torch.testing.assert_close


def gradients(function, *inputs):
    """Gradients of the sum of `function`'s result."""
    copies = [one.detach().clone().requires_grad_(one.is_floating_point() or one.is_complex()) for one in inputs]
    result = function(*copies)
    (result.real if result.is_complex() else result).sum().backward()
    return [copy.grad for copy in copies]


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, function):
        self.function, self.traces = function, 0

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.function(*args, **kwargs)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@contextlib.contextmanager
def crossings():
    """Collects (tensor address, array address) of each import and export on the CPU."""
    host, seen = endpoint(torch.device("cpu")), {"in": [], "out": []}
    take, give = host.take, host.give

    def spy_take(tensor, order):
        array = take(tensor, order)
        seen["in"].append((tensor.data_ptr(), array.unsafe_buffer_pointer()))
        return array

    def spy_give(array, order):
        tensor = give(array, order)
        seen["out"].append((tensor.data_ptr(), array.unsafe_buffer_pointer()))
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "take", spy_take)
        patch.setattr(host, "give", spy_give)
        yield seen
