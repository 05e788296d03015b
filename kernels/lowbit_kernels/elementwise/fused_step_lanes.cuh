// Which elements a lane of fused_step.cu works on, and the formats in which they are stored: eight elements at once.

static constexpr int LOCATE = 256;  // tiles for each entry of `locate`
static constexpr bool GROUPED = !((STATES > 0 && FORMAT_0 == STATE_4BIT) || (STATES > 1 && FORMAT_1 == STATE_4BIT) ||
                                  (STATES > 2 && FORMAT_2 == STATE_4BIT));

// ---- which elements a lane works on --------------------------------------------------------------------------------

struct Start {  // of a tile
    uint64 element;         // in the tensor
    uint64 half_byte;       // in bytes, in codes of 4 bits
    uint64 of_128, of_256;  // in the scales of blocks of that many elements
    uint64 to_row_end;      // elements of the row from here on
};

// `n` counts the tiles of the tensor.
DEVICE Start start_of(const Tensor &t, uint32 n) {
    uint32 row = 0, tile_in_row = n;
    if (t.tiles_a_row != 0) row = n / (uint32)t.tiles_a_row, tile_in_row = n % (uint32)t.tiles_a_row;
    const uint64 cols = t.cols, col = (uint64)tile_in_row * TILE;
    return {row * cols + col, row * ((cols + 1) / 2) + col / 2, row * ((cols + 127) / 128) + col / 128, n, cols - col};
}

struct Offsets {  // of a lane's eight elements
    uint64 element;         // in the tensor
    uint64 half_byte;       // in bytes, in codes of 4 bits
    uint64 of_128, of_256;  // in the scales of blocks of that many elements
    uint64 index;           // global index of the first element, for random bits
    int left;               // elements of its run from there on, at most 8
    int count;              // elements to read, 0..8
    int far;                // the first `far` elements lie one tile further on
    uint32 mask;            // bit i: element i belongs to the tile
    bool in_block;          // whether the lane's blocks have elements, its own or other lanes'
    bool vector;            // whether 16-byte loads reach all eight
    bool whole;             // whether 16-byte stores also do
};

// How many tiles of a tensor take the short path, the first ones: all whole tiles, if the tensor has a single row,
// 16-byte accesses reach all elements, and the random bits are those of whole octets whose numbers have 32 bits. All
// other tiles take the path for all cases. On one path for both, every tile would pay for the tests of its kind.
DEVICE uint32 short_tiles(const Tensor &t) {
    const uint64 last = t.first_index + t.cols;
    const bool octets = !RANDOM || (t.run == 0 && t.first_index % 8 == 0 && last >> 35 == 0);
    return t.aligned && t.tiles_a_row == 0 && octets && t.cols >> 35 == 0 ? (uint32)(t.cols / TILE) : 0;
}

// The elements of a lane, for a tile on the short path; `n` counts the tiles of the tensor.
DEVICE Offsets locate_short(const Scalars &k, uint32 n, int lane) {
    const uint32 octet = n * (TILE / 8) + lane;
    Offsets at;
    at.element = (uint64)octet * 8, at.half_byte = (uint64)octet * 4;
    at.of_128 = octet / 16, at.of_256 = n;
    at.index = (uint64)(k.first_octet + octet) * 8, at.left = 8;
    at.count = 8, at.far = 0, at.mask = 0xff;
    at.in_block = at.vector = at.whole = true;
    return at;
}

DEVICE int limited(uint64 elements, int most) { return elements < most ? (int)elements : most; }

// Find `index` and `left`.
DEVICE void find_index(const Tensor &t, Offsets &at) {
    at.index = t.first_index + at.element, at.left = 8;
    if (RANDOM && t.run != 0) {
        const uint64 runs = at.element / t.run, in_run = at.element - runs * t.run;
        at.index = t.first_index + runs * t.stride + in_run, at.left = limited(t.run - in_run, 8);
    }
}

// `n` counts the tiles of the tensor.
DEVICE Offsets locate_lane(const Tensor &t, uint32 n, int lane) {
    const Start start = start_of(t, n);
    const int size = limited(start.to_row_end, TILE);
    const int before = GROUPED && t.aligned ? (int)start.element & 7 : 0;  // elements of lane 0 before the tile
    const int first = lane * 8 - before, end = size - first;
    Offsets at;
    at.element = start.element + first;
    at.half_byte = start.half_byte + lane * 4;
    at.of_128 = start.of_128 + lane / 16;
    at.of_256 = start.of_256;
    at.far = GROUPED && lane == 0 && before + size > TILE ? before + size - TILE : 0;
    at.mask = end <= 0 ? 0 : 0xff >> (end < 8 ? 8 - end : 0);
    if (lane == 0) at.mask = at.mask >> before << before | (1u << at.far) - 1;
    at.count = at.mask == 0 ? 0 : GROUPED && t.aligned ? limited(t.numel - at.element, 8) : end < 8 ? end : 8;
    at.in_block = at.count > 0 || lane / 16 * 128 < size;
    at.vector = t.aligned && at.count == 8;
    at.whole = at.vector && at.mask == 0xff && at.far == 0;
    find_index(t, at);
    return at;
}

// The same a tile further on, for the first `far` elements.
DEVICE Offsets far_of(const Tensor &t, const Offsets &at) {
    Offsets there = at;
    there.element += TILE;
    there.count = limited(t.numel - there.element, 8);
    there.vector = there.count == 8;
    find_index(t, there);
    return there;
}

// ---- stochastic rounding ---------------------------------------------------------------------------------------------

__constant__ uint32 MULTIPLIERS[16] = {  // of an octet's elements, and of the next one's
    multiplier(0), multiplier(1), multiplier(2), multiplier(3), multiplier(4), multiplier(5),
    multiplier(6), multiplier(7), multiplier(0), multiplier(1), multiplier(2), multiplier(3),
    multiplier(4), multiplier(5), multiplier(6), multiplier(7)};

// Random bits of eight elements from this index on, of which the upper 16 count.
DEVICE void draw_eight(const uint32 *keys, long long index, uint32 random[8]) {
    const int skipped = (int)index & 7;  // elements of the first octet before these
    if (skipped == 0) {
        const uint32 h = hash(keys, index >> 3);
#pragma unroll
        for (int i = 0; i < 8; ++i) random[i] = h * multiplier(i);
    } else {
        const uint32 first = hash(keys, index >> 3), second = hash(keys, (index >> 3) + 1);
#pragma unroll
        for (int i = 0; i < 8; ++i) random[i] = (i < 8 - skipped ? first : second) * MULTIPLIERS[i + skipped];
    }
}

// The same for a lane's elements.
DEVICE void draw(const Tensor &t, const uint32 *keys, const Offsets &at, uint32 random[8]) {
    if (at.left >= 8) {
        draw_eight(keys, at.index, random);
    } else {
        uint64 index = at.index;
        int left = at.left;
#pragma unroll 1
        for (int j = 0; j < 8; ++j) {  // of several runs, which is rare: one after another, for less code
#pragma unroll
            for (int i = 0; i < 7; ++i) random[i] = random[i + 1];
            random[7] = hash(keys, index >> 3) * MULTIPLIERS[index & 7];
            ++index;
            if (--left == 0) index += t.stride - t.run, left = limited(t.run, 8);
        }
    }
}

// Round a lane's elements stochastically to bf16, which are then the upper halves of `x`.
DEVICE void round_stochastically(const Tensor &t, const uint32 *keys, const Offsets &at, float x[8]) {
    uint32 random[8] = {};
    draw(t, keys, at, random);
    if (GROUPED && at.far) {
        uint32 further[8] = {};
        draw(t, keys, far_of(t, at), further);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < at.far) random[i] = further[i];
    }
    float largest = larger_magnitude(x[0], x[1]);
#pragma unroll
    for (int i = 2; i < 8; ++i) largest = larger_magnitude(largest, x[i]);
    constexpr uint32 LAST = 0x7f7f0000;  // the largest bf16; beyond it the sum may carry into infinity
    if (float_bits(largest) <= LAST) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = bits_float(float_bits(x[i]) + (random[i] >> 16));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32 bits = float_bits(x[i]), magnitude = bits & 0x7fffffff;
            if (magnitude <= LAST) x[i] = bits_float(bits + (random[i] >> 16));
            else if (magnitude > 0x7f800000) x[i] = bits_float(0x7fff0000);
        }
    }
}

// ---- eight elements, as they are stored --------------------------------------------------------------------------

template <int WORDS>
struct Raw {
    uint32 word[WORDS];
};

template <int WORDS>
DEVICE void load_vector(const void *p, Raw<WORDS> &raw) {
    if constexpr (WORDS == 1) {
        raw.word[0] = stream_load((const uint32 *)p);
    } else if constexpr (WORDS == 2) {
        const uint2 x = stream_load((const uint2 *)p);
        raw.word[0] = x.x, raw.word[1] = x.y;
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const uint4 x = stream_load((const uint4 *)p + i / 4);
            raw.word[i] = x.x, raw.word[i + 1] = x.y, raw.word[i + 2] = x.z, raw.word[i + 3] = x.w;
        }
    }
}

template <int WORDS>
DEVICE void store_vector(void *p, const Raw<WORDS> &raw) {
    if constexpr (WORDS == 1) {
        stream_store((uint32 *)p, raw.word[0]);
    } else if constexpr (WORDS == 2) {
        stream_store((uint2 *)p, make_uint2(raw.word[0], raw.word[1]));
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4)
            stream_store((uint4 *)p + i / 4,
                         make_uint4(raw.word[i], raw.word[i + 1], raw.word[i + 2], raw.word[i + 3]));
    }
}

// An unsigned integer of so many bytes.
template <int BYTES>
struct Unsigned { typedef uint32 Type; };
template <>
struct Unsigned<1> { typedef unsigned char Type; };
template <>
struct Unsigned<2> { typedef unsigned short Type; };

// Load `units` items of BYTES and set the others to 0. WORDS words hold the eight elements of a lane.
template <int BYTES, int WORDS>
DEVICE void load_items(const void *p, int units, Raw<WORDS> &raw) {
    typedef typename Unsigned<BYTES>::Type T;
    constexpr int PER_WORD = 4 / BYTES;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        raw.word[i] = 0;
#pragma unroll
        for (int j = 0; j < PER_WORD; ++j)
            if (i * PER_WORD + j < units)
                raw.word[i] |= (uint32)((const T *)p)[i * PER_WORD + j] << (j * 8 * BYTES & 31);
    }
}

// Store the items of `mask`. Those before `far` lie a tile further on.
template <int BYTES, int WORDS>
DEVICE void store_items(void *p, uint32 mask, int far, const Raw<WORDS> &raw) {
    typedef typename Unsigned<BYTES>::Type T;
    constexpr int PER_WORD = 4 / BYTES;
#pragma unroll
    for (int i = 0; i < WORDS * PER_WORD; ++i)
        if (mask >> i & 1)
            ((T *)p)[i < far ? i + TILE : i] = (T)(raw.word[i / PER_WORD] >> (i % PER_WORD * 8 * BYTES & 31));
}

// Replace the first bytes.
template <int WORDS>
DEVICE void replace_first(Raw<WORDS> &raw, const Raw<WORDS> &with, int bytes) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int own = bytes - 4 * i;
        const uint32 mask = own >= 4 ? 0xffffffff : own <= 0 ? 0 : (1u << 8 * own) - 1;
        raw.word[i] = (with.word[i] & mask) | (raw.word[i] & ~mask);
    }
}

// Eight elements of SIZE bytes.
template <int SIZE>
struct Eight {
    static constexpr int BYTES = SIZE, WORDS = 2 * SIZE;
    Raw<WORDS> raw;

    template <bool VECTOR>
    MEMBER void load(const void *p, const Offsets &at) {
        p = (const char *)p + at.element * BYTES;
        if constexpr (VECTOR) load_vector(p, raw);
        else load_items<BYTES>(p, at.count, raw);
    }
    template <bool VECTOR>
    MEMBER void store(void *p, const Offsets &at) const {
        p = (char *)p + at.element * BYTES;
        if constexpr (VECTOR) store_vector(p, raw);
        else store_items<BYTES>(p, at.mask, at.far, raw);
    }
    MEMBER void take_far(const Eight &there, int count) { replace_first(raw, there.raw, count * BYTES); }
};

template <int DTYPE>
struct Floats : Eight<DTYPE == FP32 ? 4 : 2> {
    using Eight<DTYPE == FP32 ? 4 : 2>::raw;

    MEMBER void decode(float x[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if constexpr (DTYPE == FP32) x[i] = bits_float(raw.word[i]);
            else {
                const uint32 half = i & 1 ? raw.word[i / 2] >> 16 : raw.word[i / 2] & 0xffff;
                if constexpr (DTYPE == BF16) x[i] = bits_float(half << 16);
                else x[i] = from_half(half);
            }
        }
    }
    MEMBER void truncate(const float x[8]) {  // to bf16
#pragma unroll
        for (int i = 0; i < 4; ++i) raw.word[i] = permute(float_bits(x[2 * i]), float_bits(x[2 * i + 1]), 0x7632);
    }
    MEMBER void encode(const float x[8]) {
#pragma unroll
        for (int i = 0; i < Floats::WORDS; ++i) {
            if constexpr (DTYPE == FP32) raw.word[i] = float_bits(x[i]);
            else if constexpr (DTYPE == BF16) raw.word[i] = to_bf16x2(x[2 * i], x[2 * i + 1]);
            else raw.word[i] = to_half2(x[2 * i], x[2 * i + 1]);
        }
    }
};

// ---- states in few bits ------------------------------------------------------------------------------------------

// Size of the tables in shared memory.
static constexpr int TABLE_WORDS = CODES ? values_before(STATES) + cells_before(STATES) : 1;
__shared__ uint32 table[TABLE_WORDS];

// Codes are looked up by magnitude. The upper bits of y = |x| / scale are the index of a cell, and at most one boundary
// between two codes falls into a cell. The highest byte of a cell's word is the rank of the cell's smallest element.
// The lower bits of the word, added to the lower bits of y, carry into that byte exactly if y lies beyond the boundary.
// (The host has subtracted the cell's own bits, so that all of y can be added.) The sign of x follows below the bits of
// y: at a tie, a negative x goes to the larger magnitude, which is the lower code.
template <int SLOT>
DEVICE uint32 ranked(const uint32 *table, float x, float inverse) {
    constexpr int SHIFT = SHIFTS[SLOT];
    float y = saturated_product(x, inverse);
    y = fmaxf(y, bits_float((uint32)BASES[SLOT] << (SHIFT - 1)));
    const uint32 word = cells_of(table, SLOT)[(float_bits(y) >> (SHIFT - 1)) - BASES[SLOT]];
    return word + shift_in(float_bits(y), float_bits(x), 25 - SHIFT);  // the rank is the highest byte
}

// The bits of 2**23 + level, for the level of the square that |x| is rounded to.
DEVICE uint32 square_level(float x, float inverse, uint32 random) {
    constexpr float SHIFT = 8388608.0f;  // 2**23
    const float z = 49.0f * saturated_product(x, inverse);
    // The root is approximate. So `i` may be one too low or too high, if the root lies next to a whole number k. With
    // i = k - 1 the rest is almost the distance, above every threshold; with i = k it is almost 0, below every one. The
    // level is k in both cases.
    const float shifted = add_down(approximate_root(z), SHIFT), i = shifted - SHIFT;
    const float rest = fmaf(-i, i, z), distance = fmaf(2.0f, i, 1.0f);
    // (random + 0.5) / 65536, exactly, from 128 + random / 65536
    const float draw = bits_float((random >> 16) + 0x43000000u) - bits_float(0x42ffffff);
    // The result is below 0 exactly if `rest` exceeds the threshold, because it is rounded once.
    return float_bits(shifted) + (float_bits(fmaf(draw, distance, -rest)) >> 31);
}

// Bits of a float32 with the exponent 112 + code, for the code of the power of two that `x` is rounded to, if it is not
// below 0. `inverse` is a power of two. The random bits carry from the mantissa of the product into its exponent.
DEVICE uint32 power_bits(float x, float inverse, uint32 random) {
    return float_bits(clamped_product(x, inverse)) + (masked_or(random, 0xffff0000, 0x8000) >> 9);
}

// A byte of each of four words, the lowest or, with `pair` 0x0073, the highest; the highest's sign with 0x00fb.
DEVICE uint32 gather(uint32 a, uint32 b, uint32 c, uint32 d, uint32 pair) {
    return permute(permute(a, b, pair), permute(c, d, pair), 0x5410);
}

// 0xff for each negative one of four floats.
DEVICE uint32 signs_of(float a, float b, float c, float d) {
    return gather(float_bits(a), float_bits(b), float_bits(c), float_bits(d), 0x00fb);
}

// Codes of 8 bits of four elements.
template <int SLOT>
DEVICE uint32 four_codes(const float x[4], const uint32 *table, float inverse) {
    uint32 rank[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rank[i] = ranked<SLOT>(table, x[i], inverse);
    const uint32 ranks = gather(rank[0], rank[1], rank[2], rank[3], 0x0073);
    if constexpr (!is_signed(SLOT)) return ranks;
    constexpr uint32 ONES = 0x01010101, ZERO = 127 * ONES;  // the code of 0, four times
    const uint32 signs = signs_of(x[0], x[1], x[2], x[3]);
    // The highest rank, 1.0, has no negative.
    const uint32 positive = ranks + ZERO, negative = (ranks - (ranks >> 7 & ONES)) ^ ZERO;
    return (positive & ~signs) | (negative & signs);
}

// Codes of 4 bits of eight elements, squares with a sign.
DEVICE uint32 eight_squares(const float x[8], const uint32 random[8], float inverse) {
    uint32 level[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) level[i] = square_level(x[i], inverse, random[i]);
    const uint32 even = gather(level[0], level[2], level[4], level[6], 0x0040);
    const uint32 odd = gather(level[1], level[3], level[5], level[7], 0x0040);
    const uint32 levels = even + (odd << 4);
    const uint32 signs = (signs_of(x[0], x[2], x[4], x[6]) & 0x0f0f0f0f) |
                         (signs_of(x[1], x[3], x[5], x[7]) & 0xf0f0f0f0);
    constexpr uint32 ZERO = 0x77777777;
    return ((levels + ZERO) & ~signs) | ((levels ^ ZERO) & signs);
}

// Codes of 4 bits of eight elements, powers of two. Elements i and i + 4 share a word.
DEVICE uint32 eight_powers(const float x[8], const uint32 random[8], float inverse) {
    uint32 codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32 low = power_bits(x[i], inverse, random[i]), high = power_bits(x[i + 4], inverse, random[i + 4]);
        const uint32 halves = larger_halves(permute(low, high, 0x7632), 0x38003800);  // no exponent below 112
        const uint32 moved = i < 2 ? halves >> (7 - 4 * i & 31) : halves << (4 * i - 7 & 31);
        codes |= moved & 0x000f000f << 4 * i;
    }
    return codes;
}

template <int SLOT, int WORDS>
DEVICE void decode_codes(const Raw<WORDS> &raw, int lane, const uint32 *table, float scale, float x[8]) {
    if constexpr (FORMATS[SLOT] == STATE_FLOAT8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32 halves = from_e4m3x2(raw.word[i / 2] >> (i % 2 * 16) & 0xffff);
            x[2 * i] = from_half(halves & 0xffff) * scale;
            x[2 * i + 1] = from_half(halves >> 16) * scale;
        }
    } else {
        const uint32 *values = table + values_before(SLOT);
        if constexpr (FORMATS[SLOT] == STATE_8BIT) {
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = bits_float(values[byte_of(raw.word[i / 4], i % 4)]) * scale;
        } else {  // each lane of the block multiplies the value of one code
            const float power = bits_float((uint32)(112 + lane % 16) << 23);
            const float value = (is_signed(SLOT) ? bits_float(values[lane % 16]) : power) * scale;
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = from_lane_of_half(value, raw.word[0] >> 4 * i);
        }
    }
}

// Returns the scale of the lane's block. A block that holds a NaN, or a magnitude of 2**126 or more, gets a NaN.
// `random`: the elements' bits, for codes of 4 bits.
template <int SLOT, int WORDS>
DEVICE float encode_codes(const float x[8], const uint32 random[8], int lane, const uint32 *table, Raw<WORDS> &raw) {
    float magnitude = larger_magnitude(x[0], x[1]);
#pragma unroll
    for (int i = 2; i < 8; ++i) magnitude = larger_magnitude(magnitude, x[i]);
    uint32 largest = float_bits(magnitude);  // bits of magnitudes are in order, NaN above all
    if constexpr (block_of(SLOT) == TILE) {
        largest = warp_max(largest);
    } else {  // two maxima over the whole warp: with a mask for each half, the halves would run one after the other
        const bool first = lane < 16;
        const uint32 of_first = warp_max(first ? largest : 0), of_second = warp_max(first ? 0 : largest);
        largest = first ? of_first : of_second;
    }
    constexpr uint32 FLOOR = 0x0d800000, LIMIT = 0x7e800000;  // 2**-100, 2**126
    largest = largest > FLOOR ? largest : FLOOR;
    const uint32 kept = has_powers(SLOT) ? largest + 0x7fffff & 0xff800000 : largest;  // the power of two above
    float scale = bits_float(largest >= LIMIT ? 0x7fffffff : kept);
    if constexpr (FORMATS[SLOT] == STATE_FLOAT8) {  // scale / 448, correctly rounded
        const float estimate = scale * (1.0f / 448.0f);
        scale = fmaf(fmaf(-448.0f, estimate, scale), 1.0f / 448.0f, estimate);
    }
    const float inverse = has_powers(SLOT) ? bits_float(0x7f000000 - float_bits(scale)) : reciprocal(scale);
    if constexpr (FORMATS[SLOT] == STATE_FLOAT8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float *y = x + 4 * i;
            uint32 word = to_e4m3x2(y[0] * inverse, y[1] * inverse) | to_e4m3x2(y[2] * inverse, y[3] * inverse) << 16;
            if constexpr (!is_signed(SLOT))  // a second moment never rounds to zero
                word += ~((word & 0x7f7f7f7f) + 0x7f7f7f7f | word) >> 7 & 0x01010101;
            raw.word[i] = word;
        }
    } else if constexpr (FORMATS[SLOT] == STATE_8BIT) {
        raw.word[0] = four_codes<SLOT>(x, table, inverse), raw.word[1] = four_codes<SLOT>(x + 4, table, inverse);
    } else {
        raw.word[0] = is_signed(SLOT) ? eight_squares(x, random, inverse) : eight_powers(x, random, inverse);
    }
    return scale;
}

// ---- a tile ------------------------------------------------------------------------------------------------------

// Prefetches bytes of an array that begins at a multiple of 16 bytes. A prefetch loads whole cache lines, so rounding to
// 16 bytes skips almost nothing.
DEVICE void prefetch_bytes(const void *p, uint64 from, uint64 to) {
    from = from / 16 * 16, to = to / 16 * 16;
    if (to > from) prefetch((const char *)p + from, (uint32)(to - from));
}

// A state of eight elements.
template <int SLOT>
struct State {
    static constexpr int FORMAT = FORMATS[SLOT];
    static constexpr int CODES_A_BYTE = FORMAT == STATE_4BIT ? 2 : 1;
    Floats<FORMAT == STATE_BF16 ? BF16 : FP32> values;
    Raw<2 / CODES_A_BYTE> codes;
    float scale;

    static MEMBER uint64 code_at(const Offsets &at) { return FORMAT == STATE_4BIT ? at.half_byte : at.element; }
    static MEMBER uint64 scale_at(const Offsets &at) { return block_of(SLOT) == 128 ? at.of_128 : at.of_256; }

    static MEMBER void prefetch_values(const Tensor &t, const Start &from, const Start &to) {
        constexpr int BITS = has_scale(SLOT) ? 8 / CODES_A_BYTE : 8 * Floats<FORMAT == STATE_BF16 ? BF16 : FP32>::BYTES;
        prefetch_bytes(t.state[SLOT], from.element * BITS / 8, to.element * BITS / 8);
        if constexpr (has_scale(SLOT)) prefetch_bytes(t.scale[SLOT], 4 * scale_of(from), 4 * scale_of(to));
    }
    static MEMBER uint64 scale_of(const Start &at) { return block_of(SLOT) == 128 ? at.of_128 : at.of_256; }
    template <bool VECTOR>
    MEMBER void load(const Tensor &t, const Offsets &at) {
        if constexpr (has_scale(SLOT)) {
            const char *p = (const char *)t.state[SLOT] + code_at(at);
            if constexpr (VECTOR) load_vector(p, codes);
            else load_items<1>(p, (at.count + CODES_A_BYTE - 1) / CODES_A_BYTE, codes);
            scale = VECTOR || at.in_block ? t.scale[SLOT][scale_at(at)] : 0.0f;
        } else {
            values.template load<VECTOR>(t.state[SLOT], at);
        }
    }
    MEMBER void take_far(const State &there, int count) {
        if constexpr (has_scale(SLOT)) replace_first(codes, there.codes, count);
        else values.take_far(there.values, count);
    }
    MEMBER void decode(int lane, const uint32 *table, float x[8]) const {
        if constexpr (has_scale(SLOT)) decode_codes<SLOT>(codes, lane, table, scale, x);
        else values.decode(x);
    }
    MEMBER void encode(const Tensor &t, const Scalars &k, const Offsets &at, int lane, const uint32 *table,
                       float x[8]) {
        if constexpr (has_scale(SLOT)) {
            if (!at.whole) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (!(at.mask >> i & 1)) x[i] = 0.0f;  // must not count in the absmax
            }
            uint32 random[8] = {};
            if constexpr (is_stochastic(SLOT)) draw(t, k.keys[SLOT + 1], at, random);
            scale = encode_codes<SLOT>(x, random, lane, table, codes);
        } else {
            if constexpr (is_stochastic(SLOT)) {
                round_stochastically(t, k.keys[SLOT + 1], at, x);
                values.truncate(x);
            } else {
                values.encode(x);
            }
        }
    }
    template <bool VECTOR>
    MEMBER void store(const Tensor &t, const Offsets &at, int lane) {
        if constexpr (has_scale(SLOT)) {
            char *p = (char *)t.state[SLOT] + code_at(at);
            if constexpr (VECTOR) {
                store_vector(p, codes);
            } else {
                uint32 mask = at.mask;
                if constexpr (FORMAT == STATE_4BIT) {
                    if (at.count & 1) codes.word[0] &= (1u << (4 * at.count)) - 1;  // the unused half byte is 0
                    mask = (1u << (at.count + 1) / 2) - 1;
                }
                store_items<1>(p, mask, at.far, codes);
            }
            if (lane % (block_of(SLOT) / 8) == 0 && at.mask) t.scale[SLOT][scale_at(at)] = scale;
        } else {
            values.template store<VECTOR>(t.state[SLOT], at);
        }
    }
};

// `correction` of eight elements.
typedef Eight<CORRECTION_BYTES == 0 ? 1 : CORRECTION_BYTES> Correction;

DEVICE void decode_corrected(const Correction &correction, float w[8]) {
    constexpr int BITS = 8 * Correction::BYTES;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int at = i * BITS, below = (int)(correction.raw.word[at / 32] << (32 - BITS - at % 32)) >> (32 - BITS);
        w[i] = joined_weight(w[i], below);
    }
}

DEVICE void encode_corrected(float w[8], Correction &correction) {
    constexpr int BITS = 8 * Correction::BYTES;
    constexpr uint32 MASK = 0xffffffffu >> (32 - BITS);
#pragma unroll
    for (int i = 0; i < Correction::WORDS; ++i) correction.raw.word[i] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int below;
        w[i] = split_weight(w[i], below);
        correction.raw.word[i * BITS / 32] |= ((uint32)below & MASK) << i * BITS % 32;
    }
}
