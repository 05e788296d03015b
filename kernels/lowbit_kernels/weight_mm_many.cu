// Weights of 4 or 8 bits times many tokens, on sm_90a: out[m, n] = token_scale[m] * sum_k x[m, k] * (code[n, k] -
// zero[n, k / GROUP]) * scale[n, k / GROUP] + bias[n] + residual[m, n].
//
// weight_mm_many.py compiles this once for each combination of
//   DTYPE              BF16 or FP16: of x, bias, residual, out
//   BITS               4 (nibble = code + 8, even k in the low one) or 8
//   GROUP              a multiple of 32, or 0: one scale a row
//   SCALE              BF16, FP16 or FP32
//   ZERO               1: there are zero points
//   ROUNDED            1: the scale is multiplied into the weight, which is rounded to DTYPE (SCALE is DTYPE); 0: into the
//                      sums of a group, in float32
//   TOKENS             of a tile: a multiple of 16, at most 256
//   SUBTILES           of 64 rows of the weight that a warpgroup works on: 1 or 2
//   CLUSTER            1 or 2 blocks, on rows beside each other, which load half of the tokens each for both
//   STAGES             chunks in the ring
// and puts before it ptx.cuh, hopper.cuh and `multiply`, the instruction.
//
// The tile computed is out's transpose: rows of the weight, which a thread unpacks in registers as the product's first
// operand, by tokens, which the TMA copies to shared memory. In an instruction's 16 K a thread holds four of a row, two
// and two neighbouring; in memory it finds them where it can unpack them in fewest steps. So K is another order than
// x's, within each 32 (16 of 8 bits); `reorder`, a kernel of its own before, puts x into it.
//
// Work is counted in units, a chunk of K of a tile, and divided evenly among the clusters, whatever the tiles' number: a
// cluster has a run of units, in the order of tiles. It begins at the run's end. Of the last tile it has the first chunks
// perhaps: then it leaves its sums in memory, for the cluster that has the tile's last chunks, which comes to that tile
// last, and adds in a fixed order what the others left. It waits for clusters before itself only, which the GPU starts
// earlier, and which do first what is waited for: nothing can stand still.

enum { BF16, FP16, FP32 };

static constexpr int CHUNK = 128;                   // of K, of a stage
static constexpr int GROUPS = 2;                    // warpgroups that multiply
static constexpr int WARPS = 4 * GROUPS;            // theirs
static constexpr int THREADS = 128 * (GROUPS + 1);
static constexpr int ROWS = 64 * GROUPS * SUBTILES;  // of the weight, of a block's tile
static constexpr int PITCH = CHUNK * BITS / 8;       // bytes of a row of codes in a stage
static constexpr int CODE_BYTES = ROWS * PITCH, TOKEN_BYTES = TOKENS * CHUNK * 2, STAGE_BYTES = CODE_BYTES + TOKEN_BYTES;
static constexpr int SUMS = TOKENS / 2;  // of a thread and subtile
static constexpr bool FLUSH = GROUP > 0 && !ROUNDED;  // sums of a group are scaled and added to others
static constexpr int RUN = GROUP % 128 == 0 ? 128 : GROUP % 64 == 0 ? 64 : 32;  // of K that lie in one group
static constexpr int RUNS = GROUP ? CHUNK / RUN : 1;
static constexpr int SUMMED = FLUSH ? RUNS : 1;                 // parts of a chunk that are summed apart
static constexpr int STEPS = SUMMED == 4 ? 2 : 4;               // instructions of a piece, of 16 K each
static constexpr int PIECES = 8 / STEPS, HALVES = PIECES / SUMMED;  // of a chunk, of a part
static constexpr int VECTORS = SUBTILES * SUMS / 4;             // of four sums that a thread leaves
static constexpr int BOX_PITCH = 48;                            // bytes of 16 results of a token; free of bank conflicts

struct Shared {
    unsigned char stage[STAGES][STAGE_BYTES];
    unsigned char box[WARPS][16 * BOX_PITCH];
    uint64 full[STAGES], empty[STAGES];
};

// The product's shape in tiles: `rows` of clusters, `columns` of tokens, of which `band` are worked through together,
// for the L2 cache.
struct Shape {
    int m, n, chunks, groups, rows, columns, band;
};

// What the sums are scaled by, and what is added to them.
struct Epilogue {
    const void *scale, *bias, *residual;
    const float *token_scale;
    unsigned short *out;
    int wide;  // all rows begin at multiples of 16 bytes
};

// A block's segments: chunks first..last - 1 of one tile each, from the end of its run to the beginning.
struct Schedule {
    const Shape shape;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    long long end = begin_of(cluster + 1), tile;
    int row, token, first, last;

    MEMBER explicit Schedule(const Shape &shape) : shape(shape) {}

    MEMBER long long begin_of(int cluster) const {
        return (long long)shape.rows * shape.columns * shape.chunks * cluster / clusters;
    }

    MEMBER bool take(uint32 rank) {
        const long long begin = begin_of(cluster);
        if (end <= begin) return false;
        tile = (end - 1) / shape.chunks;
        const long long zero = tile * shape.chunks;
        first = begin > zero ? begin - zero : 0;
        last = end - zero;
        end = zero + first;
        const long long above = tile / ((long long)shape.band * shape.rows) * shape.band;
        const long long within = tile - above * shape.rows;
        const int width = min((long long)shape.band, shape.columns - above);
        row = (within / width * CLUSTER + rank) * ROWS;
        token = (above + within % width) * TOKENS;
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

// ---- the producer ----------------------------------------------------------------------------------------------------

DEVICE void load_codes(Shared &shared, const TensorMap &codes, const Schedule &schedule, int chunk, int slot) {
    const uint32 full = shared_address(&shared.full[slot]);
    barrier_expect(full, STAGE_BYTES);
    load_box(codes, chunk * PITCH, schedule.row, shared_address(shared.stage[slot]), full);
    if constexpr (ROWS > 128)
        load_box(codes, chunk * PITCH, schedule.row + 128, shared_address(shared.stage[slot]) + 128 * PITCH, full);
}

DEVICE void load_tokens(Shared &shared, const TensorMap &x, const Schedule &schedule, int chunk, int slot, uint32 rank) {
    const uint32 full = shared_address(&shared.full[slot]), to = shared_address(shared.stage[slot]) + CODE_BYTES;
    const int share = rank * (TOKENS / CLUSTER);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32 there = to + half * (TOKEN_BYTES / 2) + share * 128;
        const int k = chunk * CHUNK + half * (CHUNK / 2);
        if constexpr (CLUSTER == 1) load_box(x, k, schedule.token, there, full);
        else load_box(x, k, schedule.token + share, there, full, (1 << CLUSTER) - 1);
    }
}

// Codes come from nobody whom this kernel may overtake: the first are on their way before x is reordered.
DEVICE void produce(Shared &shared, const TensorMap &codes, const TensorMap &x, const Shape &shape, uint32 rank) {
    int ahead = 0;
    for (Schedule schedule(shape); ahead < STAGES && schedule.take(rank);)
        for (int chunk = schedule.first; chunk < schedule.last && ahead < STAGES; ++chunk)
            load_codes(shared, codes, schedule, chunk, ahead++);
    wait_for_previous();
    Schedule schedule(shape);
    Ring ring;
    while (schedule.take(rank)) {
        for (int chunk = schedule.first; chunk < schedule.last; ++chunk, ring.advance()) {
            if (ahead > 0) {
                --ahead;
            } else {
                barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
                load_codes(shared, codes, schedule, chunk, ring.slot);
            }
            load_tokens(shared, x, schedule, chunk, ring.slot, rank);
        }
    }
}

// ---- unpacking -------------------------------------------------------------------------------------------------------

DEVICE uint32 packed(float low, float high) {
    if constexpr (DTYPE == FP16) return to_half2(low, high);
    else return to_bf16x2(low, high);
}

DEVICE float unpacked(uint32 bits) {
    if constexpr (DTYPE == FP16) return from_half(bits & 0xffff);
    else return bits_float(bits << 16);
}

DEVICE float number_at(const void *p, long long i, int type) {
    if (type == FP32) return ((const float *)p)[i];
    const uint32 bits = ((const unsigned short *)p)[i];
    return type == FP16 ? from_half(bits) : bits_float(bits << 16);
}

DEVICE uint32 difference(uint32 a, uint32 b) {
    if constexpr (DTYPE == FP16) return subtract_half2(a, b);
    else return subtract_bf16x2(a, b);
}

// A group's scale and zero point as they lie in memory: on their way while others are in use.
struct Fetched {
    uint32 scale;
    int zero;
};

// A group's scale and what is to be taken off its codes as they are unpacked, in both halves of a word.
struct Group {
    float scale;
    uint32 zero;
};

DEVICE int group_of(int run) { return GROUP ? run / (GROUP / RUN) : 0; }

// Of row `row`, in the run of K of that number.
DEVICE Fetched fetched(const void *scale, const signed char *zero, const Shape &shape, int row, int run) {
    const long long at = (long long)min(row, shape.n - 1) * shape.groups + min(group_of(run), shape.groups - 1);
    Fetched result;
    result.scale = SCALE == FP32 ? ((const uint32 *)scale)[at] : ((const unsigned short *)scale)[at];
    result.zero = ZERO ? zero[at] : 0;
    return result;
}

// Beyond the last group x is zero, whatever the codes are.
DEVICE Group group_from(const Fetched &from, const Shape &shape, int run) {
    Group group;
    group.scale = SCALE == FP32 ? bits_float(from.scale) : SCALE == FP16 ? from_half(from.scale) : bits_float(from.scale << 16);
    if (group_of(run) >= shape.groups) group.scale = 0.0f;
    // what a code is or-ed into, plus the zero point: exact
    if constexpr (!ZERO) group.zero = DTYPE == FP16 ? (BITS == 4 ? 0x64086408 : 0x64806480) : 0x43084308;
    else {
        const float off = (float)(from.zero + (DTYPE == FP16 ? (BITS == 4 ? 1032 : 1152) : BITS == 4 ? 136 : 0));
        group.zero = packed(off, off);
    }
    return group;
}

// Two of the codes of `word`, less the zero point: of 4 bits nibbles i and i + 4, of 8 bytes i and i + 2. Or-ed into
// the lowest bits of 128 (in fp16 1024) a code is that number more; differences of at most 256 are exact.
DEVICE uint32 two_of(uint32 word, int i, const Group &group, uint32 scale) {
    constexpr uint32 BASE = DTYPE == FP16 ? 0x64006400 : 0x43004300;
    uint32 x;
    if constexpr (BITS == 4) {
        x = difference(masked_or(word >> 4 * i, 0x000f000f, BASE), group.zero);
    } else if constexpr (DTYPE == FP16) {
        x = difference(masked_or(word >> 8 * i, 0x00ff00ff, BASE), group.zero);
    } else {
        // bf16 has 7 bits below 128: the sign's weight, -128, comes by the other term
        x = difference(masked_or(word >> 8 * i, 0x007f007f, BASE), masked_or(word >> 8 * i, 0x00800080, BASE));
        if constexpr (ZERO) x = difference(x, group.zero);
    }
    if constexpr (ROUNDED) x = DTYPE == FP16 ? multiply_half2(x, scale) : multiply_bf16x2(x, scale);
    return x;
}

// The first operand of `STEPS` products from step `first` of a chunk on, of rows lane / 4 and 8 below of a warp's 16.
// `at` is the address of the thread's first word of the upper row; the TMA has permuted the 16-byte pieces of a row.
DEVICE void unpack(uint32 (&a)[STEPS * 4], uint32 at, int first, const Group (&upper)[RUNS], const Group (&lower)[RUNS]) {
#pragma unroll
    for (int word = 0; word < STEPS * BITS / 8; ++word) {
        const int piece = first * BITS / 8 + word, run = GROUP ? piece * (16 * 8 / BITS) / RUN : 0;
        uint32 high = shared_word(at ^ piece * 16), low = shared_word((at ^ piece * 16) + 8 * PITCH);
        if constexpr (BITS == 8 && DTYPE == FP16) high ^= 0x80808080, low ^= 0x80808080;  // code + 128
        const uint32 high_scale = ROUNDED ? packed(upper[run].scale, upper[run].scale) : 0;
        const uint32 low_scale = ROUNDED ? packed(lower[run].scale, lower[run].scale) : 0;
#pragma unroll
        for (int pair = 0; pair < 16 / BITS; ++pair) {
            uint32 *to = a + word * (32 / BITS) + pair * 2;
            to[0] = two_of(high, pair, upper[run], high_scale);
            to[1] = two_of(low, pair, lower[run], low_scale);
        }
    }
}

// ---- the consumers ---------------------------------------------------------------------------------------------------

template <typename T, int COUNT>
DEVICE void keep(T (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) in_use(x[i]);
}

// A warp has read all it needs of a slot: says so to every block that writes to it.
DEVICE void release(Shared &shared, int slot) {
    const uint32 lane = threadIdx.x % 32;
    if (lane < CLUSTER) barrier_arrive(shared_address(&shared.empty[slot]), lane);
}

// Adds the group's sums, scaled, to the others.
DEVICE void flush(float (&totals)[SUMS], float (&sums)[SUMS], const float (&scale)[2]) {
    keep(sums);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) totals[i] = fmaf(sums[i], scale[i / 2 % 2], totals[i]);
}

// A thread's share of a segment: the sums of its rows, lane / 4 and 8 below of its warp's 16 of each subtile.
struct Consumer {
    Shared &shared;
    const void *scale;
    const signed char *zero;
    const Shape &shape;
    Ring ring;
    uint32 a[2][STEPS * 4];
    Group group[SUBTILES][2][RUNS];   // of the chunk
    Fetched next[SUBTILES][2][RUNS];  // of the next one

    MEMBER Consumer(Shared &shared, const void *scale, const signed char *zero, const Shape &shape)
        : shared(shared), scale(scale), zero(zero), shape(shape) {
#pragma unroll
        for (int i = 0; i < STEPS * 4; ++i) a[0][i] = a[1][i] = 0;
    }

    MEMBER void fetch(int row, int chunk) {
#pragma unroll
        for (int i = 0; i < SUBTILES * 2 * RUNS; ++i) {
            const int subtile = i / RUNS / 2, below = i / RUNS % 2, run = i % RUNS;
            next[subtile][below][run] = fetched(scale, zero, shape, row + subtile * 64 + below * 8, chunk * RUNS + run);
        }
    }

    MEMBER void take_fetched(int chunk) {
#pragma unroll
        for (int i = 0; i < SUBTILES * 2 * RUNS; ++i) {
            const int subtile = i / RUNS / 2, below = i / RUNS % 2, run = i % RUNS;
            group[subtile][below][run] = group_from(next[subtile][below][run], shape, chunk * RUNS + run);
        }
    }

    // Lines of scales that are read many chunks later.
    MEMBER void prefetch_scales(int row, int chunk) const {
        const int own = group_of((chunk + 16) * RUNS);
        if (chunk % 8 != 0 || own >= shape.groups) return;
#pragma unroll
        for (int i = 0; i < SUBTILES * 2; ++i) {
            const long long at = (long long)min(row + i / 2 * 64 + i % 2 * 8, shape.n - 1) * shape.groups + own;
            prefetch_line((const unsigned char *)scale + at * (SCALE == FP32 ? 4 : 2));
            if constexpr (ZERO) prefetch_line(zero + at);
        }
    }

    // The products of chunks first..last - 1: `totals` (and `sums`, where groups are summed apart) begin as zeros.
    // Pieces of four products or two: while the tensor cores have one, the next is unpacked, in other registers.
    MEMBER void sum(float (&sums)[SUBTILES][SUMS], float (&totals)[SUBTILES][SUMS], int row, int first, int last) {
        const int lane = threadIdx.x % 32, line = threadIdx.x / 32 * 16 % 64 + lane / 4;
        const int swizzle = BITS == 4 ? lane / 8 % 4 : lane / 4;  // of the row
        const uint32 codes = (threadIdx.x / 128 * 64 * SUBTILES + line) * PITCH + swizzle * 16 + lane % 4 * 4;
        float pending[SUBTILES][2] = {};
        fetch(row, first);
        if constexpr (GROUP == 0) take_fetched(0);
        int before = -1;
        for (int chunk = first; chunk < last; ++chunk, ring.advance()) {
            if constexpr (GROUP > 0) {
                take_fetched(chunk);
                fetch(row, chunk + 1);
                prefetch_scales(row, chunk);
            }
            barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
            const uint32 stage = __shfl_sync(0xffffffff, shared_address(shared.stage[ring.slot]), 0);
#pragma unroll
            for (int piece = 0; piece < PIECES * SUBTILES; ++piece) {
                const int part = piece / (HALVES * SUBTILES), subtile = piece / HALVES % SUBTILES, half = piece % HALVES;
                uint32(&own)[STEPS * 4] = a[piece % 2];
                // The piece before the last one is done, and has left these registers. The last one too, where it was
                // a group's: the compiler, which can't tell whose sums are read, would run products one by one.
                if (FLUSH && SUBTILES > 1 && HALVES == 1 && piece % 2 == 0) product_wait<0>();
                else product_wait<1>();
                keep(own);
                if (piece == 1 && before >= 0) release(shared, before);
                const int step = part * (8 / SUMMED) + half * STEPS;
                unpack(own, stage + codes + subtile * 64 * PITCH, step, group[subtile][0], group[subtile][1]);
                if (FLUSH && piece % (HALVES * SUBTILES) == 0) {
                    product_wait<0>();
#pragma unroll
                    for (int i = 0; i < SUBTILES; ++i) {
                        flush(totals[i], sums[i], pending[i]);
                        pending[i][0] = group[i][0][part].scale, pending[i][1] = group[i][1][part].scale;
                    }
                }
                product_fence();
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    const int k = step + i;
                    const uint32 b = operand(stage + CODE_BYTES + k / 4 * (TOKEN_BYTES / 2)) + k % 4 * 2;
                    multiply(sums[subtile], own + i * 4, b, !FLUSH || half > 0 || i > 0);
                }
                product_commit();
            }
            before = ring.slot;
        }
        product_wait<0>();
        keep(a[0]), keep(a[1]);
        release(shared, before);
#pragma unroll
        for (int subtile = 0; subtile < SUBTILES; ++subtile) {
            if constexpr (FLUSH) flush(totals[subtile], sums[subtile], pending[subtile]);
            else keep(sums[subtile]);
        }
    }
};

// ---- sums of a tile that several clusters have worked on -------------------------------------------------------------

DEVICE void leave(float4 *partial, unsigned int *left, const float (&sums)[SUBTILES][SUMS]) {
    float4 *to = partial + (long long)blockIdx.x * VECTORS * (GROUPS * 128) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const float *from = &sums[i / (SUMS / 4)][i % (SUMS / 4) * 4];
        __stcg(to + i * (GROUPS * 128), make_float4(from[0], from[1], from[2], from[3]));
    }
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) store_release(left + blockIdx.x * WARPS + threadIdx.x / 32, 1);
}

DEVICE void gather(const float4 *partial, const unsigned int *left, float (&sums)[SUBTILES][SUMS],
                   const Schedule &schedule, uint32 rank) {
    const long long zero = schedule.tile * schedule.shape.chunks;
    for (int cluster = schedule.cluster; schedule.begin_of(cluster) > zero;) {
        const int block = --cluster * CLUSTER + rank;
        while (!load_acquire(left + block * WARPS + threadIdx.x / 32)) {
        }
        __syncwarp();
        const float4 *from = partial + (long long)block * VECTORS * (GROUPS * 128) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const float4 part = __ldcg(from + i * (GROUPS * 128));
            float *to = &sums[i / (SUMS / 4)][i % (SUMS / 4) * 4];
            to[0] += part.x, to[1] += part.y, to[2] += part.z, to[3] += part.w;
        }
    }
}

// ---- results ---------------------------------------------------------------------------------------------------------

// Eight results of a token, or as many as there are, between memory and a warp's 16 bytes of shared memory.
DEVICE void copy_eight(unsigned short *to, const unsigned short *from, int count, bool wide) {
    if (wide && count >= 8) {
        *(uint4 *)to = *(const uint4 *)from;
    } else {
        for (int i = 0; i < min(count, 8); ++i) to[i] = from[i];
    }
}

// The sums of 16 rows, from `row` on, to results: a warp's, of TOKENS tokens, turned by way of shared memory.
DEVICE void finish(unsigned char *box, const Epilogue &epilogue, const Shape &shape, const float (&sums)[SUMS], int row,
                   int token) {
    const int lane = threadIdx.x % 32;
    float scale[2], bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int own = min(row + lane / 4 + i * 8, shape.n - 1);
        scale[i] = GROUP ? 1.0f : number_at(epilogue.scale, own, SCALE);
        bias[i] = epilogue.bias ? number_at(epilogue.bias, own, DTYPE) : 0.0f;
    }
    // As matrices of 8 x 8 are stored: a token's rows 0..7, 8..15, and of the next eight tokens.
    const uint32 matrix = shared_address(box) + (lane / 16 * 8 + lane % 8) * BOX_PITCH + lane / 8 % 2 * 16;
    unsigned short *mine = (unsigned short *)(box + lane / 2 * BOX_PITCH + lane % 2 * 16);
    const int column = row + lane % 2 * 8;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j += 2) {
        if (token + j * 8 >= shape.m) break;
        const int own = token + j * 8 + lane / 2, count = own < shape.m ? shape.n - column : 0;
        const long long at = (long long)own * shape.n + column;
        uint32 residual[4] = {};
        if (epilogue.residual) {
            copy_eight(mine, (const unsigned short *)epilogue.residual + at, count, epilogue.wide);
            __syncwarp();
            load_matrices_turned(matrix, residual);
            __syncwarp();
        }
        uint32 result[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = token + (j + i / 2) * 8 + lane % 4 * 2;
            float2 x = {sums[(j + i / 2) * 4 + i % 2 * 2] * scale[i % 2], sums[(j + i / 2) * 4 + i % 2 * 2 + 1] * scale[i % 2]};
            if (epilogue.token_scale) {
                x.x *= epilogue.token_scale[min(first, shape.m - 1)];
                x.y *= epilogue.token_scale[min(first + 1, shape.m - 1)];
            }
            x.x += bias[i % 2], x.y += bias[i % 2];
            if (epilogue.residual) x.x += unpacked(residual[i] & 0xffff), x.y += unpacked(residual[i] >> 16);
            result[i] = packed(x.x, x.y);
        }
        store_matrices_turned(matrix, result);
        __syncwarp();
        copy_eight(epilogue.out + at, mine, count, epilogue.wide);
        __syncwarp();
    }
}

DEVICE void consume(Shared &shared, const Epilogue &epilogue, const signed char *zero, float4 *partial,
                    unsigned int *left, const Shape &shape, uint32 rank) {
    const int warp = threadIdx.x / 32, below = warp / 4 * 64 * SUBTILES + warp % 4 * 16;
    Schedule schedule(shape);
    Consumer consumer(shared, epilogue.scale, zero, shape);
    wait_for_previous();  // `left` is cleared there
    while (schedule.take(rank)) {
        float sums[SUBTILES][SUMS], totals[SUBTILES][SUMS];
#pragma unroll
        for (int i = 0; i < SUBTILES * SUMS; ++i) sums[i / SUMS][i % SUMS] = totals[i / SUMS][i % SUMS] = 0.0f;
        const int row = schedule.row + below;
        consumer.sum(sums, totals, row + threadIdx.x % 32 / 4, schedule.first, schedule.last);
        float(&result)[SUBTILES][SUMS] = FLUSH ? totals : sums;
        if (schedule.last < shape.chunks) {
            leave(partial, left, result);
            continue;
        }
        if (schedule.first > 0) gather(partial, left, result, schedule, rank);
#pragma unroll
        for (int subtile = 0; subtile < SUBTILES; ++subtile)
            finish(shared.box[warp], epilogue, shape, result[subtile], row + subtile * 64, schedule.token);
    }
}

// Grid: a multiple of CLUSTER blocks, at most as many as there are multiprocessors. codes [n, bytes] by boxes of 128 x
// PITCH bytes, swizzled over as much; x [m, chunks * 128] as `reorder` leaves it, by boxes of TOKENS / CLUSTER x 64. scale
// and zero [n, groups]; bias [n], residual [m, n], token_scale [m] or null. partial: VECTORS x 256 for each block, left:
// WARPS zeros for each block; both only where a tile's chunks are divided.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    weight_mm(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap x, const void *scale,
              const signed char *zero, const void *bias, const void *residual, const float *token_scale,
              unsigned short *out, float4 *partial, unsigned int *left, int m, int n, int chunks, int groups, int rows,
              int columns, int band, int wide) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Shape shape = {m, n, chunks, groups, rows, columns, band};
    const Epilogue epilogue = {scale, bias, residual, token_scale, out, wide};
    const uint32 rank = CLUSTER == 1 ? 0 : cluster_rank();
    if (threadIdx.x == 0) {
        if (shared_address(memory) % 1024 != 0) __trap();  // the swizzle goes by addresses
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), WARPS * CLUSTER);
        }
        barrier_init_fence();
    }
    cluster_meet();

    if (threadIdx.x >= GROUPS * 128) {
        give_registers<40>();
        if (threadIdx.x == GROUPS * 128) {
            prefetch(codes), prefetch(x);
            produce(shared, codes, x, shape, rank);
        }
        __syncwarp();
    } else {
        take_registers<232>();
        consume(shared, epilogue, zero, partial, left, shape, rank);
        __syncwarp();
    }
    // The other block may still write to this one's barriers.
    if constexpr (CLUSTER > 1) cluster_meet();
}

// ---- x in the order of the products ----------------------------------------------------------------------------------

DEVICE uint32 one_of(const uint32 (&words)[4], int i) {
    return i & 2 ? (i & 1 ? words[3] : words[2]) : (i & 1 ? words[1] : words[0]);
}

// x [m, k], rows `stride` apart, to [m, width], zeros beyond k; `zeros` words at `left` are cleared. A thread has eight
// elements. At place 16 s + 8 h + 2 t + b of 16 s .. 16 s + 15 comes
//     of 4 bits    k = 32 (s / 2) + 8 t + 2 (s % 2) + h + 4 b    of 8 bits    k = 16 s + 4 t + h + 2 b
// where step s, lane t of four, half b of a register and register h of two are those of the product's first operand.
extern "C" __global__ void __launch_bounds__(256)
    reorder(const unsigned short *x, unsigned short *to, unsigned int *left, int zeros, int m, int k, long long stride,
            int width, int wide) {
    let_next_start();  // this launch itself has waited
    const long long index = blockIdx.x * 256ll + threadIdx.x;
    if (index < zeros) left[index] = 0;
    const long long row = index / (width / 8);
    const int column = index % (width / 8) * 8;
    union {
        unsigned short element[8];
        uint4 all;
    } own;
    own.all = make_uint4(0, 0, 0, 0);
    if (row < m) {
        const unsigned short *from = x + row * stride + column;
        if (wide && column + 8 <= k) {
            own.all = *(const uint4 *)from;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (column + i < k) own.element[i] = from[i];
        }
    }
    // Words of two elements; the threads of 32 (16) elements exchange theirs.
    const int lane = threadIdx.x % 4;
    uint32 result[4];
    if constexpr (BITS == 4) {
        uint32 word[4];
        word[0] = permute(own.all.x, own.all.z, 0x5410), word[1] = permute(own.all.x, own.all.z, 0x7632);
        word[2] = permute(own.all.y, own.all.w, 0x5410), word[3] = permute(own.all.y, own.all.w, 0x7632);
        uint32 got[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) got[i] = __shfl_xor_sync(0xffffffff, one_of(word, lane ^ i), i);
#pragma unroll
        for (int i = 0; i < 4; ++i) result[i] = one_of(got, lane ^ i);
    } else {
        const int half = lane % 2;
        const uint32 even[2] = {permute(own.all.x, own.all.y, 0x5410), permute(own.all.z, own.all.w, 0x5410)};
        const uint32 odd[2] = {permute(own.all.x, own.all.y, 0x7632), permute(own.all.z, own.all.w, 0x7632)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32 got = __shfl_xor_sync(0xffffffff, half ? even[i] : odd[i], 1), kept = half ? odd[i] : even[i];
            result[i] = half ? got : kept;
            result[2 + i] = half ? kept : got;
        }
    }
    if (row < m) *(uint4 *)(to + row * width + column) = make_uint4(result[0], result[1], result[2], result[3]);
}
