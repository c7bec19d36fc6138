"""Philox words of a state tile that is rounded once, when it is stored."""

import triton
import triton.language as tl

from jax_ssd.kernels.triton.rounding import philox4x32, together


@triton.jit
def _words(element, k0, k1, ROUNDS: tl.constexpr):
    """Four words for offsets (int64, multiples of 4); step 0."""
    low = (element & 0xFFFFFFFF).to(tl.uint32)
    high = ((element >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros_like(low)
    return philox4x32(low, high, zero, zero, k0 + zero, k1 + zero, ROUNDS)


@triton.jit
def tile_words(base, p, n, k0, k1, DSTATE: tl.constexpr, ROUNDS: tl.constexpr):
    """[p, n] uint32: word e % 4 of the call at e - e % 4, e = base + p * DSTATE + n."""
    if DSTATE % 4 == 0:
        # A call serves four columns.
        column = tl.arange(0, n.shape[0] // 4) * 4
        w0, w1, w2, w3 = _words(base + p[:, None] * DSTATE + column[None, :], k0, k1, ROUNDS)
        words = together(w0, w1, w2, w3, p.shape[0], n.shape[0])
    else:
        element = base + p[:, None] * DSTATE + n[None, :]
        w0, w1, w2, w3 = _words(element & -4, k0, k1, ROUNDS)
        which = element & 3
        words = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    return words
