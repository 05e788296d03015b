// The parts that products of 8-bit matrices on sm_90a share: tiles of both operands in a ring in shared memory, the sums
// of a tile in registers, and boxes in which scaled results are stored.
//
// Macros: OUT, BIAS, TILE_N and STAGES as in scaled_mm_sm90.cu; SUM (the type of sums: int for int8, float for float8).
// ptx.cuh, sm90.cuh and `multiply`, the wgmma instruction, stand before this file.
//
// A tile is 128 x TILE_N. The third warpgroup of a block is the producer; each of the other two multiplies 64 rows.

enum { NONE, BF16, FP16, FP32, SLICES };

static constexpr int TILE_M = 128, TILE_K = 128;  // TILE_K is also a row's bytes in shared memory
static constexpr int CLUSTER = 2;
static constexpr int GROUPS = 2;                  // warpgroups that multiply
static constexpr int THREADS = 128 * (GROUPS + 1);
static constexpr int A_BYTES = TILE_M * TILE_K, B_BYTES = TILE_N * TILE_K, STAGE_BYTES = A_BYTES + B_BYTES;
static constexpr int OUT_SIZE = OUT == FP32 || OUT == SLICES ? 4 : 2;
static constexpr int BOX_COLUMNS = 128 / OUT_SIZE, BOX_BYTES = 64 * 128;  // a box of the result is stored at once
static constexpr int BOXES = TILE_N / BOX_COLUMNS;                        // boxes of a tile: an even number, or 1
static constexpr int SUMS = TILE_N / 2, COLUMN_SCALES = (TILE_N + 127) / 128;  // per thread

struct Shared {
    unsigned char stage[STAGES][STAGE_BYTES];
    unsigned char box[GROUPS][2][BOX_BYTES];
    float scale[GROUPS][TILE_N];  // scales of the tile's columns
    uint64 full[STAGES], empty[STAGES];
};

struct Ring {
    int slot = 0;
    uint32 parity = 0;
    MEMBER void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

// Tells every block that writes to a slot that this warp has read it.
DEVICE void release(Shared &shared, int slot) {
    const uint32 lane = threadIdx.x % 32;
    if (lane < CLUSTER) barrier_arrive(shared_address(&shared.empty[slot]), lane);
}

// The sums of 64 rows of a tile over `steps` steps, at least one. A template is compiled only where it is called: the
// `multiply` of grouped_block_mm has half of these sums.
template <int N>
DEVICE void accumulate(Shared &shared, Ring &ring, SUM (&sums)[N], int steps) {
    const int group = threadIdx.x / 128;
    int before = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
        barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
        const uint32 stage = shared_address(shared.stage[ring.slot]);
        const uint32 a = operand(stage + group * 64 * TILE_K), b = operand(stage + A_BYTES);
        product_fence();
#pragma unroll
        for (int k = 0; k < TILE_K / 32; ++k) multiply(sums, a + 2 * k, b + 2 * k, step > 0 || k > 0);
        product_commit();
        product_wait<1>();  // the previous step is done
        if (step > 0) release(shared, before);
        before = ring.slot;
    }
    product_wait<0>();
    release(shared, before);
}

// Initialises the barriers of the ring; the caller then lets the cluster meet.
DEVICE void prepare(Shared &shared, const TensorMap &a, const TensorMap &b, const TensorMap &out) {
    if (threadIdx.x != 0) return;
    if (shared_address(&shared) % 1024 != 0) __trap();  // the swizzle depends on address bits
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(shared_address(&shared.full[i]), 1);
        barrier_init(shared_address(&shared.empty[i]), GROUPS * 4 * CLUSTER);
    }
    barrier_init_fence();
    prefetch(a), prefetch(b), prefetch(out);
}

DEVICE float bias_at(const void *bias, int column) {
    if constexpr (BIAS == FP32) return ((const float *)bias)[column];
    else if constexpr (BIAS == BF16) return bits_float((uint32)((const unsigned short *)bias)[column] << 16);
    else return from_half(((const unsigned short *)bias)[column]);
}

// Two neighbouring sums to results. For SLICES the results are the sums' bits.
DEVICE float bits_of(int sum) { return bits_float((uint32)sum); }
DEVICE float bits_of(float sum) { return sum; }
DEVICE void scaled(const SUM *sums, float row_scale, float2 column_scale, float2 bias, float &x, float &y) {
    if constexpr (OUT == SLICES) {
        x = bits_of(sums[0]), y = bits_of(sums[1]);
        return;
    }
    x = (float)sums[0] * row_scale * column_scale.x;
    y = (float)sums[1] * row_scale * column_scale.y;
    if constexpr (BIAS != NONE) x += bias.x, y += bias.y;
}

DEVICE uint32 packed(float x, float y) {
    if constexpr (OUT == FP16) return to_half2(x, y);
    else return to_bf16x2(x, y);
}

// Writes 64 x BOX_COLUMNS results, from column `column` of the product on, to shared memory in the TMA's layout. For
// each 8 neighbouring columns, a thread holds two in row lane / 4 of its warp's 16 rows and two in the row 8 below.
DEVICE void fill_box(uint32 box, const SUM *sums, const float *row_scale, const float *column_scale, const void *bias,
                     int column, int columns) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int matrix = lane / 8;  // a store has four: rows 0..7 and 8..15 of eight columns, and of the next eight
    const uint32 row = warp * 16 + (matrix & 1) * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < BOX_COLUMNS / 8; j += 2) {
        float x[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (j + half) * 8 + lane % 4 * 2;
            const float2 scale = *(const float2 *)&column_scale[at];
            float2 shift = {0.0f, 0.0f};
            if constexpr (BIAS != NONE) {
                if (column + at < columns) shift.x = bias_at(bias, column + at);
                if (column + at + 1 < columns) shift.y = bias_at(bias, column + at + 1);
            }
            const SUM *s = sums + (j + half) * 4;
            scaled(s, row_scale[0], scale, shift, x[half * 4], x[half * 4 + 1]);
            scaled(s + 2, row_scale[1], scale, shift, x[half * 4 + 2], x[half * 4 + 3]);
        }
        if constexpr (OUT_SIZE == 4) {
            const uint32 own = warp * 16 + lane / 4;  // own + 8 has the same remainder modulo 8
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32 chunk = (j + half) * 2 + lane % 4 / 2;
                const uint32 to = box + own * 128 + (chunk ^ own % 8) * 16 + lane % 2 * 8;
                store_pair(to, x[half * 4], x[half * 4 + 1]);
                store_pair(to + 8 * 128, x[half * 4 + 2], x[half * 4 + 3]);
            }
        } else {
            const uint32 chunk = j + matrix / 2;
            store_matrices(box + row * 128 + (chunk ^ row % 8) * 16, packed(x[0], x[1]), packed(x[2], x[3]),
                           packed(x[4], x[5]), packed(x[6], x[7]));
        }
    }
}

// Scales the sums of a warpgroup's 64 rows and stores them box by box. All threads of the warpgroup call `store(i, box)`
// once box i is in shared memory.
template <typename Store>
DEVICE void store_sums(Shared &shared, const SUM (&sums)[SUMS], const float (&row_scale)[2],
                       const float (&column_scale)[COLUMN_SCALES], const void *bias, int column, int columns,
                       const Store &store) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < COLUMN_SCALES; ++i) {
        if (TILE_N % 128 == 0 || thread < TILE_N) shared.scale[group][i * 128 + thread] = column_scale[i];
    }
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
        const uint32 box = shared_address(shared.box[group][i % 2]);
        if (thread == 0) store_wait<(BOXES > 1)>();
        named_barrier_sync(1 + group, 128);  // the box is free, the scales are in shared memory
        fill_box(box, sums + i * (BOX_COLUMNS / 2), row_scale, shared.scale[group] + i * BOX_COLUMNS, bias,
                 column + i * BOX_COLUMNS, columns);
        fence_for_tma();
        named_barrier_sync(1 + group, 128);
        store(i, box);
    }
}
