"""First launch of the scan: dt as the recurrence uses it and its sums in each chunk, with tokens in the fastest axis.

Chunks and segments are found on the device. Block i of sequence s (blocks of `LENGTH` tokens from the sequence's start)
has the place cu_seqlens[s] // LENGTH + s + i: no two share one, and places end before tokens // LENGTH + sequences.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def wide(number):
    """An integer with 64 bits; loop counters are plain integers under Triton's interpreter."""
    return number + tl.full((), 0, tl.int64)


@triton.jit
def bound_of(cu_seqlens_ptr, seq, num_tokens):
    """cu_seqlens[seq], kept within the tokens."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + seq), 0), num_tokens)


@triton.jit
def locate(cu_seqlens_ptr, place, num_tokens, num_seqs, LENGTH: tl.constexpr, SEQS: tl.constexpr):
    """(sequence, its first and its end token, first token of the block) at a place; LENGTH 0: a block is a sequence."""
    if LENGTH == 0:
        seq = place
    else:
        before = tl.zeros((SEQS,), tl.int32)
        for first in range(0, num_seqs, SEQS):
            each = first + tl.arange(0, SEQS)
            bound = tl.load(cu_seqlens_ptr + each, mask=each < num_seqs, other=0)
            bound = tl.minimum(tl.maximum(bound, 0), num_tokens)
            before += ((each < num_seqs) & (bound // LENGTH + each <= place)).to(tl.int32)
        seq = tl.sum(before, axis=0) - 1
    begin = bound_of(cu_seqlens_ptr, seq, num_tokens)
    end = tl.maximum(bound_of(cu_seqlens_ptr, seq + 1, num_tokens), begin)
    start = begin if LENGTH == 0 else begin + (place - begin // LENGTH - seq) * LENGTH
    return seq, begin, end, start


@triton.jit
def softplus(value):
    """log(1 + exp(value)) without overflow, exact at both ends."""
    small = tl.exp2(-tl.abs(value) * LOG2_E)
    # log1p by Kahan's quotient: where 1 + small rounds to 1 the correction is small itself.
    total = 1.0 + small
    correction = tl.where(total == 1.0, small, tl.log(total) * (small / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.maximum(value, 0.0) + correction


@triton.jit
def step_size(dt, bias, SOFTPLUS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """clip(softplus(dt + bias), LOW, HIGH)."""
    dt = dt + bias
    if SOFTPLUS:
        dt = softplus(dt)
    return tl.minimum(tl.maximum(dt, LOW), HIGH)


@triton.jit
def _later(left, right):
    return tl.maximum(left, right)


@triton.jit
def _restarting_sum(left_restart, left, right_restart, right):
    return left_restart | right_restart, tl.where(right_restart != 0, right, left + right)


@triton.jit
def document_starts(seq_idx_ptr, start, begin, row, live):
    """(CHUNK,) row at which each row's document starts, -1 where that is before the chunk."""
    token = start + row
    here = tl.load(seq_idx_ptr + token, mask=live, other=0)
    previous = tl.load(seq_idx_ptr + token - 1, mask=live & (token > begin), other=0)
    changed = live & (token > begin) & (here != previous)
    return tl.associative_scan(tl.where(changed, row, -1), 0, _later)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def prepare(
    dt_ptr,  # (t,h)
    A_ptr,  # (h,)
    dt_bias_ptr,  # (h,)
    cu_seqlens_ptr,  # (s+1,)
    seq_idx_ptr,  # (t,)
    num_tokens,
    num_seqs,
    step_ptr,  # out (h,t): dt
    sums_ptr,  # out (h,t): sums of dt * A, in units of log 2, from the start of the chunk or of the document in it
    since_ptr,  # out (t,): `document_starts`
    NUM_HEADS: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    SEQS: tl.constexpr,
):
    """One program for each chunk and each block of heads."""
    HEAD_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    place = tl.program_id(0) // HEAD_BLOCKS
    block = tl.program_id(0) % HEAD_BLOCKS
    _, begin, end, start = locate(cu_seqlens_ptr, place, num_tokens, num_seqs, CHUNK, SEQS)
    row = tl.arange(0, CHUNK)
    head = block * HEADS + tl.arange(0, HEADS)
    live = start + row < end
    known = head < NUM_HEADS

    decay = tl.load(A_ptr + head, mask=known, other=0.0) * LOG2_E
    bias = tl.zeros((HEADS,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias_ptr + head, mask=known, other=0.0).to(tl.float32)
    tile = live[:, None] & known[None, :]
    dt_rows = dt_ptr + start.to(tl.int64) * DT_STRIDE
    dt = tl.load(dt_rows + row[:, None] * DT_STRIDE + head[None, :], mask=tile, other=0.0).to(tl.float32)
    dt = tl.where(tile, step_size(dt, bias[None, :], SOFTPLUS, LOW, HIGH), 0.0)

    steps = dt * decay[None, :]
    if DOCUMENTS:
        since = document_starts(seq_idx_ptr, start, begin, row, live)
        restart = tl.broadcast_to((since == row).to(tl.int32)[:, None], (CHUNK, HEADS))
        _, sums = tl.associative_scan((restart, steps), 0, _restarting_sum)
        if block == 0:
            tl.store(since_ptr + start + row, since, mask=live)
    else:
        sums = tl.cumsum(steps, axis=0)
    out = head.to(tl.int64)[None, :] * num_tokens + start + row[:, None]
    tl.store(step_ptr + out, dt, mask=tile)
    tl.store(sums_ptr + out, sums, mask=tile)
