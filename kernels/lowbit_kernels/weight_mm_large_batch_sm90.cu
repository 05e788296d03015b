// Weights of 4 or 8 bits, integers or float8, times many tokens, on sm_90a:
//   out[m, n] = token_scale[m] * sum_k x[m, k] * (code[n, k] - zero[n, k / GROUP]) * scale[n, k / GROUP]
//               + bias[n] + residual[m, n]
//
// weight_mm_large_batch_sm90.py compiles this once for each combination of
//   DTYPE, OUT         BF16 or FP16: of x; of bias, residual, out
//   CODES              INT4 (nibble = code + 8, even k in the low one), INT8; or E4M3, of which DTYPE is FP16, that holds
//                      them, GROUP 0, and ZERO 0
//   GROUP              a multiple of 32, or 0: one scale a row
//   SCALE              BF16, FP16 or FP32
//   ZERO               1: there are zero points
//   ROUNDED            1: the scale is multiplied into the weight, which is rounded to DTYPE (SCALE is DTYPE); 0: into the
//                      sums of a group, in float32
//   TOKENS             of a tile: a multiple of 16, at most 256
//   ROWS               of the weight, of a block's tile: 64, 128 or 256; or 224, with GROUPS 4, BESIDE 2, SPLIT 1 and at most 32 TOKENS
//   GROUPS             warpgroups that multiply: 2 or 4
//   BESIDE             1 or 2 blocks of a cluster, on rows beside each other, which load half of the tokens each for both
//   SPLIT              1, 2, 4 or 8 blocks of a cluster that share a tile's K
//   CHUNK              of K, of a stage: 128, or 256, for groups of 128 only if there are evenly many in a row
//   STAGES             chunks in the ring
// and puts before it ptx.cuh, hopper.cuh and `multiply`, the instruction.
//
// The tile computed is out's transpose: rows of the weight, which a thread unpacks in registers as the product's first
// operand, by tokens, which the TMA copies to shared memory. In an instruction's 16 K a thread holds four of a row, two
// and two neighbouring: of each eight codes one byte (two of 8 bits), so that its four threads read the same.
//
// What limits small products is how long it takes to unpack, multiply, and wait for both. So warpgroups of a block may
// take turns at chunks of the same rows, and blocks of a cluster have parts of a tile's K. At a tile's end they exchange
// their sums through shared memory; each block adds and finishes an equal share. Large products, whose tiles don't come
// out even, end with tiles that two blocks have together, which otherwise have one each.

enum { BF16, FP16, FP32, INT4, INT8, E4M3 };

static constexpr int BITS = CODES == INT4 ? 4 : 8;
static_assert(CODES != E4M3 || (DTYPE == FP16 && GROUP == 0 && !ZERO), "");
static constexpr int SUBTILES = ROWS > 64 * GROUPS ? 2 : 1;   // of 64 rows, of a warpgroup
// Of 28,672 rows 112 tiles of 256 leave 20 of 132 multiprocessors idle, 128 of 224 but 4. Two blocks beside each other
// then hold 256 rows each of 448: both the middle 64, of which they multiply every other chunk.
static constexpr bool OVERLAP = ROWS == 224;
static constexpr int HELD = OVERLAP ? 256 : ROWS;             // rows of a stage
static constexpr int LANES = GROUPS * SUBTILES * 64 / HELD;   // warpgroups that take turns at a tile's chunks
static_assert(!OVERLAP || (GROUPS == 4 && BESIDE == 2 && SPLIT == 1 && TOKENS <= 32), "");
// Turns go by slots of the ring, of each of which a warpgroup sees all phases or none: else it could take one that is
// over for the next, which it waits for.
static constexpr int TURNS = OVERLAP ? 2 : LANES;
static_assert(STAGES % TURNS == 0, "");
static constexpr int CLUSTER = BESIDE * SPLIT;                // blocks
static constexpr int SOURCES = SPLIT * LANES;                 // of sums of a tile
static constexpr int WARPS = 4 * GROUPS;                      // that multiply
static constexpr int THREADS = 128 * (GROUPS + 1);            // theirs and the producer's
static constexpr int PITCH = CHUNK * BITS / 8;                // bytes of a row of codes in a stage
static constexpr int CODE_BYTES = HELD * PITCH, TOKEN_BYTES = TOKENS * CHUNK * 2;
static constexpr int BOXES = CHUNK / 64;                     // of tokens, of 128 bytes a row
static constexpr int BOX_ROWS = OVERLAP ? 64 : ROWS < 128 ? ROWS : 128;  // of codes
static constexpr int FETCHED = 32 * 1024;                    // bytes of scales at most that are asked for early
static constexpr int STAGE_BYTES = CODE_BYTES + TOKEN_BYTES;
static_assert(STAGES > TURNS, "a warpgroup leaves a chunk's stage when it has begun with its next one");
static constexpr int SUMS = TOKENS / 2;  // of a thread and subtile
static constexpr bool FLUSH = GROUP > 0 && !ROUNDED;  // sums of a group are scaled and added to others
static constexpr int RUN = GROUP % 128 == 0 && CHUNK > 64 ? 128 : GROUP % 64 == 0 ? 64 : 32;  // of K, in one group
static constexpr int RUNS = GROUP ? CHUNK / RUN : 1;
static constexpr int SUMMED = FLUSH ? RUNS : 1;                 // parts of a chunk that are summed apart
// Instructions of a piece, of 16 K each: few, so that unpacking is spread between them.
static constexpr int STEPS = BITS == 4 && GROUPS == 2 && TOKENS < 128 && RUN > 32 ? 4 : 2;
static constexpr int VECTORS = STEPS * BITS / 8;  // of 16 bytes, of a piece's codes of a row
static constexpr int PIECES = CHUNK / 16 / STEPS, HALVES = PIECES / SUMMED;  // of a chunk, of a part
// Whether a piece's codes are read while the products of the one before are issued, where there are registers for it.
static constexpr bool EARLY = GROUPS == 2 || SUMS * (FLUSH ? 2 : 1) < 64;
static constexpr float UNIT = DTYPE == FP16 ? 1.0f : 1.0f / 64;  // of weights, as they are multiplied
// An integer's bits as a number times FACTOR, plus OFFSET, are it times UNIT: see two_of.
static constexpr uint32 FACTOR = DTYPE == FP16 ? (BITS == 4 ? 0x2c003c00 : 0x3c003c00)
                                 : BITS == 4   ? 0x7d007f00
                                               : 0x7f007f00;
static constexpr uint32 OFFSET = DTYPE == FP16 ? (BITS == 4 ? 0xd480e408 : 0xe480e480)
                                 : BITS == 4   ? 0xbe00be00
                                               : 0xc000c000;
static constexpr int UNITS = HELD / 16;                         // of 16 rows, as a warp has them
static constexpr int OWN = TOKENS / 16 * UNITS / SPLIT;         // squares of 16 rows and tokens that a block finishes
static constexpr int MERGED = OVERLAP ? TOKENS / 16 * 2 : 1;    // squares of which the other block has a part of the sum
static constexpr int BOX_PITCH = 48;                            // bytes of 16 results of a token; free of bank conflicts

// Whether tiles of the last round, where there are few, may be divided among the blocks beside each other.
static constexpr bool TAIL = BESIDE == 2 && SOURCES == 1 && !OVERLAP;
static_assert(!TAIL || TOKENS * ROWS * 4 <= STAGES * STAGE_BYTES, "their sums take the ring's place");

struct Shared {
    unsigned char stage[STAGES][STAGE_BYTES];
    float4 part[SOURCES > 1 ? OWN : MERGED][SOURCES][2][32];  // sums of the block's squares
    unsigned char box[SOURCES > 1 ? 1 : WARPS][16 * BOX_PITCH];
    uint64 full[STAGES], empty[STAGES], come, gone;  // the latter two: parts
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

// A block's tiles, and its chunks of each, first..last - 1.
struct Schedule {
    const Shape shape;
    const uint32 rank;
    int first, last, tile = blockIdx.x / CLUSTER - gridDim.x / CLUSTER, row, token;
    bool divided = false;  // the tile, which the blocks beside each other have a half of K each of

    MEMBER Schedule(const Shape &shape, uint32 rank)
        : shape(shape),
          rank(rank),
          first(shape.chunks * (rank / BESIDE) / SPLIT),
          last(shape.chunks * (rank / BESIDE + 1) / SPLIT) {}

    MEMBER bool take() {
        const int clusters = gridDim.x / CLUSTER, tiles = shape.rows * shape.columns;
        tile += clusters;
        int own = tile, beside = rank % BESIDE;
        if constexpr (TAIL) {
            const int left = tiles % clusters, more = tile - (tiles - left);
            divided = left * 2 <= clusters && more >= 0;
            if (divided) {
                own = tiles - left + more / 2, beside = more % 2;
                first = shape.chunks * rank / 2, last = shape.chunks * (rank + 1) / 2;
            }
        }
        if (own >= tiles) return false;
        const int above = own / (shape.band * shape.rows) * shape.band;
        const int within = own - above * shape.rows, width = min(shape.band, shape.columns - above);
        row = (within / width * BESIDE + beside) * ROWS - (OVERLAP ? beside * 32 : 0);
        token = (above + within % width) * TOKENS;
        return true;
    }

    MEMBER bool more() const { return tile + (int)gridDim.x / CLUSTER < shape.rows * shape.columns; }

    // Whether of the chunk in this slot the block's 64 rows from `below` on are left to the other block.
    MEMBER bool leaves(int below, int slot) const {
        return OVERLAP && below == (rank ? 0 : 192) && slot % 2 != rank;
    }
};

struct Ring {
    int slot = 0;
    uint32 parity = 0;
    MEMBER void advance(int stages = 1) {  // at most STAGES
        slot += stages;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
    MEMBER Ring after(int stages) const { return {(slot + stages) % STAGES, parity ^ (slot + stages) / STAGES % 2}; }
};

// ---- the producer ----------------------------------------------------------------------------------------------------

// Asks for a block's first codes, and its scales, before the launch before is done: where they are in the L2, what that
// launch writes to them is seen.
DEVICE void fetch(const TensorMap &codes, const Epilogue &epilogue, const Shape &shape, uint32 rank) {
    Schedule schedule(shape, rank);
    if (!schedule.take()) return;
#pragma unroll
    for (int i = 0; i < HELD; i += BOX_ROWS)
        if (!schedule.leaves(i, 0)) prefetch_box(codes, schedule.first * PITCH, schedule.row + i);
    const long long row = shape.groups * (SCALE == FP32 ? 4ll : 2ll);
    const char *from = (const char *)epilogue.scale + schedule.row * row;
    const long long bytes = min(HELD, shape.n - schedule.row) * row, ahead = -(long long)from & 15;
    if (GROUP > 0 && bytes >= ahead + 16) prefetch(from + ahead, (uint32)min(bytes - ahead, 1ll * FETCHED) & ~15);
}

DEVICE void produce(Shared &shared, const TensorMap &codes, const TensorMap &x, const Shape &shape, uint32 rank) {
    const int share = rank % BESIDE * (TOKENS / BESIDE);
    const unsigned short all = ((1 << BESIDE) - 1) << rank / BESIDE * BESIDE;
    Ring ring;
    for (Schedule schedule(shape, rank); schedule.take();) {
        for (int chunk = schedule.first; chunk < schedule.last; ++chunk, ring.advance()) {
            const uint32 full = shared_address(&shared.full[ring.slot]), to = shared_address(shared.stage[ring.slot]);
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            const bool less = OVERLAP && ring.slot % 2 != rank;
            barrier_expect(full, STAGE_BYTES - (less ? BOX_ROWS * PITCH : 0));
            if (less)  // in place of the four warps of these rows, at both blocks
                for (int i = 0; i < 8; ++i) barrier_arrive(shared_address(&shared.empty[ring.slot]), i % 2);
#pragma unroll
            for (int i = 0; i < HELD; i += BOX_ROWS)
                if (!schedule.leaves(i, ring.slot)) load_box(codes, chunk * PITCH, schedule.row + i, to + i * PITCH, full);
#pragma unroll
            for (int box = 0; box < BOXES; ++box) {
                const uint32 there = to + CODE_BYTES + box * (TOKEN_BYTES / BOXES) + share * 128;
                const int k = chunk * CHUNK + box * 64;
                if (BESIDE == 1 || schedule.divided) {
                    const uint32 begin = there - share * 128;
                    for (int i = 0; i < TOKENS; i += TOKENS / BESIDE)
                        load_box(x, k, schedule.token + i, begin + i * 128, full);
                } else {
                    load_box(x, k, schedule.token + share, there, full, all);
                }
            }
        }
    }
}

// ---- unpacking -------------------------------------------------------------------------------------------------------

template <int TO>
DEVICE uint32 packed(float low, float high) {
    if constexpr (TO == FP16) return to_half2(low, high);
    else return to_bf16x2(low, high);
}

// Of bias and residual.
DEVICE float unpacked(uint32 bits) {
    if constexpr (OUT == FP16) return from_half(bits & 0xffff);
    else return bits_float(bits << 16);
}

DEVICE float number_at(const void *p, long long i, int type) {
    if (type == FP32) return ((const float *)p)[i];
    const uint32 bits = ((const unsigned short *)p)[i];
    return type == FP16 ? from_half(bits) : bits_float(bits << 16);
}

// a * b + c of two neighbours, rounded once
DEVICE uint32 fused(uint32 a, uint32 b, uint32 c) {
    if constexpr (DTYPE == FP16) return fma_half2(a, b, c);
    else return fma_bf16x2(a, b, c);
}

// Whether the scales of a chunk's two groups are read together.
static constexpr bool TWO_SCALES = CHUNK == 256 && GROUP == 128 && SCALE != FP32;

// A group's scale and zero point as they lie in memory: on their way while others are in use.
struct Fetched {
    uint32 scale;  // if TWO_SCALES, of both groups
    int zero;
};

// A group's scale and what is added to its codes as they are unpacked, to two neighbours.
struct Group {
    float scale;
    uint32 offset;
};

DEVICE int group_of(int run) { return GROUP ? run / (GROUP / RUN) : 0; }

// Of the row whose groups begin at `row`, in a chunk's run of K of that number.
DEVICE Fetched fetched(const void *scale, const signed char *zero, const Shape &shape, uint32 row, int chunk, int run) {
    const int group = TWO_SCALES ? chunk * 2 : group_of(chunk * RUNS + run);
    const uint32 at = row + min(group, shape.groups - (TWO_SCALES ? 2 : 1));
    Fetched result;
    if constexpr (SCALE == FP32) result.scale = ((const uint32 *)scale)[at];
    else if constexpr (TWO_SCALES) result.scale = *(const uint32 *)((const unsigned short *)scale + at);
    else result.scale = ((const unsigned short *)scale)[at];
    result.zero = ZERO ? zero[TWO_SCALES ? at + run : at] : 0;
    return result;
}

// Beyond the last group x is zero, whatever the codes are, and so is the scale.
DEVICE Group group_from(const Fetched &from, const Shape &shape, int chunk, int run) {
    Group group;
    const uint32 bits = TWO_SCALES && run ? from.scale >> 16 : from.scale;
    group.scale = SCALE == FP32 ? bits_float(bits) : SCALE == FP16 ? from_half(bits) : bits_float(bits << 16);
    if (GROUP % CHUNK != 0 && !TWO_SCALES && group_of(chunk * RUNS + run) >= shape.groups) group.scale = 0.0f;
    if constexpr (!ZERO) {
        group.offset = OFFSET;
    } else {
        const float upper = from.zero + (DTYPE == BF16 ? 0.0f : BITS == 4 ? 64.0f : 1024.0f) + (1 << BITS - 1);
        const float lower = DTYPE == FP16 && BITS == 4 ? upper + 960.0f : upper;
        group.offset = packed<DTYPE>(-UNIT * lower, -UNIT * upper);
    }
    return group;
}

// What a thread takes of eight codes, and what that is multiplied by: an upper nibble comes 16 times as large.
struct Place {
    uint32 selector, factor;
    MEMBER Place(int t, const Shape &shape) {
        selector = CODES == INT4 ? t * 0x0101 : CODES == INT8 ? t * 0x0202 + 0x0100 : t * 0x0022 + 0x0010;
        // constants, which the compiler, if it knew, would move to a register for each use
        factor = shape.m > 0 ? FACTOR : 0;
        in_use(selector);
    }
};

// Neighbours of eight codes along K, those of the thread's place in its four, times UNIT: 4 bits, byte `t` of a word; 8
// bits, bytes 2 t and 2 t + 1 of two. Less the zero point. In bf16 the lowest 8 bits alone stand for multiples of 2**-133,
// exactly; in fp16, or-ed into 1024, they are that number more. E4M3 are numbers already.
DEVICE uint32 two_of(uint32 low, uint32 high, const Place &place, const Group &group, uint32 scale) {
    uint32 x = permute(low, BITS == 4 ? 0 : high, place.selector);
    if constexpr (CODES == E4M3) return from_e4m3x2(x & 0xffff);
    if constexpr (BITS == 4) x = DTYPE == FP16 ? masked_or(x, 0x00f0000f, 0x64006400) : x & 0x00f0000f;
    else x = masked_xor(x, 0x00ff00ff, DTYPE == FP16 ? 0x64806480 : 0x00800080);
    x = fused(x, place.factor, group.offset);
    if constexpr (ROUNDED) x = DTYPE == FP16 ? multiply_half2(x, scale) : multiply_bf16x2(x, scale);
    return x;
}

// A piece's codes from step `first` of a chunk on, of rows lane / 4 and 8 below of a warp's 16. The four threads of a row
// read the same 16 bytes; `at` is the address of the upper row, whose pieces of 16 bytes the TMA has permuted.
DEVICE void load_codes(uint4 (&codes)[VECTORS][2], uint32 at, int first) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const uint32 from = at ^ (first * BITS / 8 + i) * 16;
        codes[i][0] = shared_vector(from), codes[i][1] = shared_vector(from + 8 * PITCH);
    }
}

// The first operand of the piece's products: k = 2 t, 2 t + 1 of each eight.
DEVICE void unpack(uint32 (&a)[STEPS * 4], const uint4 (&codes)[VECTORS][2], int first, const Place &place,
                   const Group (&upper)[RUNS], const Group (&lower)[RUNS]) {
#pragma unroll
    for (int i = 0; i < VECTORS * 2; ++i) {
        const int run = GROUP ? (first + i / 2 * 8 / BITS) * 16 / RUN : 0;
        const Group &group = i % 2 ? lower[run] : upper[run];
        const uint32 scale = ROUNDED ? packed<DTYPE>(group.scale, group.scale) : 0;
        const uint4 x = codes[i / 2][i % 2];
        uint32 *to = a + i / 2 * (32 / BITS) + i % 2;
        if constexpr (BITS == 4) {
            to[0] = two_of(x.x, 0, place, group, scale), to[2] = two_of(x.y, 0, place, group, scale);
            to[4] = two_of(x.z, 0, place, group, scale), to[6] = two_of(x.w, 0, place, group, scale);
        } else {
            to[0] = two_of(x.x, x.y, place, group, scale), to[2] = two_of(x.z, x.w, place, group, scale);
        }
    }
}

// ---- the consumers ---------------------------------------------------------------------------------------------------

template <typename T, int COUNT>
DEVICE void keep(T (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) in_use(x[i]);
}

// Whether the thread's warpgroup has rows that the other block has, too.
DEVICE bool shares(uint32 rank) { return OVERLAP && threadIdx.x / 128 == (rank ? 0 : 3); }

// A warp has read all it needs of a slot: says so to every block that writes to it, of a divided tile twice to its own.
DEVICE void release(uint32 empty, uint32 rank, bool divided) {
    const uint32 lane = threadIdx.x % 32;
    if (lane < BESIDE) barrier_arrive(empty, TAIL && divided ? rank : rank / BESIDE * BESIDE + lane);
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
    const uint32 rank;
    Ring ring;
    uint32 base, a[2][STEPS * 4];
    uint4 loaded[VECTORS][2];         // codes of the next piece
    uint32 rows[SUBTILES][2];         // where their groups begin
    Group group[SUBTILES][2][RUNS];   // of the chunk
    Fetched next[SUBTILES][2][RUNS];  // of the next one

    MEMBER Consumer(Shared &shared, const void *scale, const signed char *zero, const Shape &shape, uint32 rank)
        : shared(shared), scale(scale), zero(zero), shape(shape), rank(rank), base(shared_address(&shared)) {
        in_use(base);  // else the compiler works it out anew each time
#pragma unroll
        for (int i = 0; i < STEPS * 4; ++i) a[0][i] = a[1][i] = 0;
    }

    MEMBER uint32 address(const void *p) const { return base + (uint32)((const char *)p - (const char *)&shared); }

    MEMBER void begin(int row) {
#pragma unroll
        for (int i = 0; i < SUBTILES * 2; ++i)
            rows[i / 2][i % 2] = (uint32)min(row + i / 2 * 64 + i % 2 * 8, shape.n - 1) * shape.groups;
    }

    MEMBER void fetch(int chunk) {
#pragma unroll
        for (int i = 0; i < SUBTILES * 2 * RUNS; ++i) {
            const int subtile = i / RUNS / 2, below = i / RUNS % 2, run = i % RUNS;
            next[subtile][below][run] = fetched(scale, zero, shape, rows[subtile][below], chunk, run);
        }
    }

    MEMBER void take_fetched(int chunk) {
#pragma unroll
        for (int i = 0; i < SUBTILES * 2 * RUNS; ++i) {
            const int subtile = i / RUNS / 2, below = i / RUNS % 2, run = i % RUNS;
            group[subtile][below][run] = group_from(next[subtile][below][run], shape, chunk, run);
        }
    }

    // The first step of a chunk's piece: of a part those of a subtile, then of the next.
    static MEMBER int step_of(int piece) {
        return piece / (HALVES * SUBTILES) * (CHUNK / 16 / SUMMED) + piece % HALVES * STEPS;
    }

    MEMBER void load_piece(uint32 at, int piece) {
        load_codes(loaded, at + piece / HALVES % SUBTILES * 64 * PITCH, step_of(piece));
    }

    // The products of chunks first..last - 1: `totals` (and `sums`, where groups are summed apart) begin as zeros.
    // Pieces of four products or two: while the tensor cores have one, the next is unpacked, in other registers.
    MEMBER void sum(float (&sums)[SUBTILES][SUMS], float (&totals)[SUBTILES][SUMS], int row, int first, int last,
                    bool divided) {
        const int lane = threadIdx.x % 32, line = threadIdx.x / 32 * 16 % 64 + lane / 4;
        const int swizzle = PITCH == 64 ? lane / 8 % 4 : lane / 4;  // of the row
        const int group_of_rows = threadIdx.x / 128 % (GROUPS / LANES);
        const int turns = shares(rank) ? 2 : LANES, turn = shares(rank) ? rank : threadIdx.x / 128 / (GROUPS / LANES);
        const int others = (turn - ring.slot) & (turns - 1);  // chunks before its first one
        uint32 codes = (group_of_rows * 64 * SUBTILES + line) * PITCH + swizzle * 16;
        const Place place(lane % 4, shape);
        float pending[SUBTILES][2] = {};
        uint32 end = last;
        uint32 operands = operand(base + CODE_BYTES);
        in_use(codes), in_use(end), in_use(operands);
        begin(row);
        fetch(first + others);
        if constexpr (GROUP == 0) take_fetched(0);
        int before = -1;
        const Ring after = ring.after(last - first);
        ring = ring.after(others);
        for (int chunk = first + others; chunk < (int)end; chunk += turns, ring.advance(turns)) {
            if constexpr (GROUP > 0) {
                take_fetched(chunk);
                fetch(chunk + turns);
            }
            barrier_wait(address(shared.full) + ring.slot * 8, ring.parity);
            const uint32 stage = base + ring.slot * STAGE_BYTES;
            // Known to be the warp's, and of 64 bits, to which one instruction adds: else each half is moved each time.
            const uint32 low = __shfl_sync(0xffffffff, operands + ring.slot * (STAGE_BYTES / 16), 0);
            const uint64 tokens = (uint64)OPERAND_HIGH << 32 | low;
            if constexpr (EARLY) load_piece(stage + codes, 0);
#pragma unroll
            for (int piece = 0; piece < PIECES * SUBTILES; ++piece) {
                const int subtile = piece / HALVES % SUBTILES, half = piece % HALVES, part = piece / (HALVES * SUBTILES);
                uint32(&own)[STEPS * 4] = a[piece % 2];
                // The piece before the last one is done, and has left these registers. The last one too, where it was
                // a group's: the compiler, which can't tell whose sums are read, would run products one by one.
                if (FLUSH && SUBTILES > 1 && HALVES == 1 && piece % 2 == 0) product_wait<0>();
                else product_wait<1>();
                keep(own);
                if (piece == 1 && before >= 0) release(address(shared.empty) + before * 8, rank, divided);
                if constexpr (!EARLY) load_piece(stage + codes, piece);
                unpack(own, loaded, step_of(piece), place, group[subtile][0], group[subtile][1]);
                if (EARLY && piece + 1 < PIECES * SUBTILES) load_piece(stage + codes, piece + 1);
                if (FLUSH && piece % (HALVES * SUBTILES) == 0) {
                    product_wait<0>();
                    flush_all(totals, sums, pending, part);
                }
                product_fence();
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    const int k = step_of(piece) + i;
                    const uint64 b = tokens + k / 4 * (TOKEN_BYTES / BOXES / 16) + k % 4 * 2;
                    multiply(sums[subtile], own + i * 4, b, !FLUSH || half > 0 || i > 0);
                }
                product_commit();
            }
            before = ring.slot;
        }
        product_wait<0>();
        keep(a[0]), keep(a[1]);
        if (before >= 0) release(address(shared.empty) + before * 8, rank, divided);
        ring = after;
        if constexpr (FLUSH) flush_all(totals, sums, pending, 0);
        else keep(sums[0]), keep(sums[SUBTILES - 1]);
    }

    // The sums of the group before a chunk's part, scaled; and the scales of this one, for the next time.
    MEMBER void flush_all(float (&totals)[SUBTILES][SUMS], float (&sums)[SUBTILES][SUMS], float (&scale)[SUBTILES][2],
                          int part) {
#pragma unroll
        for (int i = 0; i < SUBTILES; ++i) {
            flush(totals[i], sums[i], scale[i]);
            scale[i][0] = group[i][0][part].scale, scale[i][1] = group[i][1][part].scale;
        }
    }
};

// ---- results ---------------------------------------------------------------------------------------------------------

// Eight results of a token, or as many as there are, between memory and a warp's 16 bytes of shared memory.
DEVICE void copy_eight(unsigned short *to, const unsigned short *from, int count, bool wide) {
    if (wide && count >= 8) {
        *(uint4 *)to = *(const uint4 *)from;
    } else {
        for (int i = 0; i < min(count, 8); ++i) to[i] = from[i];
    }
}

// Of a thread's two rows, lane / 4 and 8 below of 16 from `row` on.
struct Rows {
    float scale[2], bias[2];

    MEMBER Rows(const Epilogue &epilogue, const Shape &shape, int row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = min(row + (int)threadIdx.x % 32 / 4 + i * 8, shape.n - 1);
            scale[i] = (GROUP ? 1.0f : number_at(epilogue.scale, own, SCALE)) / UNIT;
            bias[i] = epilogue.bias ? number_at(epilogue.bias, own, OUT) : 0.0f;
        }
    }
};

// A warp's sums of 16 rows and 16 tokens to results, turned by way of shared memory.
DEVICE void finish(unsigned char *box, const Epilogue &epilogue, const Shape &shape, const Rows &rows,
                   const float (&sums)[8], int row, int token) {
    const int lane = threadIdx.x % 32;
    // As matrices of 8 x 8 are stored: a token's rows 0..7, 8..15, and of the next eight tokens.
    const uint32 matrix = shared_address(box) + (lane / 16 * 8 + lane % 8) * BOX_PITCH + lane / 8 % 2 * 16;
    unsigned short *mine = (unsigned short *)(box + lane / 2 * BOX_PITCH + lane % 2 * 16);
    const int column = row + lane % 2 * 8, own = token + lane / 2, count = own < shape.m ? shape.n - column : 0;
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
        const int first = token + i / 2 * 8 + lane % 4 * 2;
        float2 x = {sums[i * 2] * rows.scale[i % 2], sums[i * 2 + 1] * rows.scale[i % 2]};
        if (epilogue.token_scale) {
            x.x *= epilogue.token_scale[min(first, shape.m - 1)];
            x.y *= epilogue.token_scale[min(first + 1, shape.m - 1)];
        }
        x.x += rows.bias[i % 2], x.y += rows.bias[i % 2];
        if (epilogue.residual) x.x += unpacked(residual[i] & 0xffff), x.y += unpacked(residual[i] >> 16);
        result[i] = packed<OUT>(x.x, x.y);
    }
    store_matrices_turned(matrix, result);
    __syncwarp();
    copy_eight(epilogue.out + at, mine, count, epilogue.wide);
    __syncwarp();
}

// The same of all of a warp's squares, where nothing but a bias is added and all is wide: few instructions, for each is
// executed once a tile, and has to be fetched.
DEVICE void finish_plain(unsigned char *box, const Epilogue &epilogue, const Shape &shape, const Rows &rows,
                         const float (&sums)[SUMS], int row, int token) {
    const int lane = threadIdx.x % 32;
    const uint32 matrix = shared_address(box) + (lane / 16 * 8 + lane % 8) * BOX_PITCH + lane / 8 % 2 * 16;
    const uint4 *mine = (const uint4 *)(box + lane / 2 * BOX_PITCH + lane % 2 * 16);
    unsigned short *to = epilogue.out + (long long)(token + lane / 2) * shape.n + row + lane % 2 * 8;
    const int left = shape.m - token - lane / 2;
#pragma unroll
    for (int j = 0; j < TOKENS / 16; ++j, to += 16ll * shape.n) {
        uint32 result[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float *two = &sums[j * 8 + i * 2];
            const float scale = rows.scale[i % 2], bias = rows.bias[i % 2];
            result[i] = packed<OUT>(fmaf(two[0], scale, bias), fmaf(two[1], scale, bias));
        }
        store_matrices_turned(matrix, result);
        __syncwarp();
        if (left > j * 16) *(uint4 *)to = *mine;
        __syncwarp();
    }
}

// A tile's results, of sums that this block alone has.
DEVICE void finish_all(unsigned char *box, const Epilogue &epilogue, const Shape &shape,
                       const float (&sums)[SUBTILES][SUMS], int row, int token) {
    const bool plain = epilogue.wide && !epilogue.residual && !epilogue.token_scale;
#pragma unroll
    for (int subtile = 0; subtile < SUBTILES; ++subtile, row += 64) {
        const Rows rows(epilogue, shape, row);
        if (plain && row + 16 <= shape.n) {
            finish_plain(box, epilogue, shape, rows, sums[subtile], row, token);
            continue;
        }
#pragma unroll 1
        for (int j = 0; j < TOKENS / 16 && token + j * 16 < shape.m; ++j) {
            float square[8];
#pragma unroll
            for (int i = 0; i < SUMS; ++i)
                if (i / 8 == j) square[i % 8] = sums[subtile][i];
            finish(box, epilogue, shape, rows, square, row, token + j * 16);
        }
    }
}

// ---- sums of a tile that several have: blocks of a cluster, warpgroups of a block ----------------------------------------

// PARTS blocks have a tile's sums; `part` is a block's number among them, BESIDES that of such tiles in the cluster. Of
// squares of 16 rows and tokens it finishes those whose unit of rows is `part` more than a multiple of PARTS.
template <int PARTS, int BESIDES>
struct Exchange {
    static constexpr int OWN = TOKENS / 16 * UNITS / PARTS, SOURCES = PARTS * LANES;
    typedef float4 Part[SOURCES][2][32];  // sums of a square
    Shared &shared;
    Part *parts;
    const uint32 rank, part = rank / BESIDES;

    MEMBER Exchange(Shared &shared, void *parts, uint32 rank) : shared(shared), parts((Part *)parts), rank(rank) {}

    // At `gone` of all blocks that exchange: lane i of each warp at the i-th's.
    MEMBER void leave() const {
        __syncwarp();
        const int lane = threadIdx.x % 32;
        if (lane < PARTS) barrier_arrive(shared_address(&shared.gone), lane * BESIDES + rank % BESIDES);
    }

    // Each warp sends its sums to the blocks that finish them, where they count for `come`; or keeps them here.
    MEMBER void send(const float (&sums)[SUBTILES][SUMS]) const {
        if (CLUSTER > 1 && threadIdx.x == 0) barrier_expect(shared_address(&shared.come), OWN * sizeof(Part));
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, turn = warp / (WARPS / LANES);
#pragma unroll
        for (int subtile = 0; subtile < SUBTILES; ++subtile) {
            const int unit = (warp % (WARPS / LANES) / 4 * SUBTILES + subtile) * 4 + warp % 4;
            const uint32 block = unit % PARTS * BESIDES + rank % BESIDES;
#pragma unroll
            for (int j = 0; j < TOKENS / 16; ++j) {
                float4 *to = parts[j * (UNITS / PARTS) + unit / PARTS][part * LANES + turn][0] + lane;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float *from = &sums[subtile][j * 8 + i * 4];
                    const float4 four = make_float4(from[0], from[1], from[2], from[3]);
                    if constexpr (CLUSTER == 1) to[i * 32] = four;
                    else ::send(shared_address(to + i * 32), block, four, shared_address(&shared.come));
                }
            }
        }
    }

    // The block's squares, of the sums that all have sent, added in the order of K.
    MEMBER void finish_own(const Epilogue &epilogue, const Shape &shape, const Schedule &schedule) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (int own = warp; own < OWN; own += WARPS) {
            const int row = schedule.row + (own % (UNITS / PARTS) * PARTS + part) * 16;
            const int token = schedule.token + own / (UNITS / PARTS) * 16;
            if (row >= shape.n || token >= shape.m) continue;
            float square[8] = {};
#pragma unroll
            for (int source = 0; source < SOURCES; ++source) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float4 more = parts[own][source][i][lane];
                    square[i * 4] += more.x, square[i * 4 + 1] += more.y;
                    square[i * 4 + 2] += more.z, square[i * 4 + 3] += more.w;
                }
            }
            __syncwarp();
            unsigned char *box = (unsigned char *)parts[own][0];  // no longer needed
            finish(box, epilogue, shape, Rows(epilogue, shape, row), square, row, token);
        }
        if (CLUSTER > 1 && schedule.more()) leave();  // else nobody waits for it, and another block may be gone itself
    }
};

// Of the 64 rows that both blocks have, each finishes those of two warps: the sums of the others it sends to the other
// block, and it adds what comes from there. Returns whether the warp has rows to finish.
DEVICE bool merge(Shared &shared, float (&sums)[SUMS], uint32 rank, uint32 parity) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint32 come = shared_address(&shared.come), gone = shared_address(&shared.gone);
    float4(*other)[1][2][32] = (float4(*)[1][2][32])shared.part[warp % 2 * (TOKENS / 16)];
    if (warp / 2 != rank) {
        barrier_wait(gone, parity ^ 1);
#pragma unroll
        for (int i = 0; i < SUMS / 4; ++i) {
            const float4 four = make_float4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]);
            send(shared_address(&other[i / 2][0][i % 2][lane]), rank ^ 1, four, come);
        }
        return false;
    }
    if (lane == 0) barrier_expect(come, SUMS * 128);
    barrier_wait_after(come, parity);
#pragma unroll
    for (int i = 0; i < SUMS / 4; ++i) {
        const float4 four = other[i / 2][0][i % 2][lane];
        sums[i * 4] += four.x, sums[i * 4 + 1] += four.y, sums[i * 4 + 2] += four.z, sums[i * 4 + 3] += four.w;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(gone, rank ^ 1);
    return true;
}

DEVICE void consume(Shared &shared, const Epilogue &epilogue, const signed char *zero, const Shape &shape,
                    uint32 rank) {
    const int warp = threadIdx.x / 32, below = warp % (WARPS / LANES) / 4 * 64 * SUBTILES + warp % 4 * 16;
    Consumer consumer(shared, epilogue.scale, zero, shape, rank);
    uint32 parity = 0;
    for (Schedule schedule(shape, rank); schedule.take(); parity ^= 1) {
        float sums[SUBTILES][SUMS] = {}, totals[SUBTILES][SUMS] = {};
        const int row = schedule.row + below;
        consumer.sum(sums, totals, row + threadIdx.x % 32 / 4, schedule.first, schedule.last, schedule.divided);
        float(&result)[SUBTILES][SUMS] = FLUSH ? totals : sums;
        if constexpr (SOURCES > 1) {
            const Exchange<SPLIT, BESIDE> exchange(shared, shared.part, rank);
            if constexpr (CLUSTER == 1) meet(1, WARPS * 32);
            else barrier_wait(shared_address(&shared.gone), parity ^ 1);
            exchange.send(result);
            if constexpr (CLUSTER == 1) meet(1, WARPS * 32);
            else barrier_wait_after(shared_address(&shared.come), parity);
            exchange.finish_own(epilogue, shape, schedule);
        } else if (TAIL && schedule.divided) {  // the last tile: nobody reads the ring any more once all have come here
            const Exchange<BESIDE, 1> exchange(shared, shared.stage, rank);
            exchange.leave();
            barrier_wait(shared_address(&shared.gone), 0);
            exchange.send(result);
            barrier_wait_after(shared_address(&shared.come), 0);
            exchange.finish_own(epilogue, shape, schedule);
        } else if (!shares(rank) || merge(shared, result[0], rank, parity)) {
            finish_all(shared.box[SOURCES > 1 ? 0 : warp], epilogue, shape, result, row, schedule.token);
        }
    }
}

// Grid: a multiple of CLUSTER blocks. codes [n, bytes] by boxes of BOX_ROWS x PITCH bytes, swizzled over as much; x [m, k]
// by boxes of TOKENS / BESIDE x 64. scale and zero [n, groups]; bias [n], residual [m, n], token_scale [m] or null.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    weight_mm(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap x, const void *scale,
              const signed char *zero, const void *bias, const void *residual, const float *token_scale,
              unsigned short *out, int m, int n, int chunks, int groups, int rows, int columns, int band, int wide) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Shape shape = {m, n, chunks, groups, rows, columns, band};
    const Epilogue epilogue = {scale, bias, residual, token_scale, out, wide};
    const uint32 rank = CLUSTER == 1 ? 0 : cluster_rank();
    if (threadIdx.x == 0) {
        if (shared_address(memory) % 1024 != 0) __trap();  // the swizzle goes by addresses
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), WARPS / LANES * BESIDE);
        }
        barrier_init(shared_address(&shared.come), OVERLAP ? 2 : 1);
        barrier_init(shared_address(&shared.gone), OVERLAP ? 2 : WARPS * (TAIL ? BESIDE : SPLIT));
        barrier_init_fence();
        prefetch(codes), prefetch(x);
    }
    if (threadIdx.x == GROUPS * 128) fetch(codes, epilogue, shape, rank);
    __syncwarp();
    cluster_come();
    cluster_await();  // all barriers are there
    wait_for_previous();

    if (threadIdx.x >= GROUPS * 128) {
        give_registers<GROUPS == 2 ? 40 : 32>();
        if (threadIdx.x == GROUPS * 128) {
            produce(shared, codes, x, shape, rank);
            let_next_start();  // whose copies would delay these
        }
    } else {
        take_registers<GROUPS == 2 ? 232 : 112>();
        consume(shared, epilogue, zero, shape, rank);
    }
    __syncwarp();
    // Others of the cluster may still have to arrive at this block's barriers; the sums that they send, it has awaited.
    if constexpr (BESIDE > 1) cluster_meet();
}
