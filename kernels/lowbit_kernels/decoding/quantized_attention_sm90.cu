// Attention of one query token of each sequence over a cache of keys and values in 8 and 4 bits, for sm_90.
//   score[r, s] = factor * key_scale[s] * sum_d query[r, d] * key[s, d]
//   out[r, d]   = sum_s 2^score[r, s] * (value[s, d] * value_scale[s] + value_zero[s]) / sum_s 2^score[r, s]
//
// quantized_attention_sm90.py puts ptx.cuh and sm90.cuh before this source and compiles it for each combination of
//   X        BF16 or FP16: the dtype of the queries and of the output
//   KEYS     INT8 or E4M3
//   VALUES   INT8, E4M3 or UINT4; a byte holds two 4-bit codes, the one of the even d in its low half
//   ZERO     whether there are value_zeros
//   WIDTH    codes of a token and head, a multiple of 16, with UINT4 of 32. The queries may be narrower
//   ROWS     queries that share a key/value head, computed: 8 or 16
//   SOFTCAP  whether scores are softcap * tanh(score / softcap)
//   STAGES   of each warp's pipeline
//
// A block takes a range of the slots of one key/value head (split-K, or Flash-Decoding). Its warps take tiles of 32
// slots in turn. Each warp has a pipeline of its own and an online softmax of its own, so no warp waits for another
// before the end, where the block combines the warps' sums. A second kernel combines the ranges.
//
// Queries are in units of their largest magnitude. Keys in int8 are multiplied as they are, by queries of 15 bits in
// two bytes: their sums are exact. Other codes become fp16, which holds them exactly. The scale of a value joins its
// score as a logarithm, so the weights that multiply the codes are at most 1, whatever the scales are.
//
// Codes are not reordered in memory. A lane of ldmatrix gets four adjacent bytes of a key, and takes the query's
// elements in the same order. The transposed ldmatrix gives it two adjacent bytes of two values, hence columns of the
// output that are two (or four, in 4 bits) apart.

enum { BF16, FP16, INT8, E4M3, UINT4 };

static constexpr int WARPS = 4, THREADS = 32 * WARPS, TOKENS = 32;
static constexpr int VALUE_WIDTH = VALUES == UINT4 ? WIDTH / 2 : WIDTH;  // bytes
static constexpr int STEPS = WIDTH / 16, VALUE_CHUNKS = VALUE_WIDTH / 16;
static constexpr int SPREAD = VALUES == UINT4 ? 4 : 2;  // columns of the output that a lane gets from one 16-bit word
static constexpr int TILES = WIDTH / 8;                 // of the output
static constexpr int HALVES = ROWS / 8;
static constexpr int STAGE = TOKENS * (WIDTH + VALUE_WIDTH), SCALES = TOKENS * 2;
static constexpr uint32 INFINITE = 0x7f800000;
static constexpr int SCALE_KINDS = ZERO ? 3 : 2;
static_assert(WIDTH % 16 == 0 && VALUE_WIDTH % 16 == 0 && (!ZERO || VALUES == UINT4), "");
static constexpr int PITCH = WIDTH + 8;  // floats from row to row of a warp's sums, against bank conflicts
static_assert(STAGE * STAGES >= ROWS * PITCH * 4, "a warp's sums must fit where its tiles were");

struct Shared {
    uint64 full[WARPS][STAGES];
    float largest[WARPS][ROWS], total[WARPS][ROWS], zero[WARPS][ROWS];
    alignas(16) unsigned char scales[WARPS][STAGES][SCALE_KINDS][SCALES];
};

struct Problem {
    const unsigned char *key_scale, *value_scale, *value_zero;
    int capacity, window;
};

DEVICE float low_half(uint32 pair) { return X == BF16 ? bits_float(pair << 16) : from_half(pair & 0xffff); }
DEVICE float high_half(uint32 pair) { return X == BF16 ? bits_float(pair & 0xffff0000u) : from_half(pair >> 16); }
DEVICE float bf16_of(uint32 pair, int i) { return bits_float(i == 0 ? pair << 16 : pair & 0xffff0000u); }
DEVICE void store_x(unsigned short *to, float x) {
    *to = X == BF16 ? to_bf16x2(x, 0.0f) & 0xffff : to_half2(x, 0.0f) & 0xffff;
}

// Where 16 bytes of a row begin in a tile with rows of BYTES, as the TMA writes it.
template <int BYTES>
DEVICE uint32 place(int row, int chunk) {
    if constexpr (BYTES == 256) return (chunk >> 3) * (TOKENS * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
    else if constexpr (BYTES == 128) return row * 128 + (chunk ^ (row & 7)) * 16;
    else if constexpr (BYTES == 64) return row * 64 + (chunk ^ (row >> 1 & 3)) * 16;
    else return row * BYTES + chunk * 16;
}

template <int BYTES>
DEVICE void load_tile(const TensorMap &map, int row, uint32 to, uint32 barrier) {
    if constexpr (BYTES == 256) load_box(map, 128, row, to + TOKENS * 128, barrier);
    load_box(map, 0, row, to, barrier);
}

// Loads the slots of a tile. The slots of head `head` begin at row head * capacity of the maps.
DEVICE void load_stage(const Problem &p, const TensorMap &keys, const TensorMap &values, Shared &shared, uint32 stages,
                       long long head, int tile, int stage) {
    const int warp = threadIdx.x / 32;
    const uint32 full = shared_address(&shared.full[warp][stage]), to = stages + (warp * STAGES + stage) * STAGE;
    const long long row = head * p.capacity + tile * TOKENS;
    barrier_expect(full, STAGE + SCALE_KINDS * SCALES);
    load_tile<WIDTH>(keys, (int)row, to, full);
    load_tile<VALUE_WIDTH>(values, (int)row, to + TOKENS * WIDTH, full);
    unsigned char(*scales)[SCALES] = shared.scales[warp][stage];
    load_bulk(shared_address(scales[0]), p.key_scale + row * 2, SCALES, full);
    load_bulk(shared_address(scales[1]), p.value_scale + row * 2, SCALES, full);
    if constexpr (ZERO) load_bulk(shared_address(scales[2]), p.value_zero + row * 2, SCALES, full);
}

// ---- codes to fp16 --------------------------------------------------------------------------------------------------

// The pairs of column i: of bytes (0, 2) and (1, 3), or 16 + the nibbles at bits 4 i of both halves. `weigh` takes the
// 16 off again.
template <int CODES>
DEVICE void columns(uint32 word, uint32 (&pairs)[SPREAD]) {
    if constexpr (CODES == UINT4) {  // 0x4c00 | n << 6 is 16 + n
        pairs[0] = masked_or(word << 6, 0x03c003c0u, 0x4c004c00u);
        pairs[1] = masked_or(word << 2, 0x03c003c0u, 0x4c004c00u);
        pairs[2] = masked_or(word >> 2, 0x03c003c0u, 0x4c004c00u);
        pairs[3] = masked_or(word >> 6, 0x03c003c0u, 0x4c004c00u);
    } else if constexpr (CODES == E4M3) {
        pairs[0] = from_e4m3x2(permute(word, 0, 0x4420)), pairs[1] = from_e4m3x2(permute(word, 0, 0x4431));
    } else {
        word ^= 0x80808080u;
        pairs[0] = subtract_half2(permute(word, 0x64646464u, 0x4240), 0x64806480u);
        pairs[1] = subtract_half2(permute(word, 0x64646464u, 0x4341), 0x64806480u);
    }
}

// ---- queries --------------------------------------------------------------------------------------------------------

// A lane's elements of its rows (lane / 4, and that + 8), four of each chunk of 16, in units of the row's largest
// magnitude. For e4m3 keys they are two words of fp16 for each chunk and row. For int8 keys they are integers
// n = 256 high + low of 15 bits, split into bytes: the operands of two chunks, of which rows 8 to 15 are the low bytes
// of rows 0 to 7. With 16 rows there are two sets, all high and all low bytes.
static constexpr bool INTEGERS = KEYS == INT8;
static constexpr int PAIRS = (STEPS + 1) / 2;
static constexpr float UNITS = 127.0f * 256.0f;
typedef uint32 Halves[STEPS][HALVES][2];
typedef uint32 Bytes[PAIRS][HALVES][4];
template <bool> struct Chosen { typedef Halves type; };
template <> struct Chosen<true> { typedef Bytes type; };
typedef Chosen<INTEGERS>::type Queries;

DEVICE void to_bytes(float x, uint32 &high, uint32 &low, int i) {
    const int n = (int)rintf(x), h = (n + 128) >> 8;
    high |= (h & 255) << 8 * i, low |= (n - 256 * h & 255) << 8 * i;
}

DEVICE void convert(Halves &q, const Halves &raw, int h, float inverse) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            q[s][h][i] = to_half2(low_half(raw[s][h][i]) * inverse, high_half(raw[s][h][i]) * inverse);
}
DEVICE void convert(Bytes &q, const Halves &raw, int h, float inverse) {
#pragma unroll
    for (int s = 0; s < 2 * PAIRS; ++s) {
        uint32 high = 0, low = 0;
        if (s < STEPS) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                to_bytes(low_half(raw[min(s, STEPS - 1)][h][i]) * (inverse * UNITS), high, low, 2 * i);
                to_bytes(high_half(raw[min(s, STEPS - 1)][h][i]) * (inverse * UNITS), high, low, 2 * i + 1);
            }
        }
        const int place = s % 2 * 2;
        if constexpr (HALVES == 1) q[s / 2][0][place] = high, q[s / 2][0][place + 1] = low;
        else q[s / 2][0][place + h] = high, q[s / 2][1][place + h] = low;
    }
}

// `factor` becomes what multiplies a score in these units, NaN for a row with a NaN.
DEVICE void load_queries(Queries &q, float (&factor)[HALVES], const unsigned short *query, long long stride, int rows,
                         int d) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Halves raw;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        const int row = g + 8 * h;
        float most = 0.0f, nothing = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int column = s * 16 + t * 4;
            uint2 four = make_uint2(0, 0);
            if (row < rows && column < d) four = *(const uint2 *)(query + row * stride + column);
            raw[s][h][0] = four.x, raw[s][h][1] = four.y;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float low = low_half(raw[s][h][i]), high = high_half(raw[s][h][i]);
                most = fmaxf(most, fmaxf(fabsf(low), fabsf(high))), nothing += low * 0.0f + high * 0.0f;
            }
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
        nothing += __shfl_xor_sync(0xffffffff, nothing, 1);
        nothing += __shfl_xor_sync(0xffffffff, nothing, 2);
        const bool usable = most > 1e-37f && most < 1e37f;
        convert(q, raw, h, usable ? reciprocal(most) : 0.0f);
        factor[h] *= (usable ? most : 0.0f) / (INTEGERS ? UNITS : 1.0f) + nothing;
    }
}

// ---- one tile -------------------------------------------------------------------------------------------------------

struct State {
    float largest[HALVES], total[HALVES], zero[HALVES];  // total and zero: of the lane's own slots
    float sums[TILES][4];
};

DEVICE void score(const Halves &q, float (&scores)[4][4], uint32 keys) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        uint32 words[4];
        load_matrices(keys + place<WIDTH>(lane, s), words);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            warp_multiply_half(scores[i], q[s][0][0], HALVES > 1 ? q[s][HALVES - 1][0] : 0, q[s][0][1],
                               HALVES > 1 ? q[s][HALVES - 1][1] : 0, from_e4m3x2(words[i] & 0xffff),
                               from_e4m3x2(words[i] >> 16));
    }
}

// The sums are exact.
DEVICE void score(const Bytes &q, float (&scores)[4][4], uint32 keys) {
    const int lane = threadIdx.x % 32;
    int sums[HALVES][4][4] = {};
#pragma unroll
    for (int s = 0; s < PAIRS; ++s) {
        uint32 first[4], second[4] = {};
        load_matrices(keys + place<WIDTH>(lane, 2 * s), first);
        if (2 * s + 1 < STEPS) load_matrices(keys + place<WIDTH>(lane, 2 * s + 1), second);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
                warp_multiply_s8(sums[h][i], q[s][h][0], q[s][h][1], q[s][h][2], q[s][h][3], first[i], second[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int n = 0; n < 2 * HALVES; ++n)
            scores[i][n] = (float)(256 * sums[0][i][n] + (HALVES == 1 ? sums[0][i][n + 2] : sums[HALVES - 1][i][n]));
}

// The score in units of log2. Where there is a softcap, `x` is the score / softcap, and `softcap` is in units of log2.
DEVICE float capped(float x, float softcap) {
    if constexpr (!SOFTCAP) return x;
    const float e = power_of_2(fminf(x * 2.8853900817779268f, 126.0f));  // tanh(x) = 1 - 2 / (e^2x + 1)
    return x != x ? x : softcap * (1.0f - 2.0f * reciprocal(e + 1.0f));
}

// Turns scores into the weights of the codes, two fp16 in a word for each eight slots and row, and adds the weights of
// the values to the state. Bit n of `seen` tells whether the query sees slot n of the tile.
typedef uint32 Weights[4][HALVES];
DEVICE void weigh(State &state, Weights &weights, float (&scores)[4][4], const float (&factor)[HALVES], float softcap,
                  uint32 scales, uint32 seen) {
    const int t = threadIdx.x % 4;
    const uint32 own = seen >> 2 * t;
    float inverse[4][2], offset[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32 at = scales + i * 16 + t * 4;
        const uint32 k = shared_word(at), v = shared_word(at + SCALES), z = ZERO ? shared_word(at + 2 * SCALES) : 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool visible = own >> (8 * i + e) & 1;
            const float scale = bf16_of(v, e), logarithm = logarithm_2(scale);
            inverse[i][e] = visible ? reciprocal(scale) : 0.0f;
            if constexpr (ZERO) offset[i][e] = visible ? fmaf(bf16_of(z, e), inverse[i][e], -16.0f) : 0.0f;
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const float x = capped(scores[i][2 * h + e] * (factor[h] * bf16_of(k, e)), softcap) + logarithm;
                scores[i][2 * h + e] = visible ? x : -bits_float(INFINITE);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        float most = state.largest[h];
#pragma unroll
        for (int i = 0; i < 4; ++i) most = fmaxf(most, fmaxf(scores[i][2 * h], scores[i][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
        const float base = most == -bits_float(INFINITE) ? 0.0f : most, kept = power_of_2(state.largest[h] - base);
        state.largest[h] = most;
        state.total[h] *= kept;
        if constexpr (ZERO) state.zero[h] *= kept;
        if (for_warp(kept != 1.0f)) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) state.sums[n][2 * h] *= kept, state.sums[n][2 * h + 1] *= kept;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float p[2] = {power_of_2(scores[i][2 * h] - base), power_of_2(scores[i][2 * h + 1] - base)};
            weights[i][h] = to_half2(p[0], p[1]);
            // Codes without a sign and zeros cancel each other, so both need the same weights.
            if constexpr (ZERO) p[0] = from_half(weights[i][h] & 0xffff), p[1] = from_half(weights[i][h] >> 16);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                state.total[h] = fmaf(p[e], inverse[i][e], state.total[h]);
                if constexpr (ZERO) state.zero[h] = fmaf(p[e], offset[i][e], state.zero[h]);
            }
        }
    }
}

DEVICE void add_values(State &state, const Weights &weights, uint32 values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const uint32 a0 = weights[2 * j][0], a1 = HALVES > 1 ? weights[2 * j][HALVES - 1] : 0;
        const uint32 a2 = weights[2 * j + 1][0], a3 = HALVES > 1 ? weights[2 * j + 1][HALVES - 1] : 0;
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; c += 2) {
            uint32 words[4];  // slots 0 to 7 and 8 to 15 of chunk c, then of chunk c + 1
            const int chunk = min(c + lane / 16, VALUE_CHUNKS - 1);
            load_matrices_transposed(values + place<VALUE_WIDTH>(16 * j + lane % 16, chunk), words);
#pragma unroll
            for (int i = 0; i < 2 && c + i < VALUE_CHUNKS; ++i) {
                uint32 low[SPREAD], high[SPREAD];
                columns<VALUES>(words[2 * i], low);
                columns<VALUES>(words[2 * i + 1], high);
#pragma unroll
                for (int n = 0; n < SPREAD; ++n)
                    warp_multiply_half(state.sums[(c + i) * SPREAD + n], a0, a1, a2, a3, low[n], high[n]);
            }
        }
    }
}

// Whether the query sees the lane's slot of a tile. In a ring of `window` slots the oldest is `oldest`; `hidden` slots
// after it hold padding.
DEVICE bool is_seen(const Problem &p, const unsigned char *mask, int tile, int count, int oldest, long long hidden) {
    const int slot = tile * TOKENS + threadIdx.x % 32;
    const int age = slot < oldest ? slot - oldest + p.window : slot - oldest;  // 0: the oldest
    return slot < count && age >= hidden && (mask == nullptr || mask[age] != 0);
}

// ---- the kernels ----------------------------------------------------------------------------------------------------

// Writes each warp's state to shared memory: sums to where its tiles were.
DEVICE void put_down(const State &state, Shared &shared, float *sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        float total = state.total[h], zero = ZERO ? state.zero[h] : 0.0f;
        total += __shfl_xor_sync(0xffffffff, total, 1), total += __shfl_xor_sync(0xffffffff, total, 2);
        zero += __shfl_xor_sync(0xffffffff, zero, 1), zero += __shfl_xor_sync(0xffffffff, zero, 2);
        const int row = g + 8 * h;
        if (t == 0) {
            shared.largest[warp][row] = state.largest[h];
            shared.total[warp][row] = total, shared.zero[warp][row] = zero;
        }
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                sums[row * PITCH + (n / SPREAD * 8 + 2 * t + e) * SPREAD + n % SPREAD] = state.sums[n][2 * h + e];
    }
}

// The weight of a sink, which takes part in the softmax without a value.
DEVICE float sink_of(const float *sinks, long long query, int queries, float most) {
    return sinks == nullptr ? 0.0f : power_of_2(fmaf(sinks[query % queries], 1.4426950408889634f, -most));
}

// Grid: key/value heads of all sequences * blocks of ROWS queries * splits. `length`: tokens that the cache has seen;
// `first`: the position of each sequence's first token that is not padding.
// parts [all queries, splits, WIDTH], stats [all queries, splits, 2]; with one split the block writes `out` itself.
extern "C" __global__ void __launch_bounds__(THREADS)
    attend(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
           const unsigned short *query, long long query_batch, long long query_head, const unsigned char *key_scale,
           const unsigned char *value_scale, const unsigned char *value_zero, const long long *length,
           int length_stride, const unsigned char *mask, long long mask_stride, const long long *first,
           const float *sinks, unsigned short *out, float *parts, float *stats, int heads, int group, int d,
           int capacity, int window, int ring, int splits, float factor, float softcap) {
    DYNAMIC_SHARED(memory);
    const Problem p = {key_scale, value_scale, value_zero, capacity, window};
    static constexpr int HEADER = (sizeof(Shared) + 1023) / 1024 * 1024;
    Shared &shared = *(Shared *)memory;
    const uint32 stages = shared_address(memory) + HEADER;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0)
        for (int i = 0; i < STAGES; ++i) barrier_init(shared_address(&shared.full[warp][i]), 1);
    barrier_init_fence();
    __syncwarp();

    const int split = blockIdx.x % splits, blocks = (group + ROWS - 1) / ROWS;
    const int block = blockIdx.x / splits % blocks;
    const long long head = blockIdx.x / splits / blocks;  // of all sequences
    const long long batch = head / heads;
    const int first_row = block * ROWS, rows = min(ROWS, group - first_row);
    wait_for_previous();
    let_next_start();

    const long long tokens = length[batch * length_stride];
    const int count = (int)min(tokens, (long long)window), oldest = tokens > window ? (int)(tokens % window) : 0;
    const long long hidden = first == nullptr ? 0 : first[batch] - (tokens - count);
    const int tiles = (count + TOKENS - 1) / TOKENS;
    const int begin = (int)((long long)tiles * split / splits), end = (int)((long long)tiles * (split + 1) / splits);
    if (lane == 0)
        for (int i = 0, tile = begin + warp; i < STAGES && tile < end; ++i, tile += WARPS)
            load_stage(p, keys, values, shared, stages, head, tile, i);

    Queries q;
    float factors[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) factors[h] = factor;
    const long long first_query = head * group + first_row;  // of all queries
    const unsigned short *own = query + batch * query_batch + (head % heads * group + first_row) * query_head;
    load_queries(q, factors, own, query_head, rows, d);
    State state;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) state.largest[h] = -bits_float(INFINITE), state.total[h] = state.zero[h] = 0.0f;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.sums[n][i] = 0.0f;

    const unsigned char *own_mask = mask == nullptr ? nullptr : mask + batch * mask_stride;
    bool visible = begin + warp < end && is_seen(p, own_mask, begin + warp, count, oldest, hidden);
    int stage = 0;
    uint32 parity = 0;
#pragma unroll 1
    for (int tile = begin + warp; tile < end; tile += WARPS) {
        const uint32 seen = ballot(visible);
        if (tile + WARPS < end) visible = is_seen(p, own_mask, tile + WARPS, count, oldest, hidden);
        const uint32 at = stages + (warp * STAGES + stage) * STAGE;
        barrier_wait(shared_address(&shared.full[warp][stage]), parity);
        float scores[4][4] = {};
        score(q, scores, at);
        Weights weights;
        weigh(state, weights, scores, factors, softcap, shared_address(shared.scales[warp][stage]), seen);
        add_values(state, weights, at + TOKENS * WIDTH);
        __syncwarp();  // all lanes have read the stage
        const int next = tile + STAGES * WARPS;
        if (lane == 0 && next < end) load_stage(p, keys, values, shared, stages, head, next, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    __syncwarp();
    float *sums = (float *)(memory + HEADER);
    put_down(state, shared, sums + warp * (STAGES * STAGE / 4));
    named_barrier_sync(1, THREADS);
    const bool overflows = !ring && tokens > window;
    for (int i = threadIdx.x; i < rows * WIDTH; i += THREADS) {
        const int row = i / WIDTH, column = i % WIDTH;
        float most = shared.largest[0][row];
        for (int w = 1; w < WARPS; ++w) most = fmaxf(most, shared.largest[w][row]);
        float total = 0.0f, sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) {
            const float weight = most == -bits_float(INFINITE) ? 0.0f : power_of_2(shared.largest[w][row] - most);
            total = fmaf(weight, shared.total[w][row], total);
            sum = fmaf(weight, sums[w * (STAGES * STAGE / 4) + row * PITCH + column] + shared.zero[w][row], sum);
        }
        if (overflows) total = bits_float(0x7fffffffu);
        const long long own = first_query + row;
        if (splits == 1) {
            if (total != 0.0f) total += sink_of(sinks, own, heads * group, most);
            if (column < d) store_x(out + own * d + column, total == 0.0f ? 0.0f : sum / total);
            continue;
        }
        parts[(own * splits + split) * WIDTH + column] = sum;
        if (column == 0) stats[(own * splits + split) * 2] = most, stats[(own * splits + split) * 2 + 1] = total;
    }
}

// Combines the splits of a query. Grid: one block per query, of WIDTH threads.
extern "C" __global__ void __launch_bounds__(WIDTH)
    combine(const float *parts, const float *stats, const float *sinks, unsigned short *out, int queries, int d,
            int splits) {
    wait_for_previous();
    let_next_start();
    const long long own = blockIdx.x;
    parts += own * splits * WIDTH, stats += own * splits * 2;
    float most = -bits_float(INFINITE), total = 0.0f, sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < splits; ++i) most = fmaxf(most, stats[2 * i]);
#pragma unroll 8
    for (int i = 0; i < splits; ++i) {
        const float weight = most == -bits_float(INFINITE) ? 0.0f : power_of_2(stats[2 * i] - most);
        total = fmaf(weight, stats[2 * i + 1], total);
        sum = fmaf(weight, parts[i * WIDTH + threadIdx.x], sum);
    }
    if (total != 0.0f) total += sink_of(sinks, own, queries, most);
    if (threadIdx.x < d) store_x(out + own * d + threadIdx.x, total == 0.0f ? 0.0f : sum / total);
}
