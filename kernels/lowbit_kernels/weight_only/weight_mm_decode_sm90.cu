// The decode kernel: at most 16 tokens times a weight of 4 or 8 bits, integers or float8, on sm_90, at memory speed.
//   out[m, n] = token_scale[m] * sum_k x[m, k] * (code[n, k] - zero_point[n, k / group]) * scale[n, k / group]
//               + bias[n] + residual[m, n]
//
// weight_mm_decode_sm90.py puts ptx.cuh and sm90.cuh before this source and compiles it for each combination of
//   CODES              INT4: a byte holds two codes + 8, the one of the even k in its low half; INT8; or E4M3
//   GROUP              codes along k that share a scale, a multiple of 32; 0: a row has one scale
//   X, OUT, SCALE      BF16 or FP16; the scale also FP32. E4M3 needs X = FP16, the only one that holds it exactly.
//                      OUT is also the dtype of the bias and the residual
//   ZERO               whether there are zero points: int8, -8 .. 7 for INT4; none for E4M3
//   TOKENS             1, 2, 4, 8 or 16
//   HEIGHT             of a tile, in 16 rows
//   SPLIT              blocks of a cluster; each has a slice of k (split-K)
//   PARTS              of a tile's slice, loaded one after the other
//   CHUNKS             of a part that one warp has, at most; a chunk is 64 bytes of a row's codes
//   WHOLE              whether a part is whole rows without gaps between them
//   EVEN               whether every warp has CHUNKS chunks of every part
//   BOX                chunks whose x one copy loads to shared memory, as a box of all tokens; 0: no boxes
//
// Pipeline. A cluster takes every n-th tile of the weight. One thread of a block issues TMA copies of parts of tiles
// into a ring of stages. The ring holds only as much as keeps memory busy: with more copies in flight, later ones delay
// earlier ones. The first part is prefetched into the L2 cache while the previous kernel is still running.
//
// Compute. 16 warps share a part. A warp keeps the x of its chunks in registers as one operand of mma, and converts
// codes to the other operand, exactly. The sums of a unit, which lies in one group, are scaled in float32. Two more
// warps add up the sums of the 16 and store results, or send them to the block of the cluster that adds them up.
// Meanwhile the 16 warps work on the next tile. All additions have a fixed order.
//
// Few tokens. mma multiplies 8 columns. With fewer tokens, the columns hold the x of several chunks in the same
// registers. Each chunk of the weight is multiplied by all columns; only that chunk's columns of the product are used.
// So the registers of a block hold the x of 64 Ki of k for one token.
//
// Neither codes nor x are reordered in memory: a lane reads adjacent codes, and the x that belongs to them. mma only
// needs both operands to have the same k at the same position.

enum { BF16, FP16, FP32, INT4, INT8, E4M3 };

static constexpr int BITS = CODES == INT4 ? 4 : 8;
static constexpr int WARPS = 16, THREADS = 32 * (WARPS + 4);  // 16 multiply, 2 add up, 1 loads codes, 1 loads x
static constexpr int ROWS = 16 * HEIGHT, TILES = TOKENS > 8 ? 2 : 1;  // of a tile; mma takes 8 tokens
static constexpr int PIECES = HEIGHT * TILES;                         // of a tile's sums: 16 rows by 8 tokens
static constexpr int MAX_STAGES = 6;
static constexpr int WORD = 32 / BITS;  // codes in a word
static constexpr int CHUNK_BYTES = 64, CHUNK = 16 * WORD;
static constexpr int SPAN = GROUP == 0 ? 1 << 30 : GROUP;  // codes along k with one scale
static constexpr int UNIT = SPAN % CHUNK == 0 ? CHUNK : SPAN % (CHUNK / 2) == 0 ? CHUNK / 2 : CHUNK / 4;  // in one group
static constexpr int UNITS = CHUNK / UNIT, VECTOR = 4 / UNITS;  // adjacent words of a unit that a lane reads
static constexpr int PAIRS = WORD / 2;                             // registers of x for a word
static constexpr int SHARE = TOKENS < 8 ? 8 / TOKENS : 1;          // chunks whose x is in the same registers
static constexpr int SETS = (PARTS * CHUNKS + SHARE - 1) / SHARE;  // of registers for x
// Whether x is copied to shared memory first, token by token. This is faster for one token or many parts, where lanes
// would load x from distant addresses. Otherwise the copies are slower, since they queue with those of the codes.
static constexpr bool COPIES_X = BOX == 0 && (TOKENS == 1 || (SHARE > 1 && PARTS > 2));
static constexpr int BOX_PITCH = BOX * CHUNK * 2, MAX_BOXES = 16;  // bytes of a token in a box, a multiple of 256
static constexpr bool LARGE_X = SETS * 4 * TILES * PAIRS > 32;  // x takes more than 32 registers
static constexpr int REGISTERS[2] = {LARGE_X ? 112 : 104, LARGE_X ? 32 : 64};  // of a multiplying warp; of the others
static constexpr int SCALE_SIZE = SCALE == FP32 ? 4 : 2;
// Whether mma multiplies the codes + 136, and (136 + zero point) times the sum of x is subtracted from the unit's sum.
// The only loss is that of float32 sums that are 136 times larger. Otherwise the offset is subtracted from each code.
static constexpr bool FOLD = CODES == INT4 && X == BF16 && UNITS == 1;
static_assert(SPAN % UNIT == 0 && (CODES != E4M3 || (X == FP16 && !ZERO)) && (BOX == 0 || (BITS == 4 && SHARE == 1)), "");

// The start of shared memory, before the ring. The buffers that the adding warps read are double: for even and odd
// tiles.
struct Shared {
    uint64 full[MAX_STAGES], empty[MAX_STAGES];
    uint64 copied;               // x is in shared memory
    uint64 arrived[MAX_BOXES];   // a box of x is in shared memory
    uint64 loaded;               // the warps have x in registers
    uint64 received;             // the sums of all blocks have arrived
    uint64 summed[2], added[2];  // the warps' sums are written; they have been read
    alignas(512) float4 sums[2][WARPS][PIECES][32];
};

struct Problem {
    const unsigned short *x;
    const unsigned char *codes, *scale, *zero_point;
    const unsigned short *bias, *residual;
    const float *token_scale;
    unsigned short *out;
    long long x_stride;  // in elements
    int m, n, k, chunks, groups;
    int pitch, stages, apart;  // bytes of a part's row; of the ring; stages that share no memory with the boxes of x

    MEMBER int tiles() const { return (n + ROWS - 1) / ROWS; }
    MEMBER int scale_bytes() const { return ROWS * groups * SCALE_SIZE; }  // in a tile; a multiple of 16
    MEMBER int stage_bytes() const {
        return (ROWS * pitch + scale_bytes() + (ZERO ? ROWS * groups : 0) + 127) & ~127;  // the TMA's alignment
    }
};

// A range of a row's chunks.
struct Range {
    int first, count;
};
DEVICE Range part_of(const Problem &p, int rank, int part) {
    const int start = (int)((long long)p.chunks * rank / SPLIT);
    const int own = (int)((long long)p.chunks * (rank + 1) / SPLIT) - start;
    const int first = own * part / PARTS;
    return {start + first, own * (part + 1) / PARTS - first};
}
// The chunks of one warp. The warps that get one chunk more change from part to part, so that the totals are even.
DEVICE Range share_of(const Range &part, int warp, int index) {
    const int more = index * WARPS / PARTS, first = (part.count * warp + more) / WARPS;
    return {part.first + first, (part.count * (warp + 1) + more) / WARPS - first};
}

struct Ring {
    int slot = 0;
    uint32 parity = 0;
    MEMBER void advance(int stages) {
        if (++slot == stages) slot = 0, parity ^= 1;
    }
};

DEVICE int first_tile() { return blockIdx.x / SPLIT; }
DEVICE int tile_step() { return gridDim.x / SPLIT; }
DEVICE int rounds_of(const Problem &p) { return (p.tiles() - first_tile() + tile_step() - 1) / tile_step(); }

// ---- copying --------------------------------------------------------------------------------------------------------

// Copies the bytes after the last multiple of 16. Returns how many bytes the TMA has to copy.
DEVICE uint32 bulk_part(unsigned char *to, const unsigned char *from, int bytes) {
    const int whole = bytes & ~15;
#pragma unroll 1
    for (int i = whole; i < bytes; ++i) to[i] = from[i];
    return whole;
}

// The column of a chunk in the tensor map of codes, whose elements have 8 bytes.
DEVICE int column_of(int chunk) { return chunk * (CHUNK_BYTES / 8); }

// Prefetches the first part into the L2 cache while the previous kernel is still running. The L2 cache is coherent, so
// later loads see what that kernel writes. Prefetching more would delay x, which is needed first.
DEVICE void fetch(const Problem &p, const TensorMap &codes, int rank) {
    const int row = first_tile() * ROWS, rows = min(ROWS, p.n - row);
    if constexpr (WHOLE) prefetch(p.codes + (long long)row * p.pitch, rows * p.pitch);
    else prefetch_box(codes, column_of(part_of(p, rank, 0).first), row);
    const int scales = rows * p.groups * SCALE_SIZE & ~15;
    if (scales > 0) prefetch(p.scale + (long long)row * p.groups * SCALE_SIZE, scales);
}

// Loads all parts of the block's tiles. The scales and zero points of a tile begin at multiples of 16 bytes; those of a
// row need not.
DEVICE void produce(const Problem &p, const TensorMap &codes, Shared &shared, unsigned char *stages, int rank) {
    Ring ring;
    for (int tile = first_tile(); tile < p.tiles(); tile += tile_step()) {
        const int row = tile * ROWS, rows = min(ROWS, p.n - row);
        const long long first = (long long)row * p.groups;
#pragma unroll 1
        for (int part = 0; part < PARTS; ++part, ring.advance(p.stages)) {
            unsigned char *stage = stages + ring.slot * p.stage_bytes();
            const uint32 full = shared_address(&shared.full[ring.slot]);
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            if (BOX > 0 && ring.slot >= p.apart) barrier_wait(shared_address(&shared.loaded), 0);
            unsigned char *scale_to = stage + ROWS * p.pitch, *zero_to = scale_to + p.scale_bytes();
            const unsigned char *scale = p.scale + first * SCALE_SIZE, *zero_point = p.zero_point + first;
            const uint32 scales = bulk_part(scale_to, scale, rows * p.groups * SCALE_SIZE);
            const uint32 zeros = ZERO ? bulk_part(zero_to, zero_point, rows * p.groups) : 0;
            const uint32 bytes = (WHOLE ? rows : ROWS) * p.pitch;
            barrier_expect(full, bytes + scales + zeros);
            if constexpr (WHOLE) load_bulk(shared_address(stage), p.codes + (long long)row * p.pitch, bytes, full);
            else load_box(codes, column_of(part_of(p, rank, part).first), row, shared_address(stage), full);
            if (scales > 0) load_bulk(shared_address(scale_to), scale, scales, full);
            if (zeros > 0) load_bulk(shared_address(zero_to), zero_point, zeros, full);
        }
    }
}

// The k of the block's slice. `pitch` is the distance of tokens in the copy of x, with a gap against bank conflicts.
struct Slice {
    int first, count;

    MEMBER Slice(const Problem &p, int rank) {
        const Range last = part_of(p, rank, PARTS - 1);
        first = part_of(p, rank, 0).first * CHUNK;
        count = max(min((last.first + last.count) * CHUNK, p.k) - first, 0);
    }
    MEMBER int pitch() const { return ((count * 2 + 127) & ~127) + 32; }
};

DEVICE bool is_aligned(const Problem &p) {
    return ((unsigned long long)p.x & 15) == 0 && (p.x_stride & 7) == 0 && (p.k & 7) == 0;
}

DEVICE void copy_x(const Problem &p, Shared &shared, const unsigned char *to, int rank) {
    const Slice own(p, rank);
    const uint32 barrier = shared_address(&shared.copied), bytes = own.count * 2;
    barrier_expect(barrier, p.m * bytes);
    for (int token = 0; token < p.m && bytes > 0; ++token)
        load_bulk(shared_address(to) + token * own.pitch(), p.x + token * p.x_stride + own.first, bytes, barrier);
}

// The number of the block's boxes of x.
DEVICE int boxes_of(const Problem &p, int rank) {
    const Range last = part_of(p, rank, PARTS - 1);
    return (last.first + last.count - part_of(p, rank, 0).first + BOX - 1) / BOX;
}

// The most boxes that any block has.
DEVICE int most_boxes(const Problem &p) { return ((p.chunks + SPLIT - 1) / SPLIT + BOX - 1) / BOX; }

// Loads all boxes of x, before the codes, which are needed later. A box has all tokens; the TMA writes 0 for missing
// ones.
DEVICE void copy_boxes(const Problem &p, const TensorMap &x, Shared &shared, const unsigned char *to, int rank) {
    const int first = part_of(p, rank, 0).first;
#pragma unroll 1
    for (int i = 0; i < boxes_of(p, rank); ++i) {
        const uint32 arrived = shared_address(&shared.arrived[i]);
        barrier_expect(arrived, TOKENS * BOX_PITCH);
        load_box(x, (first + i * BOX) * (CHUNK / 4), 0, shared_address(to) + i * TOKENS * BOX_PITCH, arrived);
    }
}

// ---- multiplying ----------------------------------------------------------------------------------------------------

// The offset in bytes of word `word` of a lane's four words in a chunk.
DEVICE int word_at(int word, int t) { return word / VECTOR * (16 * VECTOR) + (t * VECTOR + word % VECTOR) * 4; }

// Loads the x of one token that belongs to a word, in the order of memory; 0 beyond the last k.
template <bool ALIGNED>
DEVICE void load_x(uint32 (&two)[PAIRS], const unsigned short *x, int first, int k) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) two[i] = 0;
    if constexpr (ALIGNED) {
        if (first < k) {
            if constexpr (BITS == 4) {
                const uint4 all = *(const uint4 *)(x + first);
                two[0] = all.x, two[1] = all.y, two[2] = all.z, two[3] = all.w;
            } else {
                const uint2 all = *(const uint2 *)(x + first);
                two[0] = all.x, two[1] = all.y;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < WORD; ++i)
            if (first + i < k) two[i / 2] |= (uint32)x[first + i] << (i % 2 * 16);
    }
}

// Pairs x in the order in which `unpack` gives codes, from a word's first k: INT4: (k, k + 4), (k + 1, k + 5), ...;
// INT8: (k, k + 2), (k + 1, k + 3); E4M3: (k, k + 1), (k + 2, k + 3).
DEVICE void order_x(uint32 (&pairs)[PAIRS]) {
    if constexpr (CODES == E4M3) return;
    uint32 two[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) two[i] = pairs[i];
#pragma unroll
    for (int i = 0; i < PAIRS / 2; ++i) {
        pairs[2 * i] = permute(two[i], two[i + PAIRS / 2], 0x5410);
        pairs[2 * i + 1] = permute(two[i], two[i + PAIRS / 2], 0x7632);
    }
}

typedef uint32 Tokens[4][TILES][PAIRS];  // x of the chunks that share these registers

// Loads x from tokens that are `stride` elements apart and begin at k = `start`.
template <bool ALIGNED>
DEVICE void load_tokens(Tokens (&x)[SETS], const Problem &p, int rank, const unsigned short *from, long long stride,
                        int start) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        const int i = set * SHARE + (SHARE > 1 ? g / TOKENS : 0);  // index among the warp's chunks
        const Range own = share_of(part_of(p, rank, i / CHUNKS), warp, i / CHUNKS);
        const bool exists = i < PARTS * CHUNKS && i % CHUNKS < own.count;
#pragma unroll
        for (int word = 0; word < 4; ++word)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const int token = SHARE > 1 ? g % TOKENS : tile * 8 + g;
                const int k = (own.first + i % CHUNKS) * CHUNK + word_at(word, t) * (8 / BITS) - start;
                load_x<ALIGNED>(x[set][word][tile], from + token * stride, k,
                                exists && token < p.m ? p.k - start : 0);
            }
    }
}

// Exchanges the words whose indices differ in `BIT`, if `does`.
template <int BIT>
DEVICE void exchange(Tokens &x, bool does) {
#pragma unroll
    for (int word = 0; word < 4; ++word)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                if (word & BIT) continue;
                const uint32 own = x[word][tile][i], other = x[word | BIT][tile][i];
                x[word][tile][i] = does ? other : own;
                x[word | BIT][tile][i] = does ? own : other;
            }
}

// Loads x from boxes, each set of registers as soon as its box has arrived. Chunks that a warp does not have are
// loaded, too, but not multiplied. Where a lane's words are adjacent, the eight lanes of an access read in four orders,
// so that each reads from its own banks.
DEVICE void load_boxes(Tokens (&x)[SETS], const Problem &p, Shared &shared, const unsigned char *boxes, int rank) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int end = boxes_of(p, rank) * BOX, turn = VECTOR == 4 ? t / 2 + g % 2 * 2 : 0;
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        const Range own = share_of(part_of(p, rank, set / CHUNKS), warp, set / CHUNKS);
        const int chunk = min(own.first + set % CHUNKS - part_of(p, rank, 0).first, end - 1);
        const unsigned char *box = boxes + chunk / BOX * (TOKENS * BOX_PITCH) + chunk % BOX * (CHUNK * 2);
        barrier_wait(shared_address(&shared.arrived[chunk / BOX]), 0);
#pragma unroll
        for (int word = 0; word < 4; ++word)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const unsigned char *from = box + (tile * 8 + g) * BOX_PITCH;
                const int k = word_at(word ^ turn, t) * (8 / BITS);
                load_x<true>(x[set][word][tile], (const unsigned short *)from, k, CHUNK);
            }
        exchange<1>(x[set], turn & 1);
        exchange<2>(x[set], turn & 2);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.loaded));
}

DEVICE uint32 subtract(uint32 a, uint32 b) {
    if constexpr (X == FP16) return subtract_half2(a, b);
    else return subtract_bf16x2(a, b);
}

// The offset that `unpack` subtracts, in both halves of a register. `unpack` puts a code into the mantissa of a number
// whose last bit counts 1, which gives for INT4: 128 (fp16: 1024) + 8 + code; for INT8 in fp16: 1024 + 128 + code. INT8
// in bf16 needs only the zero point, converted.
DEVICE uint32 offset_of(int zero_point) {
    if constexpr (CODES == INT4) return zero_point * 0x10001 + (X == FP16 ? 0x64086408 : 0x43084308);
    else if constexpr (X == FP16) return zero_point * 0x10001 + 0x64806480;
    else return to_bf16x2((float)zero_point, (float)zero_point);
}

// A word's codes minus their zero point, in the pairs of `order_x`.
DEVICE void unpack(uint32 (&pairs)[PAIRS], uint32 word, uint32 offset) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const uint32 own = word >> (i * (CODES == E4M3 ? 16 : BITS));
        if constexpr (CODES == E4M3) {
            pairs[i] = from_e4m3x2(own & 0xffff);
        } else if constexpr (CODES == INT4) {
            pairs[i] = masked_or(own, 0x000f000f, X == FP16 ? 0x64006400 : 0x43004300);
            if constexpr (!FOLD) pairs[i] = subtract(pairs[i], offset);
        } else if constexpr (X == FP16) {
            pairs[i] = subtract(masked_xor(own, 0x00ff00ff, 0x64806480), offset);
        } else {  // (128 + the low 7 bits) - (128, or 256 with the sign bit, which is the exponent's last bit)
            pairs[i] = subtract(masked_or(own, 0x007f007f, 0x43004300), masked_or(own, 0x00800080, 0x43004300));
            if constexpr (ZERO) pairs[i] = subtract(pairs[i], offset);
        }
    }
}

DEVICE void multiply(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    if constexpr (X == FP16) warp_multiply_half(sums, a0, a1, a2, a3, b0, b1);
    else warp_multiply_bf16(sums, a0, a1, a2, a3, b0, b1);
}

DEVICE void read_words(uint32 (&words)[4], const unsigned char *from) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        const unsigned char *at = from + unit * 16 * VECTOR;
        if constexpr (VECTOR == 4) {
            const uint4 all = *(const uint4 *)at;
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        } else if constexpr (VECTOR == 2) {
            const uint2 all = *(const uint2 *)at;
            words[unit * 2] = all.x, words[unit * 2 + 1] = all.y;
        } else {
            words[unit] = *(const uint32 *)at;
        }
    }
}

DEVICE float scale_at(const unsigned char *scales, int i) {
    if constexpr (SCALE == FP32) return ((const float *)scales)[i];
    else if constexpr (SCALE == FP16) return from_half(((const unsigned short *)scales)[i]);
    else return bits_float((uint32)((const unsigned short *)scales)[i] << 16);
}

// The group of a unit of a warp's chunk `c`, relative to the group of the warp's first chunk, `first`.
DEVICE int group_of(uint32 first, uint32 c, int unit) {
    if constexpr (GROUP == 0) return 0;
    else if constexpr (CHUNK % SPAN == 0) return (c * CHUNK + unit * UNIT) / SPAN;
    else if constexpr (SPAN % CHUNK == 0) return (int)(first % (SPAN / CHUNK) + c) / (SPAN / CHUNK);
    else return ((first + c) * CHUNK + unit * UNIT) / SPAN - first * CHUNK / SPAN;
}

// The sums of x over a chunk, for the columns whose results a lane has, as products with ones.
DEVICE void sum_tokens(float (&sums)[TILES][2], const Tokens &x) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        float own[4] = {};
#pragma unroll
        for (int word = 0; word < 4; ++word)
#pragma unroll
            for (int i = 0; i < PAIRS; i += 2)
                multiply(own, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, x[word][tile][i], x[word][tile][i + 1]);
        sums[tile][0] = own[0], sums[tile][1] = own[1];
    }
}

// Adds the products of the warp's chunk `c` to `sums`. Where chunks share the registers of x, only the columns of chunk
// `place` count. `codes` points to the lane's codes of row g. `scales` and `zero_points` point to those of row g at the
// warp's first k, which begins chunk `first`; those of row g + 8 follow `rest` elements later. `left`: k from there on.
DEVICE void multiply_chunk(float (&sums)[TILES][4], const Tokens &x, const float (&x_sums)[TILES][2],
                           const unsigned char *codes, int pitch, const unsigned char *scales,
                           const signed char *zero_points, int rest, int first, int c, int left, int place) {
    uint32 upper[4], lower[4];  // of rows g and g + 8
    read_words(upper, codes);
    read_words(lower, codes + 8 * pitch);
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        const int at = group_of(first, c, unit);
        // Past the end of the row codes are arbitrary and x is 0. The scale there may be NaN, so it is replaced by 0.
        const bool beyond = UNITS > 1 && c * CHUNK + unit * UNIT >= left;
        int zero[2] = {0, 0};
        if constexpr (ZERO) zero[0] = zero_points[at], zero[1] = zero_points[at + rest];
        const uint32 offset[2] = {offset_of(zero[0]), offset_of(zero[1])};
        const float scale[2] = {beyond ? 0.0f : scale_at(scales, at), beyond ? 0.0f : scale_at(scales, at + rest)};
        float own[TILES][4] = {};
#pragma unroll
        for (int word = unit * VECTOR; word < (unit + 1) * VECTOR; ++word) {
            uint32 a[PAIRS], b[PAIRS];
            unpack(a, upper[word], offset[0]);
            unpack(b, lower[word], offset[1]);
#pragma unroll
            for (int i = 0; i < PAIRS; i += 2)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
                    multiply(own[tile], a[i], b[i], a[i + 1], b[i + 1], x[word][tile][i], x[word][tile][i + 1]);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (SHARE > 1 && (int)(threadIdx.x % 4 * 2 + i % 2) / TOKENS != place) continue;
                if constexpr (FOLD)
                    own[tile][i] = fma_exactly(-136.0f - (float)zero[i / 2], x_sums[tile][i % 2], own[tile][i]);
                sums[tile][i] = fma_exactly(own[tile][i], scale[i / 2], sums[tile][i]);
            }
    }
}

DEVICE void consume(const Problem &p, Shared &shared, const unsigned char *stages, const unsigned char *copy, int rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    Tokens x[SETS];
    if (COPIES_X || BOX > 0) named_barrier_sync(1, THREADS);
    if constexpr (BOX > 0) {
        load_boxes(x, p, shared, copy, rank);
    } else if (!is_aligned(p)) {
        load_tokens<false>(x, p, rank, p.x, p.x_stride, 0);
    } else if (COPIES_X) {
        const Slice own(p, rank);
        barrier_wait(shared_address(&shared.copied), 0);
        load_tokens<true>(x, p, rank, (const unsigned short *)copy, own.pitch() / 2, own.first);
    } else {
        load_tokens<true>(x, p, rank, p.x, p.x_stride, 0);
    }
    if (!COPIES_X && BOX == 0) named_barrier_sync(1, THREADS);
    float x_sums[SETS][TILES][2];
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
#pragma unroll
        for (int word = 0; word < 4; ++word)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) order_x(x[set][word][tile]);
        if constexpr (FOLD) sum_tokens(x_sums[set], x[set]);
    }

    Ring ring;
    uint32 round = 0;
    for (int tile = first_tile(); tile < p.tiles(); tile += tile_step(), ++round) {
        float sums[HEIGHT][TILES][4] = {};
#pragma unroll
        for (int part = 0; part < PARTS; ++part, ring.advance(p.stages)) {
            const Range all = part_of(p, rank, part), own = share_of(all, warp, part);
            const int group = g * p.groups + (GROUP == 0 ? 0 : own.first * CHUNK / SPAN);
            const unsigned char *stage = stages + ring.slot * p.stage_bytes();
            const unsigned char *codes =
                stage + g * p.pitch + (own.first - all.first) * CHUNK_BYTES + word_at(0, lane % 4);
            const unsigned char *scales = stage + ROWS * p.pitch;
            const signed char *zero_points = (const signed char *)scales + p.scale_bytes() + group;
            const int left = p.groups * SPAN - own.first * CHUNK;
            barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                if (EVEN || c < own.count)
#pragma unroll
                    for (int high = 0; high < HEIGHT; ++high) {
                        const int set = (part * CHUNKS + c) / SHARE, place = (part * CHUNKS + c) % SHARE;
                        multiply_chunk(sums[high], x[set], x_sums[set],
                                       codes + high * 16 * p.pitch + c * CHUNK_BYTES, p.pitch,
                                       scales + (group + high * 16 * p.groups) * SCALE_SIZE,
                                       zero_points + high * 16 * p.groups, 8 * p.groups, own.first, c, left, place);
                    }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&shared.empty[ring.slot]));
        }

        const uint32 buffer = round & 1;
        barrier_wait(shared_address(&shared.added[buffer]), ~round >> 1 & 1);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const float (&own)[4] = sums[i / TILES][i % TILES];
            shared.sums[buffer][warp][i][lane] = make_float4(own[0], own[1], own[2], own[3]);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.summed[buffer]));
    }
}

// ---- adding up ------------------------------------------------------------------------------------------------------

DEVICE float from_out(unsigned short x) {
    if constexpr (OUT == FP16) return from_half(x);
    else return bits_float((uint32)x << 16);
}

DEVICE unsigned short to_out(float x) {
    if constexpr (OUT == FP16) return (unsigned short)to_half2(x, 0.0f);
    else return (unsigned short)to_bf16x2(x, 0.0f);
}

DEVICE void add(float4 &to, const float4 &x) {
    to.x = fma_exactly(x.x, 1.0f, to.x), to.y = fma_exactly(x.y, 1.0f, to.y);
    to.z = fma_exactly(x.z, 1.0f, to.z), to.w = fma_exactly(x.w, 1.0f, to.w);
}

// The operands that are added to a piece of a tile, and their use: 16 rows from `row` on, 8 tokens from `token` on.
struct Epilogue {
    float bias[2], residual[4], token_scale[2];

    MEMBER Epilogue(const Problem &p, int row, int token) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = row + g + 8 * i, of = token + 2 * t + i;
            bias[i] = p.bias && own < p.n ? from_out(p.bias[own]) : 0.0f;
            token_scale[i] = p.token_scale && of < p.m ? p.token_scale[of] : 1.0f;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = row + g + i / 2 * 8, of = token + 2 * t + i % 2;
            const bool exists = p.residual && own < p.n && of < p.m;
            residual[i] = exists ? from_out(p.residual[(long long)of * p.n + own]) : 0.0f;
        }
    }

    MEMBER void store(const Problem &p, int row, int token, const float4 &sums) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const float all[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = row + g + i / 2 * 8, of = token + 2 * t + i % 2;
            const float result = fma_exactly(all[i], token_scale[i % 2], bias[i / 2]) + residual[i];
            if (own < p.n && of < p.m) p.out[(long long)of * p.n + own] = to_out(result);
        }
    }
};

// Adds up the columns that belong to the same token.
DEVICE void fold(float4 &sums) {
    if constexpr (TOKENS == 1) sums.x += sums.y, sums.z += sums.w;
#pragma unroll
    for (int lanes = 2; lanes >= 1; lanes /= 2)
        if (2 * lanes >= TOKENS) {
            float other[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) other[i] = __shfl_xor_sync(0xffffffff, other[i], lanes);
            add(sums, make_float4(other[0], other[1], other[2], other[3]));
        }
}

// The address of block `rank`'s sums for the cluster's `round`-th tile, piece 0. Block round % SPLIT adds them up.
DEVICE float4 *kept_at(float4 *kept, int round, int rank) {
    return kept + (round / SPLIT * SPLIT + rank) * PIECES * 32 + threadIdx.x % 32;
}

// Adds up the warps' sums of the even or the odd tiles.
DEVICE void finish(const Problem &p, Shared &shared, float4 *kept, int rank, int buffer) {
    const int lane = threadIdx.x % 32;
    uint32 parity = 0;
    for (int round = buffer; round < rounds_of(p); round += 2, parity ^= 1) {
        const int tile = first_tile() + round * tile_step();
        const auto sum = [&](int i) {
            if (i == 0) barrier_wait(shared_address(&shared.summed[buffer]), parity);
            float4 sums = shared.sums[buffer][0][i][lane];
#pragma unroll (LARGE_X ? 5 : 15)
            for (int warp = 1; warp < WARPS; ++warp) add(sums, shared.sums[buffer][warp][i][lane]);
            if constexpr (SHARE > 1) fold(sums);
            return sums;
        };
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int row = tile * ROWS + i / TILES * 16, token = i % TILES * 8;
            if constexpr (SPLIT == 1) {
                const Epilogue epilogue(p, row, token);  // loads its operands before the wait in `sum`
                epilogue.store(p, row, token, sum(i));
            } else {
                send(shared_address(kept_at(kept, round, rank) + i * 32), round % SPLIT, sum(i),
                     shared_address(&shared.received));
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.added[buffer]));
    }
}

// Adds up the blocks' sums of the tiles that this block finishes.
DEVICE void combine(const Problem &p, Shared &shared, float4 *kept, int rank) {
    const int rounds = rounds_of(p);
    barrier_wait_after(shared_address(&shared.received), 0);
    for (int i = threadIdx.x / 32; i / PIECES * SPLIT + rank < rounds; i += THREADS / 32) {
        const int round = i / PIECES * SPLIT + rank, piece = i % PIECES;
        const int row = (first_tile() + round * tile_step()) * ROWS + piece / TILES * 16, token = piece % TILES * 8;
        const Epilogue epilogue(p, row, token);
        float4 sums = kept_at(kept, round, 0)[piece * 32];
#pragma unroll
        for (int other = 1; other < SPLIT; ++other) add(sums, kept_at(kept, round, other)[piece * 32]);
        epilogue.store(p, row, token, sums);
    }
}

// Grid: clusters of SPLIT blocks, at least one block and at most SPLIT blocks a tile.
//
// codes [n, row bytes]: a pointer if WHOLE; else a tensor map of elements of 8 bytes, in boxes of ROWS rows of `pitch`
// bytes. x [m, k]: with BOX also a tensor map of elements of 8 bytes, in boxes of TOKENS rows of BOX_PITCH bytes. scale
// and zero_point [n, groups], bias [n], residual and out [m, n], token_scale [m]; bias, residual and token_scale may be
// null. codes, scale and zero_point begin at multiples of 16 bytes. `chunks`: in a row.
//
// Shared memory, in this order:
//   Shared
//   `stages` of Problem::stage_bytes(), and 128 bytes that may be read past them; the boxes of x lie after the first
//   `apart` stages, and the other stages use their memory once x is in registers
//   with SPLIT > 1: 512 bytes for each piece of the sums of a cluster's tiles, whose number is rounded up to SPLIT
//   if COPIES_X: m tokens of Slice::pitch()
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_mm(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap x_map,
                  const unsigned short *x, const unsigned char *codes, const unsigned char *scale,
                  const unsigned char *zero_point, const unsigned short *bias, const unsigned short *residual,
                  const float *token_scale, unsigned short *out, long long x_stride, int m, int n, int k, int chunks,
                  int groups, int pitch, int stages, int apart) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Problem p = {x, codes, scale, zero_point, bias, residual, token_scale, out, x_stride,
                       m, n, k, chunks, groups, pitch, stages, apart};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, role = warp - WARPS;
    const int rank = SPLIT > 1 ? cluster_rank() : 0;
    unsigned char *ring = memory + sizeof(Shared), *past = ring + stages * p.stage_bytes() + 128;
    const unsigned char *copy = past + (SPLIT > 1 ? (rounds_of(p) + SPLIT - 1) / SPLIT * SPLIT * PIECES * 512 : 0);
    if constexpr (BOX > 0) {
        copy = ring + apart * p.stage_bytes();
        past += max((int)(copy + most_boxes(p) * TOKENS * BOX_PITCH - past), 0);
    }
    float4 *kept = (float4 *)past;

    if (warp < WARPS) {
        take_registers<REGISTERS[0]>();
        if constexpr (SPLIT > 1) cluster_arrive();
        wait_for_previous();
        consume(p, shared, ring, copy, rank);
    } else {
        give_registers<REGISTERS[1]>();
        if (role == 2 && lane == 0) {
            fetch(p, map, rank);
            for (int i = 0; i < stages; ++i) {
                barrier_init(shared_address(&shared.full[i]), 1);
                barrier_init(shared_address(&shared.empty[i]), WARPS);
            }
            barrier_init(shared_address(&shared.copied), 1);
            if constexpr (BOX > 0) {
                barrier_init(shared_address(&shared.loaded), WARPS);
                for (int i = 0; i < boxes_of(p, rank); ++i) barrier_init(shared_address(&shared.arrived[i]), 1);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                barrier_init(shared_address(&shared.summed[i]), WARPS);
                barrier_init(shared_address(&shared.added[i]), 1);
            }
            if constexpr (SPLIT > 1) {
                const int own = (rounds_of(p) - rank + SPLIT - 1) / SPLIT;  // tiles that this block adds up
                barrier_init(shared_address(&shared.received), 1);
                barrier_expect(shared_address(&shared.received), own * SPLIT * PIECES * 512);
            }
            barrier_init_fence();
        }
        __syncwarp();
        if constexpr (SPLIT > 1) cluster_arrive();
        named_barrier_sync(2, THREADS - WARPS * 32);
        named_barrier_arrive(1, THREADS);
        wait_for_previous();
        if (COPIES_X && role == 3 && lane == 0 && is_aligned(p)) copy_x(p, shared, copy, rank);
        if (role == 2 && lane == 0) {
            if constexpr (BOX > 0) copy_boxes(p, x_map, shared, copy, rank);
            produce(p, map, shared, ring, rank);
            let_next_start();  // not earlier, since its copies would delay these
        }
        __syncwarp();
        if constexpr (SPLIT > 1)
            if (role < 2) cluster_wait();  // the other blocks run and have initialised their barriers
        if (role < 2) finish(p, shared, kept, rank, role);
    }
    if constexpr (SPLIT > 1) {
        __syncwarp();
        if (role < 0 || role >= 2) cluster_wait();
        combine(p, shared, kept, rank);
    }
}
