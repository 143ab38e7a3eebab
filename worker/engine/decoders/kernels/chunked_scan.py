"""Computes recurrences over chunks of prompts, in pieces of several rows.

See Yang et al. 2024, "Parallelizing linear transformers with the delta rule", and Dao and Gu 2024,
"Transformers are SSMs". Operands of products have the dtype of the rows, sums are in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import dot
from promptq.worker.engine.decoders.kernels.scan_tokens import inverse_lengths, key_decays, rates_of
from promptq.worker.engine.decoders.kernels.sequences import sequence_at


@triton.jit
def solved(system: tl.tensor, wanted: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """Returns the solution x [rows, columns] of `x + trans(system) x = wanted`. `system` [rows,
    rows] is zero except above its diagonal."""
    row = tl.arange(0, wanted.shape[0])
    for index in range(1, num_rows):
        factors = tl.sum(tl.where((row == index)[None, :], system, 0.0), 1)
        taken = tl.sum(factors[:, None] * wanted, 0)
        wanted -= tl.where((row == index)[:, None], taken[None, :], 0.0)
    return wanted


@triton.jit
def decayed_products(q: tl.tensor, k: tl.tensor, decay: tl.tensor) -> tl.tuple:
    """Returns the products of keys with keys, the products of queries with keys, and two tables of
    decays. Each number of a key decays separately. `decay` [rows, keys] has the logarithms of the
    decays from row to row.

    In the products, the key of row j has decayed until row i. There are four results. The first has
    at [j, i] the product of the keys of rows j and i. The second has at [i, j] the product of row
    i's query and row j's key. Products are 0 unless j <= i. The third [rows, keys] has the decays
    up to each row, and the fourth has the decays after each row.
    """
    SIZE: tl.constexpr = q.shape[0]
    row = tl.arange(0, SIZE)
    q, k = q.to(tl.float32), k.to(tl.float32)
    system, scores = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, SIZE), tl.float32)
    between, to_end = tl.zeros(decay.shape, tl.float32), tl.zeros(decay.shape, tl.float32)
    for index in range(SIZE):
        # Sums of decays after the row up to each later row. The loop goes backwards and adds to
        # the sums, because differences would lose too many bits.
        is_its = row == SIZE - 1 - index
        is_later = (row >= SIZE - 1 - index)[:, None]
        its_key = tl.sum(tl.where(is_its[:, None], k, 0.0), 0)
        its_decay = tl.sum(tl.where(is_its[:, None], decay, 0.0), 0)
        decayed = tl.where(is_later, tl.exp(between), 0.0) * its_key[None, :]
        system = tl.where(is_its[:, None], tl.sum(decayed * k, 1)[None, :], system)
        scores = tl.where(is_its[None, :], tl.sum(decayed * q, 1)[:, None], scores)
        last = tl.sum(tl.where((row == SIZE - 1)[:, None], between, 0.0), 0)
        to_end = tl.where(is_its[:, None], last[None, :], to_end)
        between += tl.where(is_later, its_decay[None, :], 0.0)
    return system, scores, tl.exp(between), tl.exp(to_end)


@triton.jit(do_not_specialize=["num_sequences"])  # it differs from step to step
def chunked_scan_kernel(
    convolved: tl.tensor,
    rates: tl.tensor,
    decays: tl.tensor,
    biases: tl.tensor,
    skips: tl.tensor,
    states: tl.tensor,
    table: tl.tensor,
    output: tl.tensor,
    num_sequences: tl.tensor,
    rate_stride: tl.tensor,
    least_time: tl.tensor,
    most_time: tl.tensor,
    most_rate: tl.tensor,
    query_scale: tl.tensor,
    QUERY_FIRST: tl.constexpr,
    KEY_FIRST: tl.constexpr,
    VALUE_FIRST: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    IS_DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_KEY_DECAYS: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Each Triton program computes one chunk, for one value head and one tile of state columns.

    A piece is some successive rows. The state changes of these rows are the solution of a
    triangular system. Drafted rows are in separate pieces at the end, and do not change the stored
    state.
    """
    NUM_TILES: tl.constexpr = (VALUE_SIZE + VALUE_TILE - 1) // VALUE_TILE
    index = num_sequences - 1 - tl.program_id(0)  # the last chunks are the longest
    read, written, first, count, known = sequence_at(table, index, num_sequences)
    if count < 2:  # in a padded step
        return
    head, tile = tl.program_id(1) // NUM_TILES, tl.program_id(1) % NUM_TILES
    row, key = tl.arange(0, PIECE), tl.arange(0, KEY_TILE)
    value = tile * VALUE_TILE + tl.arange(0, VALUE_TILE)
    is_key, is_value = key < KEY_SIZE, value < VALUE_SIZE
    place = key[:, None] * VALUE_SIZE + value[None, :]
    mask = is_key[:, None] & is_value[None, :]
    before = states + (read * NUM_HEADS + head) * KEY_SIZE * VALUE_SIZE
    after = states + (written * NUM_HEADS + head) * KEY_SIZE * VALUE_SIZE
    state = tl.load(before + place, mask=mask, other=0.0)

    is_later = row[:, None] > row[None, :]
    is_seen = row[:, None] >= row[None, :]
    no_scores = tl.zeros((PIECE, PIECE), tl.float32)
    no_values = tl.zeros((PIECE, VALUE_TILE), tl.float32)
    known_pieces = (known + PIECE - 1) // PIECE
    num_pieces = known_pieces + (count - known + PIECE - 1) // PIECE
    for piece in range(num_pieces):
        is_known = piece < known_pieces
        begin = tl.where(is_known, piece * PIECE, known + (piece - known_pieces) * PIECE)
        end = tl.minimum(begin + PIECE, tl.where(is_known, known, count))
        is_row = begin + row < end
        line = first + begin + row
        source = convolved + (line * NUM_CHANNELS)[:, None]
        keys = source + (head // GROUP) * KEY_SIZE + key[None, :]
        is_number = is_row[:, None] & is_key[None, :]
        k = tl.load(keys + KEY_FIRST, mask=is_number, other=0.0)
        q = tl.load(keys + QUERY_FIRST, mask=is_number, other=0.0)
        # Keys and queries are scaled after products, so that products share their operands.
        key_scale, scale = is_row.to(tl.float32), is_row.to(tl.float32) * query_scale
        if IS_DELTA:
            key_scale, scale = inverse_lengths(k), inverse_lengths(q) * query_scale
        is_number = is_row[:, None] & is_value[None, :]
        values = source + VALUE_FIRST + head * VALUE_SIZE + value[None, :]
        v = tl.load(values, mask=is_number, other=0.0).to(tl.float32)
        decay, rate = rates_of(
            rates + line * rate_stride,
            is_row,
            head,
            decays,
            biases,
            least_time,
            most_time,
            most_rate,
            NUM_HEADS,
            IS_DELTA,
        )
        # Sums of decays after a row (column) up to this one. Differences would lose too many bits.
        of_later = tl.where(is_later, decay[:, None], 0.0)
        from_begin, to_end = tl.exp(tl.cumsum(decay, 0)), tl.exp(tl.sum(of_later, 0))
        whole = tl.exp(tl.sum(decay, 0))
        if HAS_KEY_DECAYS:
            decay = key_decays(
                (rates + line * rate_stride)[:, None],
                biases,
                decays,
                is_row[:, None] & is_key[None, :],
                head,
                key,
                least_time,
                most_time,
                NUM_HEADS,
                KEY_SIZE,
            )
            system, scores, from_begin, to_end = decayed_products(q, k, decay)
            whole = tl.exp(tl.sum(decay, 0))[:, None]
            q, old_k = (q * from_begin).to(k.dtype), (k * from_begin).to(k.dtype)
            k = (k * to_end).to(k.dtype)
            from_begin = tl.full((PIECE,), 1.0, tl.float32)
            to_end = from_begin
        else:
            between = tl.where(is_seen, tl.exp(tl.cumsum(of_later, 0)), 0.0)
            scores, old_k = dot(q, tl.trans(k), no_scores) * between, k
            system = scores
            if IS_DELTA:
                system = dot(k, tl.trans(k), no_scores) * tl.trans(between)

        change, rounded = v * rate[:, None], state.to(k.dtype)
        if IS_DELTA:
            old = dot(old_k, rounded, no_values)
            change -= (rate * key_scale * from_begin)[:, None] * old
            # Row j has what each later row i takes from the change of j.
            system *= (rate * key_scale)[None, :] * key_scale[:, None]
            system = tl.where(row[:, None] < row[None, :], system, 0.0)
            change = solved(system, change, end - begin)
        scores *= scale[:, None] * key_scale[None, :]
        result = dot(q, rounded, no_values) * (scale * from_begin)[:, None]
        result = dot(scores.to(k.dtype), change.to(k.dtype), result)
        if HAS_SKIP:
            result += tl.load(skips + head) * v
        target = output + (line * NUM_HEADS * VALUE_SIZE)[:, None] + head * VALUE_SIZE
        tl.store(target + value[None, :], result, mask=is_number)
        state *= whole
        change *= (key_scale * to_end)[:, None]
        state = dot(tl.trans(k), change.to(k.dtype), state)
        if piece == known_pieces - 1:
            tl.store(after + place, state, mask=mask)
