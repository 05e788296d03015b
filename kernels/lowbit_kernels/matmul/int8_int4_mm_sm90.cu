// int8 tokens times a weight of 4 bits on the int8 units of sm_90a:
//   out[m, n] = token_scale[m] * sum_g scale[n, g] * (sum_k x[m, k] * (code[n, k] - zero[n, g])) + bias[n]
// where g = k / GROUP. The inner sums are exact in int32; they are scaled and added in float32.
//
// int8_int4_mm_sm90.py puts ptx.cuh, sm90.cuh, int4_as_int8.cuh and `multiply`, the wgmma instruction, before this
// source and compiles it for each combination of
//   OUT, SCALE         BF16 or FP16; the scale also FP32
//   GROUP              codes along k that share a scale: 64, or a multiple of 128; 0: a row has one scale
//   ZERO               1: there are zero points, int8 in -8 .. 7
//   TOKENS             of a tile: 64 or 128
//   SPLIT              blocks of a cluster that share a tile's K: 1 or 2
//   STAGES             of the ring
//
// A tile computes the transpose of out. Rows of the weight are the first operand of the product, which threads unpack
// in registers. Tokens are the second, which the TMA copies to shared memory. Blocks are persistent. Without SPLIT the
// two blocks of a cluster have adjacent rows, and each loads half of the tokens for both. Two warp groups multiply 64
// rows each.
//
// Sums are scaled without a conversion. An int32 in 0 .. 2**24 has the bits of the float that is 2**-149 times as
// large. So sums begin at BASE, stay positive, and one fused multiplication and addition scales each. They are not set
// to zero for the next group:
//   sum_g scale[g] * (S[g] - S[g - 1]) = sum_g (scale[g] - scale[g + 1]) * S[g],  where S[g] is the sum up to g.
// After PERIOD chunks they begin at BASE again. On an H200 all other instructions add to the time of the products,
// about two clocks each. Four warp groups, turns of two, halves of the tokens and codes unpacked between the
// instructions of the units were not faster.
//
// The codes of x are stored in the order in which unpacking gives those of the weight: byte 32 i + 16 h + 4 t + j of a
// row is for k = 32 i + 8 t + 2 j + h. So thread t of four has a word of 8 codes in each 32, those in the low halves of
// its bytes first.

enum { BF16, FP16, FP32 };

static constexpr int ROWS = 128, CHUNK = 128, PITCH = CHUNK / 2;  // of a block's tile; k of a stage; bytes of its codes
static constexpr int BESIDE = SPLIT > 1 ? 1 : 2, CLUSTER = SPLIT * BESIDE, GROUPS = 2, WARPS = GROUPS * 4;
static constexpr int THREADS = 128 * (GROUPS + 1);
static constexpr int CODE_BYTES = ROWS * PITCH, TOKEN_BYTES = TOKENS * CHUNK, STAGE_BYTES = CODE_BYTES + TOKEN_BYTES;
static constexpr int SUMS = TOKENS / 2;  // of a thread
static constexpr int STEPS = CHUNK / 32;
static constexpr int PARTS = GROUP && GROUP < CHUNK ? CHUNK / GROUP : 1;  // groups of a chunk
static_assert((GROUP % CHUNK == 0 || GROUP == 64) && TOKENS <= 128, "");
static_assert(TOKENS % (16 * SPLIT) == 0, "");

// Without zero points `four_of` gives 16 times the codes. A chunk's sum is at most 2**21, and with them below 2**18.
static constexpr int PERIOD = 4, BASE = ZERO ? 1 << 20 : 1 << 23;
// Scales are multiplied by 2**100, so that nothing is subnormal but the sums themselves.
static constexpr float UP = 0x1p100f, BASE_UP = BASE * 0x1p-49f, UNIT = ZERO ? 0x1p49f : 0x1p45f;

// Sums of 16 rows by 16 tokens. With SPLIT each block of a cluster finishes some of the tokens.
typedef float4 Square[2][32];
static constexpr int SQUARES = TOKENS / 16 / SPLIT;  // that a warp finishes

struct Shared {
    unsigned char stage[STAGES][STAGE_BYTES];
    unsigned char box[GROUPS][TOKENS / SPLIT * 128];  // results of 64 rows
    Square sums[SPLIT > 1 ? WARPS * TOKENS / 16 : 1];  // that blocks of the cluster sent
    float token_scale[GROUPS][TOKENS];
    uint64 full[STAGES], empty[STAGES], sums_arrived, sums_read;
};

// The product's shape: `rows` of clusters and `columns` of tokens in tiles. The grid works through `band` columns at a
// time, so that the L2 cache serves them.
struct Shape {
    int m, n, chunks, groups, rows, columns, band;
};

struct Schedule {
    const Shape shape;
    const uint32 rank;
    const int first, last;  // chunks
    int next = blockIdx.x / CLUSTER, row, token;

    MEMBER Schedule(const Shape &shape, uint32 rank)
        : shape(shape), rank(rank), first(shape.chunks / PERIOD * (rank / BESIDE) / SPLIT * PERIOD),
          last(shape.chunks / PERIOD * (rank / BESIDE + 1) / SPLIT * PERIOD) {}

    // Takes the block's next tile; false after the last.
    MEMBER bool take() {
        if (next >= shape.rows * shape.columns) return false;
        const int above = next / (shape.band * shape.rows) * shape.band;
        const int within = next - above * shape.rows, width = min(shape.band, shape.columns - above);
        row = (within / width * BESIDE + rank % BESIDE) * ROWS;
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

// Prefetches the first codes into the L2 cache.
DEVICE void fetch(const TensorMap &codes, const Shape &shape, uint32 rank) {
    Schedule schedule(shape, rank);
    if (schedule.take())
        for (int chunk = schedule.first; chunk < min(schedule.first + STAGES, schedule.last); ++chunk)
            prefetch_box(codes, chunk * PITCH, schedule.row);
}

DEVICE void produce(Shared &shared, const TensorMap &codes, const TensorMap &x, const Shape &shape, uint32 rank) {
    Schedule schedule(shape, rank);
    Ring ring;
    const int share = rank % BESIDE * (TOKENS / BESIDE);
    while (schedule.take())
        for (int chunk = schedule.first; chunk < schedule.last; ++chunk, ring.advance()) {
            const uint32 full = shared_address(&shared.full[ring.slot]), to = shared_address(shared.stage[ring.slot]);
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            barrier_expect(full, STAGE_BYTES);
            load_box(codes, chunk * PITCH, schedule.row, to, full);
            const uint32 tokens = to + CODE_BYTES + share * CHUNK;
            if constexpr (BESIDE == 1) load_box(x, chunk * CHUNK, schedule.token, tokens, full);
            else load_box(x, chunk * CHUNK, schedule.token + share, tokens, full, (1 << CLUSTER) - 1);
        }
}

// Scales and zero points of a chunk's groups as stored in memory, for a thread's two rows.
struct Fetched {
    uint32 scale[PARTS][2];
    int zero[PARTS][2];

    MEMBER float number(int part, int i) const {
        const uint32 bits = scale[part][i];
        return SCALE == FP32 ? bits_float(bits) : SCALE == FP16 ? from_half(bits) : bits_float(bits << 16);
    }
};

typedef uint32 Operand[STEPS][4];

DEVICE void in_use(int &x) { asm volatile("" : "+r"(x)::"memory"); }

// A thread's sums of rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Consumer {
    Shared &shared;
    const void *scale;
    const signed char *zero;
    const Shape &shape;
    const Schedule &schedule;
    Ring ring;
    long long first[2];  // index of the rows' first group
    Fetched now, next;   // of this chunk and the one after

    MEMBER Consumer(Shared &shared, const void *scale, const signed char *zero, const Shape &shape,
                    const Schedule &schedule)
        : shared(shared), scale(scale), zero(zero), shape(shape), schedule(schedule) {}

    MEMBER Fetched fetched(int chunk) const {
        Fetched result;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int group = GROUP == 0 ? 0 : min((chunk * CHUNK + part * GROUP) / GROUP, shape.groups - 1);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const long long at = first[i] + group;
                if constexpr (SCALE == FP32) result.scale[part][i] = ((const uint32 *)scale)[at];
                else result.scale[part][i] = ((const unsigned short *)scale)[at];
                result.zero[part][i] = ZERO ? zero[at] : 0;
            }
        }
        return result;
    }

    MEMBER uint32 tokens_at(int slot) const {
        return __shfl_sync(0xffffffff, operand(shared_address(shared.stage[slot]) + CODE_BYTES), 0);
    }

    // Unpacks the codes in the ring's present slot.
    MEMBER void unpack(Operand &a, const Fetched &groups) const {
        const int lane = threadIdx.x % 32, line = threadIdx.x / 32 * 16 + lane % 8;
        barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
        const uint32 stage = shared_address(shared.stage[ring.slot]);
        // The TMA has swizzled units of 16 bytes.
        const uint32 at = stage + line * PITCH + (lane / 8 ^ lane % 8 / 2) * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32 words[STEPS];
            load_matrices(at + i * 8 * PITCH, words);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int own = groups.zero[step * PARTS / STEPS][i];
                a[step][i] = four_of<false, ZERO>(words[step], own);
                a[step][i + 2] = four_of<true, ZERO>(words[step], own);
            }
        }
    }

    // Begins the products of a part of a chunk.
    MEMBER void multiply_part(int (&sums)[SUMS], const Operand &a, uint32 tokens, int part) const {
        product_fence();
#pragma unroll
        for (int i = part * (STEPS / PARTS); i < (part + 1) * (STEPS / PARTS); ++i)
            multiply(sums, a[i], (uint64)OPERAND_HIGH << 32 | tokens + 2 * i, 1);
        product_commit();
    }

    // Adds the scaled sums of PERIOD chunks. Products are not in flight when it ends: across iterations of a loop, the
    // compiler would serialise them.
    MEMBER void add_period(float (&totals)[SUMS], Operand (&a)[2], int chunk) {
        const int lane = threadIdx.x % 32;
        const float base[2] = {now.number(0, 0) * BASE_UP, now.number(0, 1) * BASE_UP};
        int sums[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) totals[i] -= base[i / 2 % 2], sums[i] = BASE, in_use(sums[i]);
        uint32 tokens = tokens_at(ring.slot);
        multiply_part(sums, a[0], tokens, 0);
#pragma unroll
        for (int i = 0; i < PERIOD; ++i) {
            const Fetched after = fetched(chunk + i + 2);
            const uint32 empty = shared_address(&shared.empty[ring.slot]);
            ring.advance();
            const uint32 more = tokens_at(ring.slot);
            if (i + 1 < PERIOD || chunk + PERIOD < schedule.last) unpack(a[(i + 1) % 2], next);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const bool last = part + 1 == PARTS, ends = last && i + 1 == PERIOD;
                float factor[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float other = ends ? 0.0f : last ? next.number(0, j) : now.number(part + 1, j);
                    factor[j] = UP * (now.number(part, j) - other);
                }
                product_wait<0>();
#pragma unroll
                for (int j = 0; j < SUMS; ++j) in_use(sums[j]);
                if (last && lane < BESIDE) barrier_arrive(empty, BESIDE == 1 ? schedule.rank : lane);
#pragma unroll
                for (int j = 0; (GROUP || ends) && j < SUMS; ++j)
                    totals[j] = fma_exactly(bits_float(sums[j]), factor[j / 2 % 2], totals[j]);
                if (last && !ends) multiply_part(sums, a[(i + 1) % 2], more, 0);
                else if (!last) multiply_part(sums, a[i % 2], tokens, part + 1);
            }
            tokens = more, now = next, next = after;
        }
    }

    // The scaled sums of the block's chunks of the tile whose rows of this thread begin at `row`.
    MEMBER void sum(float (&totals)[SUMS], int row) {
        Operand a[2];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) totals[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) first[i] = (long long)min(row + i * 8, shape.n - 1) * shape.groups;
        now = fetched(schedule.first), next = fetched(schedule.first + 1);
        unpack(a[0], now);
        for (int chunk = schedule.first; chunk < schedule.last; chunk += PERIOD) add_period(totals, a, chunk);
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
    for (int j = 0; j < SQUARES; ++j) {
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

// Sends sums to the blocks that finish their tokens, and adds those of this block's tokens in the order of K.
DEVICE void exchange(Shared &shared, float (&totals)[SUMS], uint32 rank, uint32 parity) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32 arrived = shared_address(&shared.sums_arrived), read = shared_address(&shared.sums_read);
    if (threadIdx.x == 0) barrier_expect(arrived, sizeof(shared.sums));
    barrier_wait(read, parity ^ 1);
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j) {
        const float4 four = make_float4(totals[j * 4], totals[j * 4 + 1], totals[j * 4 + 2], totals[j * 4 + 3]);
        float4 *to = &shared.sums[(rank * WARPS + warp) * SQUARES + j / 2 % SQUARES][j % 2][lane];
        send(shared_address(to), j / 2 / SQUARES, four, arrived);
    }
    barrier_wait_after(arrived, parity);
#pragma unroll
    for (int j = 0; j < SQUARES * 2; ++j) {
        float4 four = {};
#pragma unroll
        for (int from = 0; from < SPLIT; ++from) {
            const float4 more = shared.sums[(from * WARPS + warp) * SQUARES + j / 2][j % 2][lane];
            four.x += more.x, four.y += more.y, four.z += more.z, four.w += more.w;
        }
        totals[j * 4] = four.x, totals[j * 4 + 1] = four.y, totals[j * 4 + 2] = four.z, totals[j * 4 + 3] = four.w;
    }
    __syncwarp();
    if (lane < SPLIT) barrier_arrive(read, lane);
}

DEVICE void consume(Shared &shared, const TensorMap &out, const void *scale, const signed char *zero, const void *bias,
                    const float *token_scale, const Shape &shape, uint32 rank) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    const uint32 box = shared_address(shared.box[group]);
    Schedule schedule(shape, rank);
    Consumer consumer(shared, scale, zero, shape, schedule);
    for (uint32 parity = 0; schedule.take(); parity ^= 1) {
        const int column = schedule.row + group * 64, row = column + thread / 32 * 16 + lane / 4;
        const int own = schedule.token + rank / BESIDE * (TOKENS / SPLIT), token = own + thread;
        // Loaded early, so that they arrive while the product runs.
        const float own_scale = thread < TOKENS / SPLIT && token < shape.m ? token_scale[token] : 0.0f;
        float totals[SUMS], own_bias[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) own_bias[i] = bias && row + i * 8 < shape.n ? number_at(bias, row + i * 8) : 0.0f;
        consumer.sum(totals, row);
        if constexpr (SPLIT > 1) exchange(shared, totals, rank, parity);
        if (thread == 0) store_wait<0>();
        if (thread < TOKENS / SPLIT) shared.token_scale[group][thread] = own_scale;
        named_barrier_sync(1 + group, 128);  // the box is free, the scales are in shared memory
        fill_box(box, totals, shared.token_scale[group], own_bias);
        fence_for_tma();
        named_barrier_sync(1 + group, 128);
        if (thread == 0 && column < shape.n) {
            store_box(out, column, own, box);
            store_commit();
        }
    }
    if (thread == 0) store_wait<0>();
}

// Grid: a multiple of CLUSTER blocks, at most one per multiprocessor. codes [n, bytes]: tensor map in boxes of
// ROWS x PITCH bytes. x [m, k]: in boxes of TOKENS / BESIDE x CHUNK. out [m, n]: in boxes of TOKENS / SPLIT x 64.
// scale and zero [n, groups], bias [n] of OUT or null, token_scale [m]. `chunks`: a multiple of PERIOD, at least SPLIT
// times PERIOD; codes of x beyond k are 0.
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
            barrier_init(shared_address(&shared.empty[i]), WARPS * BESIDE);
        }
        barrier_init(shared_address(&shared.sums_arrived), 1);
        barrier_init(shared_address(&shared.sums_read), WARPS * SPLIT);
        barrier_init_fence();
        prefetch(codes), prefetch(x), prefetch(out);
    }
    if (threadIdx.x == GROUPS * 128) fetch(codes, shape, rank);
    __syncwarp();
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
