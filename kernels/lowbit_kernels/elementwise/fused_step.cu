// One step of an optimizer over many tensors: decode the states, update in float32, encode, in one launch.
//
// fused_step.py compiles this file once for each variant: the macros that fused_step.h lists, and SCALED, which says
// whether gradients are multiplied by a factor from memory (unscaling, clipping).
//
// A tile is 256 elements of one row of one tensor. A warp works on a tile, a lane on eight neighbouring elements, so
// that bf16 takes 16-byte accesses. A block of 8-bit states is a tile, so its absmax is one warp-wide maximum; a block
// of 4-bit states is half a tile. Only loads and stores depend on the addresses, so results do not depend on alignment
// or sharding.
//
// With an odd number of columns, rows begin at any address. The eight elements of a lane begin at a multiple of eight
// in the tensor nevertheless, so that they take 16-byte accesses. A tile then touches up to 33 such groups of eight.
// The first and the last group belong to the tile only in part, eight elements together; lane 0 works on both:
//
//     group       0         1         ...   31        32
//     elements    .....###  ########  ...   ########  #####...
//     lane             0    1               31        0
//
// Codes of 4 bits have no such groups, because each row of them begins with a byte of its own.
//
// A weight of codes (CODE_BITS) is updated row by row, each by one block of threads: see `step_rows`.

// ---- a tile's work -------------------------------------------------------------------------------------------------

DEVICE void decode_weights(const Floats<PARAM> &stored, const Tensor &, const Row &, const Offsets &, float w[8]) {
    stored.decode(w);
}

DEVICE void encode_weights(Floats<PARAM> &stored, const Tensor &t, const Scalars &k, const Row &, const Offsets &at, int,
                           float w[8]) {
    if constexpr (ROUNDING == STOCHASTIC) {
        round_stochastically(t, k.keys[0], at, w);
        stored.truncate(w);
    } else {
        stored.encode(w);
    }
}

template <int BITS>
struct Weights { typedef Codes Type; };
template <>
struct Weights<0> { typedef Floats<PARAM> Type; };

// A lane's part of a tile, in the stored formats.
struct Work {
    Floats<GRAD> grad;
    Weights<CODE_BITS>::Type param;
    Correction correction;
    State<0> s0;
    State<1> s1;
    State<2> s2;
};

template <bool VECTOR>
DEVICE void load_tile(Work &work, const Tensor &t, const Offsets &at) {
    work.grad.load<VECTOR>(t.grad, at);
    work.param.load<VECTOR>(t.param, at);
    if constexpr (STATES > 0) work.s0.load<VECTOR>(t, at);
    if constexpr (STATES > 1) work.s1.load<VECTOR>(t, at);
    if constexpr (STATES > 2) work.s2.load<VECTOR>(t, at);
    if constexpr (CORRECTION_BYTES > 0 && ERROR != TRIED) work.correction.load<VECTOR>(t.correction, at);
}

template <bool VECTOR>
DEVICE void store_weights(Work &work, const Tensor &t, const Offsets &at) {
    if constexpr (!TWO_PARTS) work.param.store<VECTOR>(t.param, at);
    if constexpr (CORRECTION_BYTES > 0) work.correction.store<VECTOR>(t.correction, at);
}

template <int SLOT>
DEVICE void encode_and_store(State<SLOT> &state, const Tensor &t, const Scalars &k, const Offsets &at, int lane,
                             const uint32 *table, float x[8]) {
    state.encode(t, k, at, lane, table, x);
    if (at.whole) state.template store<true>(t, at, lane);
    else state.template store<false>(t, at, lane);
}

// Replace the first `at.far` elements by those a tile further on.
DEVICE void load_far(Work &work, const Tensor &t, const Offsets &at) {
    const Offsets there = far_of(t, at);
    Work far;
    if (there.vector) load_tile<true>(far, t, there);
    else load_tile<false>(far, t, there);
    work.grad.take_far(far.grad, at.far);
    work.param.take_far(far.param, at.far);
    if constexpr (STATES > 0) work.s0.take_far(far.s0, at.far);
    if constexpr (STATES > 1) work.s1.take_far(far.s1, at.far);
    if constexpr (STATES > 2) work.s2.take_far(far.s2, at.far);
    if constexpr (CORRECTION_BYTES > 0 && ERROR != TRIED) work.correction.take_far(far.correction, at.far);
}

// Prefetches the next tiles of a block into the L2 cache, if they belong to one tensor.
DEVICE void prefetch_tiles(const Tensor &t, uint32 tile, int count) {
    const uint32 n = tile - (uint32)t.first_tile;
    if (!t.aligned) return;
    const Start from = start_of(t, n), to = start_of(t, n + count);
    if (to.element > t.numel) return;
    prefetch_bytes(t.grad, from.element * Floats<GRAD>::BYTES, to.element * Floats<GRAD>::BYTES);
    constexpr int BITS = CODE_BITS != 0 ? CODE_BITS : 8 * Floats<PARAM>::BYTES;
    prefetch_bytes(t.param, from.element * BITS / 8, to.element * BITS / 8);
    if constexpr (CORRECTION_BYTES > 0 && ERROR != TRIED)
        prefetch_bytes(t.correction, from.element * CORRECTION_BYTES, to.element * CORRECTION_BYTES);
    if constexpr (STATES > 0) State<0>::prefetch_values(t, from, to);
    if constexpr (STATES > 1) State<1>::prefetch_values(t, from, to);
    if constexpr (STATES > 2) State<2>::prefetch_values(t, from, to);
}

// `row`: of weights that are codes.
DEVICE void step_at(const Tensor &t, const Scalars &k, float factor, const Offsets &at, int lane, const uint32 *table,
                    const Row &row) {
    Work work;
    if (at.vector) load_tile<true>(work, t, at);
    else load_tile<false>(work, t, at);
    if (GROUPED && at.far) load_far(work, t, at);

    float c[COEFFICIENTS], g[8], w[8], x0[8] = {}, x1[8] = {}, x2[8] = {};
#pragma unroll
    for (int i = 0; i < COEFFICIENTS; ++i) c[i] = k.c[i];
    work.grad.decode(g);
    decode_weights(work.param, t, row, at, w);
    if constexpr (ROUNDING == CORRECTED || ROUNDING == EXACT) decode_corrected(work.correction, w);
    if constexpr (STATES > 0) work.s0.decode(lane, table, x0);
    if constexpr (STATES > 1) work.s1.decode(lane, table, x1);
    if constexpr (STATES > 2) work.s2.decode(lane, table, x2);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float s[3] = {x0[i], x1[i], x2[i]};
        update_element(c, SCALED ? g[i] * factor : g[i], w[i], s);
        if constexpr (ERROR == GIVEN) compensate_element(c, bits_float(work.correction.raw.word[i]), s);
        if constexpr (ERROR == TRIED) work.correction.raw.word[i] = float_bits(w[i]);
        x0[i] = s[0], x1[i] = s[1], x2[i] = s[2];
    }
    float before[8];
    if constexpr (ERROR == RETURNED) {
#pragma unroll
        for (int i = 0; i < 8; ++i) before[i] = w[i];
    }
    if constexpr (ROUNDING == CORRECTED || ROUNDING == EXACT) encode_corrected(w, work.correction);
    encode_weights(work.param, t, k, row, at, lane, w);
    if constexpr (CODE_BITS != 0 && ERROR == RETURNED) {
        if (!row.is_measured) return;
    }
    if constexpr (ERROR == RETURNED) {
        work.param.decode(w);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float s[3] = {x0[i], x1[i], x2[i]};
            compensate_element(c, before[i] - w[i], s);
            x0[i] = s[0], x1[i] = s[1], x2[i] = s[2];
        }
    }
    if constexpr (ERROR != GIVEN) {
        if (at.whole) store_weights<true>(work, t, at);
        else store_weights<false>(work, t, at);
    }
    if constexpr (ERROR == TRIED) return;
    if constexpr (STATES > 0) encode_and_store(work.s0, t, k, at, lane, table, x0);
    if constexpr (STATES > 1) encode_and_store(work.s1, t, k, at, lane, table, x1);
    if constexpr (STATES > 2) encode_and_store(work.s2, t, k, at, lane, table, x2);
}

// A tile on the short path; `n` counts the tiles of the tensor.
DEVICE void step_short(const Tensor *t, const Scalars *k, float factor, uint32 n, int lane, const Row &row) {
    const Offsets at = locate_short(*k, n, lane);
    if constexpr (STATES < 3) step_at(constant_load(t), *k, factor, at, lane, table, row);
    else step_at(*t, *k, factor, at, lane, table, row);  // read where needed, to save registers
}

// Any tile. It reads an entry of the table where it needs the entry, not before the paths part.
DEVICE void step_any(const Tensor *t, const Scalars *k, float factor, uint32 n, int lane, const Row &row) {
    t = hidden(t), k = hidden(k);
    step_at(*t, *k, factor, locate_lane(*t, n, lane), lane, table, row);
}

// The tensor of a tile: the last one that begins at this tile or before.
DEVICE uint32 tensor_of(const Tensor *tensors, const int *locate, uint32 tile) {
    int low = locate[tile / LOCATE], high = locate[tile / LOCATE + 1];
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if ((uint32)tensors[middle].first_tile <= tile) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Row `n` of all, whose maxima are in the first or second half of their memory.
DEVICE Row row_of(const Tensor *tensors, const Scalars *scalars, const int *locate, uint32 n, uint32 half) {
    Row row;
    row.tensor = tensor_of(tensors, locate, n);
    const Tensor &t = tensors[row.tensor];
    row.number = n - scalars[row.tensor].first_tile, row.first = row.number * t.width;
    row.width = (uint32)t.width, row.scales = CODE_BITS == 8 ? 1 : row.width / (uint32)t.scale_width;
    row.values = (uint4 *)row_memory;
    row.largest = (uint32 *)(row.values + (ERROR == DROPPED ? row.width / 4 : 0)) + half * 2 * row.scales;
    row.before = (float *)(row.largest + row.scales);
    return row;
}

DEVICE void begin_row(const Tensor *tensors, const Row &row) {
    const float *scale = tensors[row.tensor].param_scale + (uint64)row.number * row.scales;
    for (uint32 i = threadIdx.x; i < row.scales; i += blockDim.x) row.largest[i] = 0, row.before[i] = scale[i];
}

// The rows of weights that are codes, `rows` in all. Each block takes one row after another. Its warps update the row's
// tiles and keep the new values in shared memory. Then the scales are known, and the block rounds the row. Where rounding
// errors go into the states, the warps keep and store nothing before the scales are known. Then they read the tiles again,
// from the cache, update them once more, round the weights and store all.
DEVICE void step_rows(const Tensor *tensors, const Scalars *scalars, const int *locate, uint32 rows, float factor) {
    const uint32 warps = blockDim.x / 32;
    const int lane = threadIdx.x % 32;
    bool begun = false;
    uint32 half = 0;
    for (uint32 n = blockIdx.x; n < rows; n += gridDim.x, half ^= 1) {
        Row row = row_of(tensors, scalars, locate, n, half);
        if (!begun) {
            begin_row(tensors, row);
            __syncthreads();
        }
        const Tensor &t = tensors[row.tensor];
        const Scalars *k = scalars + row.tensor;
        const uint32 tiles = (row.width + TILE - 1) / TILE, first = row.number * tiles, next = row.number + gridDim.x;
        // The next row's maxima have memory beside this row's only if it is as wide.
        begun = (next + 1) * t.width <= t.numel;
        if (begun && threadIdx.x == 0) prefetch_tiles(t, (uint32)t.first_tile + next * tiles, tiles);
        row.place = t.place[row.number], row.is_measured = false;
#pragma unroll 1
        for (int pass = 0; pass < (ERROR == RETURNED ? 2 : 1); ++pass) {
            for (uint32 tile = first + threadIdx.x / 32; tile < first + tiles; tile += warps) {
                if (for_warp(tile < k->short_tiles)) step_short(&t, k, factor, tile, lane, row);
                else step_any(&t, k, factor, tile, lane, row);
            }
            __syncthreads();
            row.is_measured = true;
        }
        if (begun) begin_row(tensors, row_of(tensors, scalars, locate, n + gridDim.x, half ^ 1));
        if (threadIdx.x == 0) t.place[row.number] = (long long)((uint64)row.place + (uint64)NEXT);
        if constexpr (ERROR == DROPPED) round_row(t, row);
        __syncthreads();
    }
}

// ---- the kernels -------------------------------------------------------------------------------------------------

// A thread for each tensor: see `prepare_tensor`.
// `control` is null, or holds the factor of the gradients and whether to skip the step (not 0).
extern "C" __global__ void prepare(const Tensor *tensors, const Group *groups, Scalars *scalars, long long count,
                                   const float *control) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const Tensor &tensor = tensors[i];
    if (control && control[1] != 0.0f) return;
    prepare_tensor(tensor, groups[tensor.group], scalars[i]);
    scalars[i].first_tile = (uint32)tensor.first_tile;
    scalars[i].short_tiles = short_tiles(tensor);
    scalars[i].first_octet = (uint32)(tensor.first_index / 8);
}

// `locate` [ceil(tiles / LOCATE) + 1]: the tensor of every LOCATE-th tile, and that of the last tile.
// `source` [TABLE_WORDS]: the tables of the states. `control`: as for `prepare`. For weights that are codes, a
// tile is one row.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
step(const Tensor *__restrict__ tensors, const Scalars *__restrict__ scalars, const int *__restrict__ locate,
     const uint32 *__restrict__ source, uint32 tiles, const float *__restrict__ control) {
    constexpr int WARPS = THREADS / 32;
    __shared__ uint32 taken;
    if (control && control[1] != 0.0f) return;
    if constexpr (CODES) {
        for (int i = threadIdx.x; i < TABLE_WORDS; i += blockDim.x) table[i] = source[i];
    }
    if (threadIdx.x == 0) taken = 0;
    __syncthreads();
    const float factor = SCALED ? control[0] : 1.0f;
    if constexpr (CODE_BITS != 0) {
        step_rows(tensors, scalars, locate, tiles, factor);
        return;
    }
    const int lane = threadIdx.x % 32;
    // A block owns WARPS neighbouring tiles of every gridDim.x * WARPS. Each warp takes the next free one of them: with
    // fixed tiles, warps that the scheduler favours would finish long before the others.
    for (;;) {
        const uint32 n = take_next(&taken, lane);
        const uint32 first = (n / WARPS * gridDim.x + blockIdx.x) * WARPS, tile = first + n % WARPS;
        if (tile >= tiles) return;
        const uint32 ahead = first + gridDim.x * WARPS;
        if (n % WARPS == 0 && lane == 0 && ahead < tiles)
            prefetch_tiles(constant_load(tensors + tensor_of(tensors, locate, ahead)), ahead, WARPS);
        const uint32 i = tensor_of(tensors, locate, tile);
        const uint2 own = __ldg((const uint2 *)&scalars[i].first_tile);  // and short_tiles
        const uint32 in_tensor = tile - own.x;
        if (for_warp(in_tensor < own.y)) step_short(tensors + i, scalars + i, factor, in_tensor, lane, {});
        else step_any(tensors + i, scalars + i, factor, in_tensor, lane, {});
    }
}
