// The decode kernel: at most 16 tokens times a weight of 1 to 8 bits, on sm_90, at memory speed.
//   out[m, n] = token_scale[m] / global_scale * sum_k x[m, k] * weight[n, k] + bias[n] + residual[m, n]
//   weight[n, k] = (number(code[n, k]) - zero_point[n, k / group]) * scale[n, k / group]
//                  or number(code[n, k]) * scale[n, k / group] + zero_point[n, k / group]
//
// weight_mm_decode_sm90.py puts ptx.cuh and sm90.cuh before this source and compiles it for each combination of
//   CODES              INT: a bit stream of integers, each plus 2^(BITS - 1); TABLE: a bit stream of indices into VALUES;
//                      INT8; UINT8, integers plus 128; or E4M3
//   BITS               of a code: 1 to 7 for INT, 1 to 4 for TABLE, else 8
//   VALUES, UNIT_VALUE numbers of the codes of a TABLE in X's dtype, as bits; their unit, in float32
//   GROUP              codes along k that share a scale, a multiple of 32 or 16; 0: a row has one scale
//   SCALING            BY_UNIT: the sums of codes of one group are scaled; BY_COLUMN: for few tokens, the columns of mma
//                      hold the sums of different groups; IN_CODES: codes times scales are exact in X's dtype
//   X, OUT, SCALE      BF16 or FP16; the scale also FP32, E8M0 or E4M3. OUT is also the dtype of the bias and the
//                      residual
//   ZERO               NONE; CODE: zero points are integers of the codes' grid, int8; UNSIGNED: the same plus
//                      2^(BITS - 1), uint8; VALUE: they are values, in the dtype of SCALE
//   TOKENS             1, 2, 4, 8 or 16
//   HEIGHT             of a tile, in 16 rows
//   SPLIT              blocks of a cluster; each has a slice of k (split-K)
//   PARTS              of a tile's slice, loaded one after the other
//   CHUNKS             of a part that one warp has, at most; a chunk is 64 codes of 8 bits, or 128 others
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
// Small groups and few tokens (BY_COLUMN). A column of mma holds the x of one group, and zeros for the other groups. So
// it sums up that group, and a lane scales its sums once for several groups, not once for each.
//
// Neither codes nor x are reordered in memory: a lane reads adjacent codes, and the x that belongs to them. mma only
// needs both operands to have the same k at the same position.

enum { BF16, FP16, FP32, E8M0, E4M3, INT, TABLE, INT8, UINT8 };
enum { BY_UNIT, BY_COLUMN, IN_CODES };
enum { NONE, CODE, UNSIGNED, VALUE };

static constexpr bool IS_STREAM = CODES == INT || CODES == TABLE;
static constexpr int WARPS = 16, THREADS = 32 * (WARPS + 4);  // 16 multiply, 2 add up, 1 loads codes, 1 loads x
static constexpr int ROWS = 16 * HEIGHT, TILES = TOKENS > 8 ? 2 : 1;  // of a tile; mma takes 8 tokens
static constexpr int PIECES = HEIGHT * TILES;                         // of a tile's sums: 16 rows by 8 tokens
static constexpr int MAX_STAGES = 6;
static constexpr int WORD = IS_STREAM ? 8 : 4;  // codes that a lane unpacks at once, a word: BITS bytes, or 4
static constexpr int CHUNK = 16 * WORD, CHUNK_BYTES = CHUNK * BITS / 8;
static constexpr int SPAN = GROUP == 0 ? 1 << 30 : GROUP;  // codes along k with one scale
static constexpr int UNIT = SCALING != BY_UNIT || SPAN % CHUNK == 0 ? CHUNK
                            : SPAN % (CHUNK / 2) == 0               ? CHUNK / 2
                                                                    : CHUNK / 4;  // scaled at once
static constexpr int UNITS = CHUNK / UNIT, VECTOR = 4 / UNITS;  // adjacent words of a unit that a lane reads
static constexpr int PAIRS = WORD / 2;                             // registers of x for a word
static constexpr int GROUPS = SCALING == BY_UNIT || SPAN > CHUNK ? 1 : CHUNK / SPAN;  // of a chunk
static constexpr int DEPTH = SCALING == BY_COLUMN ? 8 / TOKENS / GROUPS : 1;  // chunks whose groups fill the columns
static constexpr int TURNS = (CHUNKS + DEPTH - 1) / DEPTH;
static constexpr int SHARE = SCALING != BY_COLUMN && TOKENS < 8 ? 8 / TOKENS : 1;  // chunks with x in the same registers
static constexpr int SETS = (PARTS * CHUNKS + SHARE - 1) / SHARE;  // of registers for x
// Whether x is copied to shared memory first, token by token. This is faster for one token or many parts, where lanes
// would load x from distant addresses. Otherwise the copies are slower, since they queue with those of the codes.
static constexpr bool COPIES_X = BOX == 0 && (TOKENS == 1 || (SHARE > 1 && PARTS > 2));
static constexpr int BOX_PITCH = BOX * CHUNK * 2, MAX_BOXES = 16;  // bytes of a token in a box, a multiple of 256
static constexpr bool LARGE_X = SETS * 4 * TILES * PAIRS > 32;  // x takes more than 32 registers
static constexpr int REGISTERS[2] = {LARGE_X ? 112 : 104, LARGE_X ? 32 : 64};  // of a multiplying warp; of the others
static constexpr int SCALE_SIZE = SCALE == FP32 ? 4 : SCALE == E8M0 || SCALE == E4M3 ? 1 : 2;
static constexpr int ZERO_SIZE = ZERO == NONE ? 0 : ZERO == VALUE ? SCALE_SIZE : 1;
static constexpr int MIDDLE = 1 << (BITS - 1);
static constexpr bool IS_BF16_E4M3 = CODES == E4M3 && X == BF16;
// Whether mma multiplies the codes + an offset (136 at 4 bits), and (offset + zero point) times the sum of x is
// subtracted from the unit's sum. The only loss is that of float32 sums that are larger by this offset. Otherwise the
// offset is subtracted from each code.
static constexpr bool FOLD = CODES == INT && X == BF16 && UNITS == 1 && SCALING != IN_CODES;
// Whether the sums of x over a unit are needed.
static constexpr bool SUMS_X = FOLD || (ZERO != NONE && (ZERO == VALUE || SCALING == BY_COLUMN) && UNITS == 1);
static constexpr int TABLE_BYTES = CODES == TABLE ? 128 << 2 * BITS : 0;
static_assert(SCALING != BY_UNIT || SPAN % UNIT == 0, "");
static_assert(SCALING != BY_COLUMN || (CHUNK % SPAN == 0 && DEPTH > 0 && IS_STREAM), "");
static_assert(SCALING != IN_CODES || (CODES == TABLE && ZERO == NONE), "");
static_assert((CODES != E4M3 || ZERO == NONE) && (BOX == 0 || (IS_STREAM && SHARE == 1)), "");
#ifdef VALUES
__constant__ unsigned short NUMBERS[1 << BITS] = {VALUES};
#endif

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
    const float *token_scale, *global_scale;
    unsigned short *out;
    long long x_stride;  // in elements
    int m, n, k, chunks, groups;
    int pitch, stages, apart;  // bytes of a part's row; of the ring; stages that share no memory with the boxes of x

    MEMBER int tiles() const { return (n + ROWS - 1) / ROWS; }
    MEMBER int scale_bytes() const { return ROWS * groups * SCALE_SIZE; }  // in a tile; a multiple of 16
    MEMBER int stage_bytes() const {
        return (ROWS * pitch + scale_bytes() + ROWS * groups * ZERO_SIZE + 127) & ~127;  // the TMA's alignment
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
            const unsigned char *scale = p.scale + first * SCALE_SIZE, *zero_point = p.zero_point + first * ZERO_SIZE;
            const uint32 scales = bulk_part(scale_to, scale, rows * p.groups * SCALE_SIZE);
            const uint32 zeros = ZERO != NONE ? bulk_part(zero_to, zero_point, rows * p.groups * ZERO_SIZE) : 0;
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

// The first code of word `word` of a lane's four words in a chunk.
DEVICE int word_at(int word, int t) { return word / VECTOR * UNIT + (t * VECTOR + word % VECTOR) * WORD; }

// Loads the x of one token that belongs to a word, in the order of memory; 0 beyond the last k.
template <bool ALIGNED>
DEVICE void load_x(uint32 (&two)[PAIRS], const unsigned short *x, int first, int k) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) two[i] = 0;
    if constexpr (ALIGNED) {
        if (first < k) {
            if constexpr (WORD == 8) {
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

// Pairs x in the order in which `unpack` gives codes, from a word's first k: INT: (k, k + 4), (k + 1, k + 5), ...; 8
// bits: (k, k + 2), (k + 1, k + 3); TABLE, and E4M3 in fp16: (k, k + 1), (k + 2, k + 3), ....
DEVICE void order_x(uint32 (&pairs)[PAIRS]) {
    if constexpr (CODES == TABLE || (CODES == E4M3 && X == FP16)) return;
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

// With BY_COLUMN, the column, counted in steps of TOKENS, of the group of a lane's word in a warp's chunk.
DEVICE int column_of_group(int chunk, int word, int t) { return chunk % DEPTH * GROUPS + word_at(word, t) / SPAN; }

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
                const int token = TOKENS < 8 ? g % TOKENS : tile * 8 + g;
                const int k = (own.first + i % CHUNKS) * CHUNK + word_at(word, t) - start;
                const bool in_column = SCALING != BY_COLUMN || g / TOKENS == column_of_group(i % CHUNKS, word, t);
                load_x<ALIGNED>(x[set][word][tile], from + token * stride, k,
                                exists && in_column && token < p.m ? p.k - start : 0);
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
                const int k = word_at(word ^ turn, t);
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

// The lowest bit, in a half register, of the codes of pair `i` of INT: where `unpack` takes them without a shift.
DEVICE constexpr int place_of(int i) { return BITS == 1 ? i : BITS == 2 ? i % 3 * 2 : BITS == 3 ? i % 2 * 3 : 0; }

// A number of X whose bit `place` counts 1, in both halves; `unpack` puts the codes of INT into its lowest bits.
DEVICE constexpr uint32 base_of(int place) {
    return (X == FP16 ? 25 - place << 10 : 134 - place << 7) * 0x10001u;
}

// The offset that `unpack` subtracts from pair `i`, in both halves of a register. For INT it is the base + the middle of
// the codes + the zero point; for 8 bits in fp16: 1024 + 128 + the zero point. 8 bits in bf16 need only the zero point,
// converted.
DEVICE uint32 offset_of(int zero_point, int i) {
    if constexpr (CODES == INT) return base_of(place_of(i)) + ((zero_point + MIDDLE) * 0x10001 << place_of(i));
    else if constexpr (X == FP16) return zero_point * 0x10001 + 0x64806480;
    else return to_bf16x2((float)zero_point, (float)zero_point);
}

// A word of codes: the first four bytes, and up to three more.
struct Word {
    uint32 low, high;
};

// Registers whose halves hold the codes of each pair of INT, from bit `place_of` on.
DEVICE void align(uint32 (&pairs)[PAIRS], Word word) {
    const uint32 low = word.low;
    if constexpr (BITS == 1) {
        const uint32 both = low * 0x1001;  // `low` is a byte
        pairs[0] = pairs[1] = pairs[2] = pairs[3] = both;
    } else if constexpr (BITS == 2) {  // `low` has a byte in each half
        pairs[0] = pairs[1] = pairs[2] = low, pairs[3] = low >> 6;
    } else if constexpr (BITS == 3) {
        const uint32 both = permute(low, low << 4, 0x7610);
        pairs[0] = pairs[1] = both, pairs[2] = pairs[3] = both >> 6;
    } else if constexpr (BITS == 4) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) pairs[i] = low >> 4 * i;
    } else {  // the first four codes, and the other four, in two bytes that hold two or one of them
        const uint32 last = shift_out(low, word.high, 4 * BITS);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int byte = i * BITS / 8;
            const uint32 both = permute(low, last, byte == 0 ? 0x5410 : byte == 1 ? 0x6521 : 0x7632);
            pairs[i] = both >> (i * BITS - 8 * byte);
        }
    }
}

// A word's codes minus their zero point, in the pairs of `order_x`. `table`: the lane's column of the table.
DEVICE void unpack(uint32 (&pairs)[PAIRS], Word word, int zero_point, const unsigned char *table) {
    if constexpr (CODES == INT) {
        align(pairs, word);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const uint32 mask = ((1u << BITS) - 1) * 0x10001u << place_of(i);
            pairs[i] = masked_or(pairs[i], mask, base_of(place_of(i)));
            if constexpr (!FOLD) pairs[i] = subtract(pairs[i], offset_of(zero_point, i));
        }
    } else if constexpr (CODES == TABLE) {
        constexpr uint32 mask = (1u << 2 * BITS) - 1 << 7;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int shift = 2 * BITS * i - 7;
            const uint32 moved = shift < 0 ? word.low << -shift : word.low >> (shift < 0 ? 0 : shift);
            pairs[i] = *(const uint32 *)(table + (moved & mask));
        }
    } else if constexpr (IS_BF16_E4M3) {  // the bits moved to those of bf16 are 2^-120 of the number
        const uint32 own = word.low;
        pairs[0] = masked_or(own << 8, 0x80008000, own << 4 & 0x07f007f0);
        pairs[1] = masked_or(own, 0x80008000, own >> 4 & 0x07f007f0);
        pairs[0] = multiply_bf16x2(pairs[0], 0x7b807b80), pairs[1] = multiply_bf16x2(pairs[1], 0x7b807b80);
    } else {
        const uint32 offset = offset_of(zero_point, 0);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const uint32 own = word.low >> (i * (CODES == E4M3 ? 16 : 8));
            if constexpr (CODES == E4M3) {
                pairs[i] = from_e4m3x2(own & 0xffff);
            } else if constexpr (X == FP16) {
                pairs[i] = subtract(masked_xor(own, 0x00ff00ff, 0x64806480), offset);
            } else {  // (128 + the low 7 bits) - (128, or 256 with the sign bit, which is the exponent's last bit)
                pairs[i] = subtract(masked_or(own, 0x007f007f, 0x43004300), masked_or(own, 0x00800080, 0x43004300));
                if constexpr (ZERO == CODE || ZERO == UNSIGNED) pairs[i] = subtract(pairs[i], offset);
            }
        }
    }
}

// Writes the numbers of every two adjacent codes to shared memory, once for each lane, so that lanes that look up
// different codes read different banks.
DEVICE void write_table(unsigned char *table) {
#ifdef VALUES
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
    for (int i = warp; i < 1 << 2 * BITS; i += WARPS)
        ((uint32 *)table)[i * 32 + lane] = NUMBERS[i & (1 << BITS) - 1] | (uint32)NUMBERS[i >> BITS] << 16;
#endif
}

DEVICE void multiply(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    if constexpr (X == FP16) warp_multiply_half(sums, a0, a1, a2, a3, b0, b1);
    else warp_multiply_bf16(sums, a0, a1, a2, a3, b0, b1);
}

// Reads the lane's four words of a chunk of streams, from adjacent memory: BITS words of 4 bytes.
DEVICE void read_adjacent(Word (&words)[4], const unsigned char *at) {
    uint32 all[8] = {};
    if constexpr (BITS == 4) {
        const uint4 four = *(const uint4 *)at;
        all[0] = four.x, all[1] = four.y, all[2] = four.z, all[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < BITS; i += BITS % 2 ? 1 : 2) {
            if constexpr (BITS % 2) {
                all[i] = ((const uint32 *)at)[i];
            } else {
                const uint2 two = ((const uint2 *)at)[i / 2];
                all[i] = two.x, all[i + 1] = two.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int first = i * BITS / 4, shift = i * BITS % 4 * 8;
        if constexpr (BITS == 1) {
            words[i].low = byte_of(all[0], i);
        } else if constexpr (BITS == 2) {
            words[i].low = CODES == TABLE ? all[first] >> shift : permute(all[first], 0, shift ? 0x4342 : 0x4140);
        } else {
            words[i].low = shift == 0 ? all[first] : shift_out(all[first], all[first + 1], shift);
            words[i].high = shift == 0 ? all[first + 1] : shift_out(all[first + 1], all[first + 2 < 8 ? first + 2 : 7], shift);
        }
    }
}

// Reads a word of a stream, which may begin at any byte.
DEVICE Word read_word(const unsigned char *chunk, int byte) {
    if constexpr (BITS == 1) return {chunk[byte], 0};
    if constexpr (BITS == 2) {
        const uint32 two = *(const unsigned short *)(chunk + byte);
        return {CODES == TABLE ? two : permute(two, 0, 0x4140), 0};
    }
    if constexpr (BITS == 4) return {*(const uint32 *)(chunk + byte), 0};
    const uint32 *at = (const uint32 *)(chunk + (byte & ~3));
    const int shift = byte % 4 * 8;
    return {shift_out(at[0], at[1], shift), BITS > 4 ? shift_out(at[1], at[2], shift) : 0};
}

// Reads the lane's four words of a chunk.
DEVICE void read_words(Word (&words)[4], const unsigned char *chunk) {
    const int t = threadIdx.x % 4;
    if constexpr (IS_STREAM && VECTOR == 4) {
        read_adjacent(words, chunk + word_at(0, t) * BITS / 8);
    } else if constexpr (IS_STREAM && (BITS != 4 || VECTOR == 1)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = read_word(chunk, word_at(i, t) * BITS / 8);
    } else {
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const unsigned char *at = chunk + word_at(unit * VECTOR, t) * BITS / 8;
            if constexpr (VECTOR == 4) {
                const uint4 all = *(const uint4 *)at;
                words[0].low = all.x, words[1].low = all.y, words[2].low = all.z, words[3].low = all.w;
            } else if constexpr (VECTOR == 2) {
                const uint2 all = *(const uint2 *)at;
                words[unit * 2].low = all.x, words[unit * 2 + 1].low = all.y;
            } else {
                words[unit].low = *(const uint32 *)at;
            }
        }
        if constexpr (CODES == UINT8)
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i].low ^= 0x80808080;
    }
}

DEVICE float number_at(const unsigned char *numbers, int i) {
    if constexpr (SCALE == FP32) return ((const float *)numbers)[i];
    else if constexpr (SCALE == FP16) return from_half(((const unsigned short *)numbers)[i]);
    else if constexpr (SCALE == BF16) return bits_float((uint32)((const unsigned short *)numbers)[i] << 16);
    else if constexpr (SCALE == E4M3) return from_half(from_e4m3x2(numbers[i]) & 0xffff);
    const uint32 exponent = numbers[i];
    return bits_float(exponent == 0 ? 0x400000 : exponent == 255 ? 0x7fc00000 : exponent << 23);
}

// A zero point that is a code, counted from the middle of the codes; 0 without one.
DEVICE int zero_at(const unsigned char *zero_points, int i) {
    if constexpr (ZERO == CODE) return ((const signed char *)zero_points)[i];
    else if constexpr (ZERO == UNSIGNED) return zero_points[i] - MIDDLE;
    else return 0;
}

// E4M3 in bf16: NaN would be 480. Collects a bit of each of a word's codes that is NaN.
DEVICE void collect(uint32 &bad, uint32 codes) { bad |= (codes & 0x7f7f7f7f) + 0x01010101; }

// Makes the sums of a row NaN if one of its codes is.
DEVICE void add_nan(float (&sums)[TILES][4], const uint32 (&bad)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        uint32 any = bad[row];
        any |= __shfl_xor_sync(0xffffffff, any, 1), any |= __shfl_xor_sync(0xffffffff, any, 2);
        if (any & 0x80808080)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                sums[tile][2 * row] = sums[tile][2 * row + 1] = bits_float(0x7fc00000);
    }
}

// The group of a unit of a warp's chunk `c`, relative to the group of the warp's first chunk, `first`.
DEVICE int group_of(uint32 first, uint32 c, int unit) {
    if constexpr (GROUP == 0) return 0;
    else if constexpr (CHUNK % SPAN == 0) return (c * CHUNK + unit * UNIT) / SPAN;
    else if constexpr (SPAN % CHUNK == 0) return (int)(first % (SPAN / CHUNK) + c) / (SPAN / CHUNK);
    else return ((first + c) * CHUNK + unit * UNIT) / SPAN - first * CHUNK / SPAN;
}

// sums += the offsets of `unpack` (or ones) times x over words `first` .. `end` - 1, for the columns whose results a lane
// has. All rows of the product are equal.
template <bool ONES>
DEVICE void sum_x(float (&sums)[TILES][2], const Tokens &x, int first, int end) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        float own[4] = {sums[tile][0], sums[tile][1], sums[tile][0], sums[tile][1]};
#pragma unroll
        for (int word = first; word < end; ++word)
#pragma unroll
            for (int i = 0; i < PAIRS; i += 2) {
                const uint32 one = X == FP16 ? 0x3c003c00 : 0x3f803f80;
                const uint32 a = ONES ? one : offset_of(0, i), b = ONES ? one : offset_of(0, i + 1);
                multiply(own, a, a, b, b, x[word][tile][i], x[word][tile][i + 1]);
            }
        sums[tile][0] = own[0], sums[tile][1] = own[1];
    }
}

// The sums of x that belong to the unit or the groups of some registers: times the offsets, and alone.
struct Sums {
    float offset[TILES][2], plain[TILES][2];

    MEMBER void clear() {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 2; ++i) offset[tile][i] = plain[tile][i] = 0.0f;
    }
    MEMBER void add(const Tokens &x) {
        if constexpr (FOLD) sum_x<false>(offset, x, 0, 4);
        if constexpr (SUMS_X && ZERO != NONE) sum_x<true>(plain, x, 0, 4);
    }
};

// Multiplies words `first` .. `end` - 1 of rows g and g + 8, which begin at `codes` and `codes + 8 * pitch`. `scales` and
// `limit`, for IN_CODES: those of row g at the chunk, and the number of groups that exist from there on.
DEVICE void multiply_words(float (&own)[TILES][4], const Tokens &x, const Word (&upper)[4], const Word (&lower)[4],
                           int first, int end, const int (&zero)[2], const unsigned char *table,
                           const unsigned char *scales, int rest, int limit) {
    const int t = threadIdx.x % 4;
    uint32 scale[2] = {};
#pragma unroll
    for (int word = first; word < end; ++word) {
        uint32 a[PAIRS], b[PAIRS];
        unpack(a, upper[word], zero[0], table);
        unpack(b, lower[word], zero[1], table);
        if constexpr (SCALING == IN_CODES) {
            if (word * WORD % SPAN == 0) {
                const int group = word_at(word, t) / SPAN;
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const float of_row = group < limit ? number_at(scales, group + row * rest) : 0.0f;
                    scale[row] = X == FP16 ? to_half2(of_row, of_row) : to_bf16x2(of_row, of_row);
                }
            }
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                a[i] = X == FP16 ? multiply_half2(a[i], scale[0]) : multiply_bf16x2(a[i], scale[0]);
                b[i] = X == FP16 ? multiply_half2(b[i], scale[1]) : multiply_bf16x2(b[i], scale[1]);
            }
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i += 2)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                multiply(own[tile], a[i], b[i], a[i + 1], b[i + 1], x[word][tile][i], x[word][tile][i + 1]);
    }
}

// Where the scales and zero points of a warp's groups are: those of row g; those of row g + 8 follow `rest` elements
// later. `left`: groups from there on to the end of the row.
struct Scales {
    const unsigned char *scales, *zero_points;
    int rest, left;
};

// Adds the products of the warp's chunk `c` to `sums`. Where chunks share the registers of x, only the columns of chunk
// `place` count. `codes` points to the chunk's codes of row g, `scales` to the groups of the warp's first k, which begins
// chunk `first`. `left`: k from there on. `bad` collects bits of codes (`is_nan`).
DEVICE void multiply_chunk(float (&sums)[TILES][4], const Tokens &x, const Sums &x_sums, const unsigned char *codes,
                           int pitch, const Scales &of, const unsigned char *table, int first, int c, int left,
                           int place, uint32 (&bad)[2]) {
    Word upper[4], lower[4];  // of rows g and g + 8
    read_words(upper, codes);
    read_words(lower, codes + 8 * pitch);
    if constexpr (IS_BF16_E4M3)
#pragma unroll
        for (int word = 0; word < 4; ++word) collect(bad[0], upper[word].low), collect(bad[1], lower[word].low);
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        const int at = group_of(first, c, unit);
        // Past the end of the row codes are arbitrary and x is 0. The scale there may be NaN, so it is replaced by 0.
        const bool beyond = UNITS > 1 && c * CHUNK + unit * UNIT >= left;
        const int zero[2] = {zero_at(of.zero_points, at), zero_at(of.zero_points, at + of.rest)};
        float scale[2] = {1.0f, 1.0f}, added[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (SCALING == BY_UNIT) scale[i] = beyond ? 0.0f : number_at(of.scales, at + i * of.rest);
            if (ZERO == VALUE) added[i] = beyond ? 0.0f : number_at(of.zero_points, at + i * of.rest);
        }
        float own[TILES][4] = {};
        multiply_words(own, x, upper, lower, unit * VECTOR, (unit + 1) * VECTOR, zero, table,
                       of.scales + at * SCALE_SIZE, of.rest, of.left - at);
        Sums here = x_sums;
        if constexpr (ZERO == VALUE && UNITS > 1) here.clear(), sum_x<true>(here.plain, x, unit * VECTOR, (unit + 1) * VECTOR);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (SHARE > 1 && (int)(threadIdx.x % 4 * 2 + i % 2) / TOKENS != place) continue;
                if constexpr (FOLD) own[tile][i] -= here.offset[tile][i % 2];
                if constexpr (FOLD && (ZERO == CODE || ZERO == UNSIGNED))
                    own[tile][i] = fma_exactly(-(float)zero[i / 2], here.plain[tile][i % 2], own[tile][i]);
                sums[tile][i] = fma_exactly(own[tile][i], scale[i / 2], sums[tile][i]);
                if constexpr (ZERO == VALUE) sums[tile][i] = fma_exactly(added[i / 2], here.plain[tile][i % 2], sums[tile][i]);
            }
    }
}

// With BY_COLUMN: adds the products of a chunk to the sums of the groups. `codes`: those of row g.
DEVICE void add_chunk(float (&groups)[4], const Tokens &x, const unsigned char *codes, int pitch,
                      const unsigned char *table) {
    Word upper[4], lower[4];
    read_words(upper, codes);
    read_words(lower, codes + 8 * pitch);
    float own[TILES][4] = {{groups[0], groups[1], groups[2], groups[3]}};
    const int zero[2] = {};
    multiply_words(own, x, upper, lower, 0, 4, zero, table, nullptr, 0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) groups[i] = own[0][i];
}

// With BY_COLUMN: adds the sums of the groups from `first` on, scaled. `limit`: of the warp's groups.
DEVICE void scale_groups(float (&sums)[4], const float (&groups)[4], const Sums &x_sums, const Scales &of, int first,
                         int limit) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = first + (threadIdx.x % 4 * 2 + i % 2) / TOKENS, from = at + i / 2 * of.rest;
        const bool exists = at < limit;
        const float scale = exists ? number_at(of.scales, from) : 0.0f;
        float own = groups[i];
        if constexpr (ZERO == CODE || ZERO == UNSIGNED)
            own = fma_exactly(exists ? -(float)zero_at(of.zero_points, from) : 0.0f, x_sums.plain[0][i % 2], own);
        sums[i] = fma_exactly(own, scale, sums[i]);
        if constexpr (ZERO == VALUE)
            sums[i] = fma_exactly(exists ? number_at(of.zero_points, from) : 0.0f, x_sums.plain[0][i % 2], sums[i]);
    }
}

DEVICE void consume(const Problem &p, Shared &shared, const unsigned char *table, const unsigned char *stages,
                    const unsigned char *copy, int rank) {
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
    constexpr int PER_PART = SCALING == BY_COLUMN ? TURNS : 1, ALL = SCALING == BY_COLUMN ? PARTS * TURNS : SETS;
    Sums x_sums[ALL];
#pragma unroll
    for (int i = 0; i < ALL; ++i) x_sums[i].clear();
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
#pragma unroll
        for (int word = 0; word < 4; ++word)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) order_x(x[set][word][tile]);
        x_sums[SCALING == BY_COLUMN ? set / CHUNKS * PER_PART + set % CHUNKS / DEPTH : set].add(x[set]);
    }

    Ring ring;
    uint32 round = 0;
    table += lane * 4;
    for (int tile = first_tile(); tile < p.tiles(); tile += tile_step(), ++round) {
        float sums[HEIGHT][TILES][4] = {};
        uint32 bad[HEIGHT][2] = {};
#pragma unroll
        for (int part = 0; part < PARTS; ++part, ring.advance(p.stages)) {
            const Range all = part_of(p, rank, part), own = share_of(all, warp, part);
            const int start = GROUP == 0 ? 0 : own.first * CHUNK / SPAN, group = g * p.groups + start;
            const unsigned char *stage = stages + ring.slot * p.stage_bytes();
            const unsigned char *codes = stage + g * p.pitch + (own.first - all.first) * CHUNK_BYTES;
            const unsigned char *scales = stage + ROWS * p.pitch, *zero_points = scales + p.scale_bytes();
            const int left = p.groups * SPAN - own.first * CHUNK;
            float groups[HEIGHT][4];
            barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int high = 0; high < HEIGHT; ++high) {
                    const int at = group + high * 16 * p.groups;
                    const unsigned char *from = codes + high * 16 * p.pitch + c * CHUNK_BYTES;
                    const Scales of = {scales + at * SCALE_SIZE, zero_points + at * ZERO_SIZE, 8 * p.groups, p.groups - start};
                    if constexpr (SCALING == BY_COLUMN) {
                        const Sums &sum = x_sums[part * TURNS + c / DEPTH];
                        if (c % DEPTH == 0)
#pragma unroll
                            for (int i = 0; i < 4; ++i) groups[high][i] = FOLD ? -sum.offset[0][i % 2] : 0.0f;
                        if (EVEN || c < own.count)
                            add_chunk(groups[high], x[part * CHUNKS + c], from, p.pitch, table);
                        if (c % DEPTH == DEPTH - 1 || c == CHUNKS - 1)
                            scale_groups(sums[high][0], groups[high], sum, of, c / DEPTH * DEPTH * GROUPS,
                                         min(of.left, own.count * GROUPS));
                    } else if (EVEN || c < own.count) {
                        const int set = (part * CHUNKS + c) / SHARE, place = (part * CHUNKS + c) % SHARE;
                        multiply_chunk(sums[high], x[set], x_sums[set], from, p.pitch, of, table, own.first, c, left,
                                       place, bad[high]);
                    }
                }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&shared.empty[ring.slot]));
        }
        if constexpr (IS_BF16_E4M3)
#pragma unroll
            for (int high = 0; high < HEIGHT; ++high) add_nan(sums[high], bad[high]);

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
            if constexpr (CODES == TABLE) token_scale[i] *= UNIT_VALUE;
            if (SCALE == E4M3 && p.global_scale) token_scale[i] = divide_exactly(token_scale[i], *p.global_scale);
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
            if constexpr (TOKENS < 8) fold(sums);
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
//   Shared, and with CODES = TABLE the table of `write_table`
//   `stages` of Problem::stage_bytes(), and 128 bytes that may be read past them; the boxes of x lie after the first
//   `apart` stages, and the other stages use their memory once x is in registers
//   with SPLIT > 1: 512 bytes for each piece of the sums of a cluster's tiles, whose number is rounded up to SPLIT
//   if COPIES_X: m tokens of Slice::pitch()
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_mm(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap x_map,
                  const unsigned short *x, const unsigned char *codes, const unsigned char *scale,
                  const unsigned char *zero_point, const unsigned short *bias, const unsigned short *residual,
                  const float *token_scale, const float *global_scale, unsigned short *out, long long x_stride, int m, int n, int k, int chunks,
                  int groups, int pitch, int stages, int apart) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Problem p = {x, codes, scale, zero_point, bias, residual, token_scale, global_scale, out, x_stride,
                       m, n, k, chunks, groups, pitch, stages, apart};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, role = warp - WARPS;
    const int rank = SPLIT > 1 ? cluster_rank() : 0;
    unsigned char *table = memory + sizeof(Shared), *ring = table + TABLE_BYTES, *past = ring + stages * p.stage_bytes() + 128;
    const unsigned char *copy = past + (SPLIT > 1 ? (rounds_of(p) + SPLIT - 1) / SPLIT * SPLIT * PIECES * 512 : 0);
    if constexpr (BOX > 0) {
        copy = ring + apart * p.stage_bytes();
        past += max((int)(copy + most_boxes(p) * TOKENS * BOX_PITCH - past), 0);
    }
    float4 *kept = (float4 *)past;

    if (warp < WARPS) {
        take_registers<REGISTERS[0]>();
        if constexpr (SPLIT > 1) cluster_arrive();
        if constexpr (CODES == TABLE) write_table(table);
        wait_for_previous();
        consume(p, shared, table, ring, copy, rank);
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
