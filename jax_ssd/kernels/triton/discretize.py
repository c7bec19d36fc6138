"""Elementwise parts of the recurrence that every decode kernel shares, in float32."""

import triton
import triton.language as tl


@triton.jit
def softplus(value):
    """log(1 + exp(value)), exact to a few units in the last place for small and large arguments alike."""
    small = tl.exp(-tl.abs(value))
    # log1p(small) = 2 atanh(small / (2 + small)); the argument is at most 1/3, so 8 terms reach float32's last digit.
    ratio = small / (2.0 + small)
    square = ratio * ratio
    series = 1.0 / 15.0
    series = series * square + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = series * square + 1.0
    return tl.maximum(value, 0.0) + 2.0 * ratio * series


@triton.jit
def step_size(dt, bias, SOFTPLUS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """clip(softplus(dt + bias), LOW, HIGH); `bias` None adds nothing. NaN stays NaN."""
    if bias is not None:
        dt += bias
    if SOFTPLUS:
        dt = softplus(dt)
    # Comparisons, not minimum and maximum, which would turn NaN into a bound.
    dt = tl.where(dt < LOW, LOW, dt)
    return tl.where(dt > HIGH, HIGH, dt)


@triton.jit
def gate(y, z):
    """y * silu(z); 0 for a very negative z, whose exponential overflows."""
    return y * (z / (1.0 + tl.exp(-z)))
