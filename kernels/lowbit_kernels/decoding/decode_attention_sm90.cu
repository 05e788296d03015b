// Attention of one new token of each sequence over a cache in 16 bits, in one launch, for sm_90. The formula is in
// decode_attention.py.
//
// decode_attention_sm90.py puts ptx.cuh and sm90.cuh before this source and compiles it for each combination of
//   X        BF16 or FP16
//   WIDTH    of a head, 64 or 128
//   GROUP    queries that share a key/value head, at most 8
//   CLUSTER  blocks that share such a head: 2, 4 or 8. A block alone could not send
//   ROTATED, FACTOR, SOFTCAP
//
// The warps of a cluster take tiles of 16 slots in turn, each with an online softmax of its own. They hold their first
// tile in registers before the launch that made the query is done. The threads of a block rotate each query once, and
// the new key. The new key and value replace their slot in the last tile. Each block adds up the sums of its warps and
// sends them to the blocks of the cluster, each of which combines a range of columns.
//
// Registers. Two of these blocks and one of the decode kernel share a multiprocessor, so the next launch can start.
// So a thread has at most 128. In a cluster of 8 a block has 8 warps, which have one tile each up to MOST_SLOTS.
//
// Scores. mma multiplies 16 keys by 8 queries, of which GROUP count. A lane reads 16 adjacent bytes of both, so that the
// products take the elements in another order than mma counts them. Values are multiplied without mma, by lanes that have
// four columns each: mma would want them transposed.

enum { BF16, FP16 };

// A cluster of 8 has a warp for each tile of a cache of up to MOST_SLOTS slots.
static constexpr bool IS_WIDE = CLUSTER == 8;
static constexpr int WARPS = IS_WIDE ? 8 : 4, THREADS = 32 * WARPS, TILE = 16, QUERIES = 8;
static constexpr int CHUNKS = WIDTH / 32;                       // of 32 elements
static constexpr int LANES = WIDTH / 4, STEP = 32 / LANES;      // lanes with the columns of a value; values at once
static constexpr int PITCH = WIDTH + 32;                                 // of a query in shared memory, for the banks
static constexpr int ALL = CLUSTER * WARPS, OWN = WIDTH / CLUSTER;  // warps; columns that a block combines
static constexpr float LOG2_E = 1.4426950408889634f;
static constexpr uint32 INFINITE = 0x7f800000;
static_assert((WIDTH == 64 || WIDTH == 128) && GROUP <= QUERIES && CLUSTER > 1 && CLUSTER <= 8, "");

struct Shared {
    uint64 received;
    float squares[WARPS];
    alignas(16) unsigned short turned[GROUP + 1][PITCH];  // the queries and the new key, as they are multiplied
    alignas(16) float weights[WARPS][TILE][QUERIES], kept[WARPS][QUERIES];
    alignas(16) float own_stats[WARPS][2][QUERIES], own[WARPS][GROUP][WIDTH];  // largest scores and sums of weights; sums
    float4 stats[CLUSTER][GROUP];  // of the blocks: largest score, sum of weights
    alignas(16) float parts[CLUSTER][GROUP][OWN];
};

struct Tile {
    uint4 keys[2][CHUNKS];     // of slots lane / 4 and that + 8, elements 8 (lane % 4) and on of each chunk
    uint2 values[TILE / STEP];  // columns 4 (lane % LANES) and on of every STEP-th slot
};

struct Cache {
    const unsigned short *keys, *values;  // of the head
    int first, last;                      // slots that are seen, without the new one
};

DEVICE float low_half(uint32 pair) { return X == BF16 ? bits_float(pair << 16) : from_half(pair & 0xffff); }
DEVICE float high_half(uint32 pair) { return X == BF16 ? bits_float(pair & 0xffff0000u) : from_half(pair >> 16); }
DEVICE uint32 packed(float low, float high) { return X == BF16 ? to_bf16x2(low, high) : to_half2(low, high); }
DEVICE uint4 load_16(const unsigned short *p) { return *(const uint4 *)p; }
DEVICE uint2 load_8(const unsigned short *p) { return *(const uint2 *)p; }

// The first slot of a tile is `begin`. Slots that are not seen repeat one that is: their memory may hold anything.
DEVICE void load_tile(const Cache &cache, int begin, Tile &tile) {
    const int lane = threadIdx.x % 32;
    const auto row = [&](int slot) { return (long long)min(max(begin + slot, cache.first), cache.last) * WIDTH; };
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j)
            tile.keys[h][j] = load_16(cache.keys + row(lane / 4 + 8 * h) + 32 * j + lane % 4 * 8);
#pragma unroll
    for (int i = 0; i < TILE / STEP; ++i)
        tile.values[i] = load_8(cache.values + row(STEP * i + lane / LANES) + lane % LANES * 4);
}

// Two pairs of numbers of a query or key, which are `WIDTH / 2` apart, times `factor` and rotated.
struct Angles {
    uint32 cos[2], sin[2];
};
DEVICE uint32 rotated(uint32 x, uint32 partner, uint32 c, uint32 s, float sign, float factor) {
    const float low = fmaf(low_half(x), low_half(c), sign * low_half(partner) * low_half(s));
    const float high = fmaf(high_half(x), high_half(c), sign * high_half(partner) * high_half(s));
    return packed(low * factor, high * factor);
}
DEVICE uint32 scaled(uint32 x, float factor) { return packed(low_half(x) * factor, high_half(x) * factor); }
DEVICE void turn(uint32 (&x)[2], const Angles &angles, float factor) {
    const uint32 first = x[0], second = x[1];
    if constexpr (ROTATED) {
        x[0] = rotated(first, second, angles.cos[0], angles.sin[0], -1.0f, factor);
        x[1] = rotated(second, first, angles.cos[1], angles.sin[1], 1.0f, factor);
    } else if constexpr (FACTOR) {
        x[0] = scaled(first, factor), x[1] = scaled(second, factor);
    }
}

DEVICE void multiply(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    if constexpr (X == BF16) warp_multiply_bf16(sums, a0, a1, a2, a3, b0, b1);
    else warp_multiply_half(sums, a0, a1, a2, a3, b0, b1);
}

// largest and total: of queries 2 (lane % 4) and the next one, total of the lane's own slots. sums: of the lane's columns.
struct State {
    float largest[2], total[2], sums[GROUP][4];
};

// In units of log2; where there is a softcap, `factor` is 2 scale log2(e) / softcap and `softcap` is times log2(e).
DEVICE float score_of(float x, float factor, float softcap) {
    x *= factor;
    if constexpr (!SOFTCAP) return x;
    const float e = power_of_2(fminf(x, 126.0f));  // tanh(z) = 1 - 2 / (e^2z + 1)
    return x != x ? x : softcap * (1.0f - 2.0f * reciprocal(e + 1.0f));
}

// Puts a key and a value into the tile, as those of slot `at`.
DEVICE void put(Tile &tile, int at, const unsigned short *key, const uint2 &value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j)
            if (at == lane / 4 + 8 * h) tile.keys[h][j] = load_16(key + 32 * j + lane % 4 * 8);
#pragma unroll
    for (int i = 0; i < TILE / STEP; ++i)
        if (at == STEP * i + lane / LANES) tile.values[i] = value;
}

// Adds the slots from `begin` on that lie in first .. last.
DEVICE void add_tile(State &state, const Tile &tile, const uint4 (&q)[CHUNKS], Shared &shared, int begin, int first,
                     int last, float factor, float softcap) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float scores[4] = {};
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        const uint4 a = tile.keys[0][j], b = tile.keys[1][j];
        multiply(scores, a.x, b.x, a.y, b.y, q[j].x, q[j].y);
        multiply(scores, a.z, b.z, a.w, b.w, q[j].z, q[j].w);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        float most = state.largest[c];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int slot = begin + g + 8 * h;
            float &x = scores[2 * h + c];
            x = slot >= first && slot <= last ? score_of(x, factor, softcap) : -bits_float(INFINITE);
            most = fmaxf(most, x);
        }
#pragma unroll
        for (int lanes = 4; lanes <= 16; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, lanes));
        const float base = most == -bits_float(INFINITE) ? 0.0f : most, kept = power_of_2(state.largest[c] - base);
        state.largest[c] = most;
        float sum = state.total[c] * kept;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float weight = power_of_2(scores[2 * h + c] - base);
            sum += weight;
            shared.weights[warp][g + 8 * h][2 * t + c] = weight;
        }
        state.total[c] = sum;
        if (g == 0) shared.kept[warp][2 * t + c] = kept;
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < GROUP; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.sums[n][i] *= shared.kept[warp][n];
#pragma unroll
    for (int i = 0; i < TILE / STEP; ++i) {
        const float(&weights)[QUERIES] = shared.weights[warp][STEP * i + lane / LANES];
        const uint2 pair = tile.values[i];
        const float value[4] = {low_half(pair.x), high_half(pair.x), low_half(pair.y), high_half(pair.y)};
#pragma unroll
        for (int n = 0; n < GROUP; ++n) {
            const float weight = weights[n];
#pragma unroll
            for (int k = 0; k < 4; ++k) state.sums[n][k] = fmaf(weight, value[k], state.sums[n][k]);
        }
    }
    __syncwarp();
}

// Adds up the sums of the warps, and sends them to the blocks that combine their columns, and the stats to all.
DEVICE void send_sums(State &state, Shared &shared, int rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int lanes = 4; lanes <= 16; lanes *= 2)
            state.total[c] += __shfl_xor_sync(0xffffffff, state.total[c], lanes);
        if (lane < 4) {
            shared.own_stats[warp][0][2 * lane + c] = state.largest[c];
            shared.own_stats[warp][1][2 * lane + c] = state.total[c];
        }
    }
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        float(&sums)[4] = state.sums[i];
        if constexpr (STEP == 2)
#pragma unroll
            for (int k = 0; k < 4; ++k) sums[k] += __shfl_xor_sync(0xffffffff, sums[k], 16);
        if (lane < LANES) *(float4 *)&shared.own[warp][i][4 * lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
    named_barrier_sync(1, THREADS);
    const uint32 received = shared_address(&shared.received);
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUP * LANES; i += THREADS) {
        const int n = i / LANES, at = i % LANES, column = 4 * at;
        float most = shared.own_stats[0][0][n], total = 0.0f;
#pragma unroll
        for (int w = 1; w < WARPS; ++w) most = fmaxf(most, shared.own_stats[w][0][n]);
        const float base = most == -bits_float(INFINITE) ? 0.0f : most;
        float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = power_of_2(shared.own_stats[w][0][n] - base);
            const float4 own = *(const float4 *)&shared.own[w][n][column];
            total = fmaf(weight, shared.own_stats[w][1][n], total);
            sums = make_float4(fmaf(weight, own.x, sums.x), fmaf(weight, own.y, sums.y), fmaf(weight, own.z, sums.z),
                               fmaf(weight, own.w, sums.w));
        }
        send(shared_address(&shared.parts[rank][n][column % OWN]), column / OWN, sums, received);
        if (at < CLUSTER)
            send(shared_address(&shared.stats[rank][n]), at, make_float4(most, total, 0.0f, 0.0f), received);
    }
}

// 1 / sqrt(mean(x^2) + eps), x of `width` elements.
DEVICE float factor_of(const unsigned short *x, int width, float eps, Shared &shared) {
    float sum = 0.0f;
#pragma unroll 2
    for (int i = 8 * threadIdx.x; i < width; i += 8 * THREADS) {
        const uint4 own = load_16(x + i);
        const uint32 words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            sum = fmaf(low_half(words[k]), low_half(words[k]), sum);
            sum = fmaf(high_half(words[k]), high_half(words[k]), sum);
        }
    }
#pragma unroll
    for (int lanes = 16; lanes >= 1; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (threadIdx.x % 32 == 0) shared.squares[threadIdx.x / 32] = sum;
    named_barrier_sync(1, THREADS);
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += shared.squares[i];
    return 1.0f / sqrtf(sum / width + eps);
}

// Grid: CLUSTER blocks for each key/value head of all sequences. Everything begins at multiples of 16 bytes, strides are
// multiples of 8 elements. start, sinks, and unless FACTOR or ROTATED x, cos and sin, may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attend(const unsigned short *query, const unsigned short *key, const unsigned short *value, const unsigned short *x,
           const unsigned short *cos, const unsigned short *sin, unsigned short *keys, unsigned short *values,
           const long long *position, const long long *start, const float *sinks, unsigned short *out,
           long long query_batch, long long query_head, long long key_batch, long long key_head, int angle_batch,
           int heads, int capacity, int window, int x_width, float factor, float softcap, float eps) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = cluster_rank(), index = warp * CLUSTER + rank;
    const long long head = blockIdx.x / CLUSTER, batch = head / heads;
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&shared.received), 1);
        barrier_expect(shared_address(&shared.received), CLUSTER * GROUP * (OWN + 4) * 4);
        barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive();

    const int slot = (int)*position;  // of the new token
    int first = start == nullptr ? 0 : (int)start[batch];
    if (window > 0) first = max(first, slot - window + 1);
    first = min(first, slot);
    unsigned short *own_keys = keys + head * capacity * WIDTH, *own_values = values + head * capacity * WIDTH;
    const Cache cache = {own_keys, own_values, first, slot - 1};
    const int base = first & ~(TILE - 1), tiles = (slot - base) / TILE + 1;  // with the new one
    Tile tile = {};
    if (index < tiles && first < slot) load_tile(cache, base + index * TILE, tile);
    const int at = threadIdx.x % (WIDTH / 4) * 2;  // of the first of the two pairs that the thread turns
    Angles angles;
    if constexpr (ROTATED)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            angles.cos[i] = *(const uint32 *)(cos + batch * angle_batch + at + i * (WIDTH / 2));
            angles.sin[i] = *(const uint32 *)(sin + batch * angle_batch + at + i * (WIDTH / 2));
        }
    const float f = FACTOR ? factor_of(x + batch * x_width, x_width, eps, shared) : 1.0f;
    wait_for_previous();
    let_next_start();  // not earlier: its blocks would crowd the first free multiprocessors

    const int newest = (tiles - 1) % ALL;  // the warp that takes the new token
    const unsigned short *of_queries = query + batch * query_batch + head % heads * GROUP * query_head;
    const unsigned short *of_key = key + batch * key_batch + head % heads * key_head;
    const unsigned short *of_value = value + batch * key_batch + head % heads * key_head;
    uint2 fresh = make_uint2(0, 0);
    if (index == newest) {
        fresh = load_8(of_value + lane % LANES * 4);
        if constexpr (FACTOR) fresh = make_uint2(scaled(fresh.x, f), scaled(fresh.y, f));
        if (lane < LANES) *(uint2 *)(own_values + (long long)slot * WIDTH + lane * 4) = fresh;
    }
#pragma unroll
    for (int n = threadIdx.x / (WIDTH / 4); n <= GROUP; n += THREADS / (WIDTH / 4)) {
        if (n == GROUP && rank != newest % CLUSTER) break;
        const unsigned short *from = n < GROUP ? of_queries + n * query_head : of_key;
        uint32 own[2] = {*(const uint32 *)(from + at), *(const uint32 *)(from + at + WIDTH / 2)};
        turn(own, angles, f);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            *(uint32 *)(shared.turned[n] + at + i * (WIDTH / 2)) = own[i];
            if (n == GROUP) *(uint32 *)(own_keys + (long long)slot * WIDTH + at + i * (WIDTH / 2)) = own[i];
        }
    }
    named_barrier_sync(1, THREADS);
    uint4 q[CHUNKS];
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j)
        q[j] = g < GROUP ? load_16(shared.turned[g] + 32 * j + 8 * t) : make_uint4(0, 0, 0, 0);

    State state;
#pragma unroll
    for (int c = 0; c < 2; ++c) state.largest[c] = -bits_float(INFINITE), state.total[c] = 0.0f;
#pragma unroll
    for (int n = 0; n < GROUP; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.sums[n][i] = 0.0f;
#pragma unroll 1
    for (int i = index; i < tiles; i += ALL) {
        Tile next;
        if (!IS_WIDE && i + ALL < tiles) load_tile(cache, base + (i + ALL) * TILE, next);
        if (i == tiles - 1) put(tile, (slot - base) % TILE, shared.turned[GROUP], fresh);
        add_tile(state, tile, q, shared, base + i * TILE, first, slot, factor, softcap);
        if (IS_WIDE) break;
        tile = next;
    }

    cluster_wait();  // the other blocks have initialised their barriers
    send_sums(state, shared, rank);
    barrier_wait_after(shared_address(&shared.received), 0);
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUP * OWN; i += THREADS) {
        const int n = i / OWN, column = i % OWN;
        const long long row = head * GROUP + n;
        const float sink = sinks == nullptr ? -bits_float(INFINITE) : sinks[row % (heads * GROUP)] * LOG2_E;
        float most = sink, total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < CLUSTER; ++w) most = fmaxf(most, shared.stats[w][n].x);
        const float from = most == -bits_float(INFINITE) ? 0.0f : most;
#pragma unroll
        for (int w = 0; w < CLUSTER; ++w) {
            const float4 stats = shared.stats[w][n];
            const float weight = power_of_2(stats.x - from);
            total = fmaf(weight, stats.y, total);
            sum = fmaf(weight, shared.parts[w][n][column], sum);
        }
        total += power_of_2(sink - from);
        out[row * WIDTH + rank * OWN + column] = (unsigned short)(packed(sum / total, 0.0f) & 0xffff);
    }
}
