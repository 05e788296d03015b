// int8 tokens times a weight of 4 bits on the int8 units of sm_90a:
//   out[m, n] = token_scale[m] * sum_g scale[n, g] * (sum_k x[m, k] * (code[n, k] - zero[n, g])) + bias[n]
// where g = k / GROUP. The inner sums are exact in int32; they are scaled and added in float32.
//
// int8_int4_mm_sm90.py puts ptx.cuh, sm90.cuh, int4_as_int8.cuh and `multiply`, the wgmma instruction, before this source and compiles it
// for each combination of
//   OUT, SCALE         BF16 or FP16; the scale also FP32
//   GROUP              codes along k that share a scale, a multiple of 128; 0: a row has one scale
//   ZERO               1: there are zero points, int8 in -8 .. 7
//   TOKENS             of a tile: 64 or 128
//   STAGES             of the ring
//
// A tile computes the transpose of out. Rows of the weight are the first operand of the product, which threads unpack in
// registers. Tokens are the second, which the TMA copies to shared memory. Blocks are persistent. The two blocks of a
// cluster have adjacent rows, and each loads half of the tokens for both. Two warp groups multiply 64 rows each. A group
// unpacks its next codes while the units multiply, waits for its products, and scales their sums. The units and the
// scaling compete for registers' bandwidth: of four and of two groups, with one or two sets of sums, this was fastest.
//
// The codes of x are stored in the order in which unpacking gives those of the weight. Four threads share 128 codes of a
// row, and each reads a quarter. An instruction takes 8 codes of a thread, one word: the four in the low halves of its
// bytes first. So byte 32 i + 16 h + 4 t + j of 128 of x is for k = 32 t + 8 i + 2 j + h.

enum { BF16, FP16, FP32 };

static constexpr int ROWS = 128, CHUNK = 128, PITCH = CHUNK / 2;  // of a block's tile; k of a stage; bytes of its codes
static constexpr int CLUSTER = 2, GROUPS = 2, THREADS = 128 * (GROUPS + 1);
static constexpr int CODE_BYTES = ROWS * PITCH, TOKEN_BYTES = TOKENS * CHUNK, STAGE_BYTES = CODE_BYTES + TOKEN_BYTES;
static constexpr int SUMS = TOKENS / 2;  // of a thread
static constexpr int STEPS = CHUNK / 32;
static_assert(GROUP % CHUNK == 0 && TOKENS <= 128, "");
// Without zero points, `four_of` gives 16 times the codes.
static constexpr float UNIT = ZERO ? 1.0f : 1.0f / 16;

struct Shared {
    unsigned char stage[STAGES][STAGE_BYTES];
    unsigned char box[GROUPS][TOKENS * 128];  // results of 64 rows
    float token_scale[GROUPS][TOKENS];
    uint64 full[STAGES], empty[STAGES];
};

// The product's shape: `rows` of clusters and `columns` of tokens in tiles. The grid works through `band` columns at a
// time, so that the L2 cache serves them.
struct Shape {
    int m, n, chunks, groups, rows, columns, band;
};

struct Schedule {
    const Shape shape;
    int next = blockIdx.x / CLUSTER, row, token;

    MEMBER explicit Schedule(const Shape &shape) : shape(shape) {}

    // Takes the block's next tile; false after the last.
    MEMBER bool take(uint32 rank) {
        if (next >= shape.rows * shape.columns) return false;
        const int above = next / (shape.band * shape.rows) * shape.band;
        const int within = next - above * shape.rows, width = min(shape.band, shape.columns - above);
        row = (within / width * CLUSTER + rank) * ROWS;
        token = (above + within % width) * TOKENS;
        next += gridDim.x / CLUSTER;
        return true;
    }
};

struct Ring {
    int slot = 0;
    uint32 parity = 0;
    MEMBER void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

DEVICE void produce(Shared &shared, const TensorMap &codes, const TensorMap &x, const Shape &shape, uint32 rank) {
    Schedule schedule(shape);
    Ring ring;
    const int share = rank * (TOKENS / CLUSTER);
    while (schedule.take(rank))
        for (int chunk = 0; chunk < shape.chunks; ++chunk, ring.advance()) {
            const uint32 full = shared_address(&shared.full[ring.slot]), to = shared_address(shared.stage[ring.slot]);
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            barrier_expect(full, STAGE_BYTES);
            load_box(codes, chunk * PITCH, schedule.row, to, full);
            load_box(x, chunk * CHUNK, schedule.token + share, to + CODE_BYTES + share * CHUNK, full, (1 << CLUSTER) - 1);
        }
}

// Scale and zero point of a group as stored in memory, for a thread's two rows.
struct Fetched {
    uint32 scale[2];
    int zero[2];

    MEMBER float factor(int i) const {
        return SCALE == FP32 ? bits_float(scale[i]) : SCALE == FP16 ? from_half(scale[i]) : bits_float(scale[i] << 16);
    }
};

typedef uint32 Operand[STEPS][4];

DEVICE void in_use(int &x) { asm volatile("" : "+r"(x)::"memory"); }
DEVICE void keep(Operand &a) {
#pragma unroll
    for (int i = 0; i < STEPS * 4; ++i) ::in_use(a[i / 4][i % 4]);
}

// A thread's sums of rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Consumer {
    Shared &shared;
    const void *scale;
    const signed char *zero;
    const Shape &shape;
    Ring ring;
    long long first[2];  // index of the rows' first group
    Fetched now, next;   // of this chunk and the one after

    MEMBER Consumer(Shared &shared, const void *scale, const signed char *zero, const Shape &shape)
        : shared(shared), scale(scale), zero(zero), shape(shape) {}

    MEMBER Fetched fetched(int chunk) const {
        Fetched result;
        const int group = GROUP ? min(chunk / (GROUP / CHUNK), shape.groups - 1) : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const long long at = first[i] + group;
            if constexpr (SCALE == FP32) result.scale[i] = ((const uint32 *)scale)[at];
            else result.scale[i] = ((const unsigned short *)scale)[at];
            result.zero[i] = ZERO ? zero[at] : 0;
        }
        return result;
    }

    // Unpacks the codes in the ring's present slot.
    MEMBER void unpack(Operand &a, const Fetched &group) const {
        const int lane = threadIdx.x % 32, line = threadIdx.x / 32 * 16 + lane / 4;
        barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
        const uint32 stage = shared_address(shared.stage[ring.slot]);
        const uint32 at = stage + line * PITCH + (lane ^ lane / 8) % 4 * 16;  // the TMA has swizzled units of 16 bytes
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 x = shared_vector(at + i * 8 * PITCH);
            const uint32 words[STEPS] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                a[step][i] = four_of<false, ZERO>(words[step], group.zero[i]);
                a[step][i + 2] = four_of<true, ZERO>(words[step], group.zero[i]);
            }
        }
    }

    // Multiplies a chunk by `own`, adds its scaled sums to `totals`, and unpacks the next chunk to `other`. Products are
    // not in flight when it ends: across iterations of a loop, the compiler would serialise them.
    MEMBER void step(float (&totals)[SUMS], Operand &own, Operand &other, int chunk) {
        const int lane = threadIdx.x % 32, slot = ring.slot;
        const uint32 low = __shfl_sync(0xffffffff, operand(shared_address(shared.stage[slot]) + CODE_BYTES), 0);
        const Fetched after = fetched(chunk + 2);
        int sums[SUMS];
        product_fence();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) multiply(sums, own[i], (uint64)OPERAND_HIGH << 32 | low + 2 * i, i > 0);
        product_commit();
        ring.advance();
        if (chunk + 1 < shape.chunks) unpack(other, next);
        product_wait<0>();
#pragma unroll
        for (int i = 0; i < SUMS; ++i) in_use(sums[i]);
        keep(own);
        if (lane < CLUSTER) barrier_arrive(shared_address(&shared.empty[slot]), lane);
        const float factor[2] = {now.factor(0), now.factor(1)};
#pragma unroll
        for (int i = 0; i < SUMS; ++i) totals[i] = fmaf((float)sums[i], factor[i / 2 % 2], totals[i]);
        now = next, next = after;
    }

    // The scaled sums of the tile whose rows of this thread begin at `row`.
    MEMBER void sum(float (&totals)[SUMS], int row) {
        Operand a[2];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) totals[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) first[i] = (long long)min(row + i * 8, shape.n - 1) * shape.groups;
        now = fetched(0), next = fetched(1);
        unpack(a[0], now);
        for (int chunk = 0; chunk < shape.chunks; chunk += 2) {
            step(totals, a[0], a[1], chunk);
            if (chunk + 1 < shape.chunks) step(totals, a[1], a[0], chunk + 1);
        }
    }
};

DEVICE uint32 packed(float low, float high) {
    if constexpr (OUT == FP16) return to_half2(low, high);
    else return to_bf16x2(low, high);
}

DEVICE float number_at(const void *p, int i) {
    const uint32 bits = ((const unsigned short *)p)[i];
    return OUT == FP16 ? from_half(bits) : bits_float(bits << 16);
}

// Writes the results of a warp's 16 rows to the box of its warp group, whose rows are tokens, as the TMA swizzles it.
DEVICE void fill_box(uint32 box, const float (&totals)[SUMS], const float *token_scale, const float (&bias)[2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8;
    const uint32 token = matrix / 2 * 8 + lane % 8, chunk = warp * 2 + matrix % 2;
    const uint32 to = box + token * 128 + (chunk ^ token % 8) * 16;
#pragma unroll
    for (int j = 0; j < TOKENS / 16; ++j) {
        uint32 result[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 scale = *(const float2 *)&token_scale[j * 16 + i / 2 * 8 + lane % 4 * 2];
            const float *two = &totals[j * 8 + i * 2];
            result[i] = packed(fmaf(two[0] * UNIT, scale.x, bias[i % 2]), fmaf(two[1] * UNIT, scale.y, bias[i % 2]));
        }
        store_matrices_transposed(to + j * 16 * 128, result);
    }
}

DEVICE void consume(Shared &shared, const TensorMap &out, const void *scale, const signed char *zero, const void *bias,
                    const float *token_scale, const Shape &shape, uint32 rank) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    const uint32 box = shared_address(shared.box[group]);
    Schedule schedule(shape);
    Consumer consumer(shared, scale, zero, shape);
    while (schedule.take(rank)) {
        const int column = schedule.row + group * 64, row = column + thread / 32 * 16 + lane / 4;
        const int token = schedule.token + thread;
        // Loaded early, so that they arrive while the product runs.
        const float own_scale = thread < TOKENS && token < shape.m ? token_scale[token] : 0.0f;
        float totals[SUMS], own_bias[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) own_bias[i] = bias && row + i * 8 < shape.n ? number_at(bias, row + i * 8) : 0.0f;
        consumer.sum(totals, row);
        if (thread == 0) store_wait<0>();
        if (thread < TOKENS) shared.token_scale[group][thread] = own_scale;
        named_barrier_sync(1 + group, 128);  // the box is free, the scales are in shared memory
        fill_box(box, totals, shared.token_scale[group], own_bias);
        fence_for_tma();
        named_barrier_sync(1 + group, 128);
        if (thread == 0 && column < shape.n) {
            store_box(out, column, schedule.token, box);
            store_commit();
        }
    }
    if (thread == 0) store_wait<0>();
}

// Grid: a multiple of CLUSTER blocks, at most one per multiprocessor. codes [n, bytes]: tensor map in boxes of ROWS x PITCH bytes. x [m, k]: in boxes of TOKENS / CLUSTER x CHUNK. out [m, n]: in boxes of TOKENS x 64.
// scale and zero [n, groups], bias [n] of OUT or null, token_scale [m]. `chunks`: k / 128 rounded up.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    int8_int4_mm(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap x,
                 const __grid_constant__ TensorMap out, const void *scale, const signed char *zero, const void *bias,
                 const float *token_scale, int m, int n, int chunks, int groups, int rows, int columns, int band) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Shape shape = {m, n, chunks, groups, rows, columns, band};
    const uint32 rank = cluster_rank();
    if (threadIdx.x == 0) {
        if (shared_address(memory) % 1024 != 0) __trap();  // the swizzle depends on the address
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), GROUPS * 4 * CLUSTER);
        }
        barrier_init_fence();
        prefetch(codes), prefetch(x), prefetch(out);
    }
    cluster_sync();
    wait_for_previous();
    let_next_start();

    if (threadIdx.x >= GROUPS * 128) {
        give_registers<40>();
        if (threadIdx.x == GROUPS * 128) produce(shared, codes, x, shape, rank);
        __syncwarp();
    } else {
        take_registers<232>();
        consume(shared, out, scale, zero, bias, token_scale, shape, rank);
        __syncwarp();
    }
    // The other block of the cluster may still write to this block's barriers.
    cluster_sync();
}
