// How weight_mm_large_batch_sm90.cu unpacks codes: of tables, and of some integers of 1 to 4 bits, by look-up, and scales
// multiplied into their values; other integers and float8 by arithmetic.
//
// Shared memory holds the values of each pair of codes as one word, once for each lane of a warp, so no two lanes ask
// the same bank for different words. A pair takes a rotation, a LOP3 and a load, whatever its values are: a table's, or
// integers.
//
// With ROUNDED a pair is multiplied by its group's scale. That is exact where the product has at most DTYPE's
// significant bits: E2M1 times E8M0 or E4M3, integers of 2 bits times bfloat16 scales.
//
//   TABLE              the values of the codes times UNIT_OF_TABLE, as the bits of DTYPE, separated by commas. With ZERO
//                      1 they are the codes themselves, which start at 0
//   UNIT_OF_TABLE      a factor that makes the values exact or nearly so in DTYPE. With a SCALE of E4M3 it includes
//                      2**-120

enum { BF16, FP16, FP32, INT4, INT8, STREAM, E4M3, LOOKUP, E8M0 };

static constexpr bool SCALED = (CODES == LOOKUP || CODES == E4M3 || ZERO > 1) && ROUNDED;
static_assert(CODES != LOOKUP || BITS <= 4, "");
static_assert(!SCALED || (DTYPE == BF16 && GROUP > 0 && (GROUP % CHUNK == 0 || CHUNK % GROUP == 0)), "");
static_assert(SCALED || (SCALE != E8M0 && SCALE != E4M3 && ZERO < 2), "");

template <int TO>
DEVICE uint32 packed(float low, float high) {
    if constexpr (TO == FP16) return to_half2(low, high);
    else return to_bf16x2(low, high);
}

// a * b, a - b and a * b + c for two adjacent numbers, rounded once
DEVICE uint32 product_of(uint32 a, uint32 b) {
    if constexpr (DTYPE == FP16) return multiply_half2(a, b);
    else return multiply_bf16x2(a, b);
}
DEVICE uint32 difference_of(uint32 a, uint32 b) {
    if constexpr (DTYPE == FP16) return subtract_half2(a, b);
    else return subtract_bf16x2(a, b);
}
DEVICE uint32 fused(uint32 a, uint32 b, uint32 c) {
    if constexpr (DTYPE == FP16) return fma_half2(a, b, c);
    else return fma_bf16x2(a, b, c);
}

// ---- the table ------------------------------------------------------------------------------------------------------

static constexpr int PAIRS = CODES == LOOKUP ? 1 << 2 * BITS : 0;
// Bytes from a pair to the next. With 256, the byte of two codes and that of the lane are the address, which one
// instruction makes.
static constexpr int TABLE_STEP = BITS == 4 ? 256 : 128;

__constant__ unsigned short VALUES[] = {TABLE};

// Writes the table of pairs to TABLE_STEP * PAIRS bytes of shared memory; for all threads of a block.
DEVICE void fill_lookup(void *lookup, int threads) {
    for (int i = threadIdx.x; i < PAIRS * 8; i += threads) {
        const uint32 pair = VALUES[i / 8 % (1 << BITS)] | (uint32)VALUES[i / 8 >> BITS] << 16;
        ((uint4 *)lookup)[i / 8 * (TABLE_STEP / 16) + i % 8] = make_uint4(pair, pair, pair, pair);
    }
}

// Where the thread, number `t` of the four of a row, finds its pair of eight codes: the rotations that put it at bit 7,
// for eight codes that begin at each byte of a word; or the selector of its byte.
struct Pairs {
    uint32 rotation[4], selector, lane, lookup;
    MEMBER Pairs(uint32 lookup, int t) : selector(0x5504 | t << 4), lane(threadIdx.x % 32 * 4), lookup(lookup) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rotation[i] = 7 - i * 8 - t * 2 * BITS & 31, in_use(rotation[i]);
        in_use(lane), in_use(selector);
    }

    // The values of the thread's two of the eight codes that begin at bit 8 * BITS * j of the words.
    template <int WORDS>
    MEMBER uint32 at(const uint32 (&words)[WORDS], int j) const {
        if constexpr (TABLE_STEP == 256) return constant_word(lookup + permute(words[j], lane, selector));
        const int first = 8 * BITS * j / 32;
        int byte = BITS * j % 4;
        uint32 word = words[first];
        if (byte + BITS > 4) {
            word = permute(word, words[first + 1 < WORDS ? first + 1 : first], 0x3210 + byte * 0x1111);
            byte = 0;
        }
        return constant_word(lookup + masked_or(shift_in(word, word, rotation[byte]), (PAIRS - 1u) << 7, lane));
    }
};

// ---- scales ---------------------------------------------------------------------------------------------------------

static constexpr int SCALE_BYTES = SCALE == FP32 ? 4 : SCALE == E8M0 || SCALE == E4M3 ? 1 : 2;
static constexpr int PER = SCALED && GROUP < CHUNK ? CHUNK / GROUP : 1;  // groups of a chunk, which divide a row's
static constexpr int SCALE_WORDS = (PER * SCALE_BYTES + 3) / 4;
static constexpr int ZERO_WORDS = ZERO == 2 ? PER : ZERO == 3 ? (PER + 1) / 2 : (PER + 3) / 4;
static constexpr bool MAY_BE_NAN = SCALED && (SCALE == E8M0 || SCALE == E4M3);
// Whether powers of two count from the largest of their row, which is multiplied into the sums. So one product with a
// finite factor makes a number of a code, exactly, if those of a row span 124 octaves at most.
static constexpr bool RELATIVE = SCALED && CODES == E4M3 && SCALE == E8M0;
static constexpr int MOST_TOP = 247;  // of the largest scale's byte: its factor is 2**120

// The factor of a pair of values, and the addend. `rest` is the part of the scale below DTYPE's precision.
struct Factor {
    uint32 scale, rest, zero;
};

// A row's scales and zero points of a chunk, as they are in memory.
struct Scales {
    uint32 scale[SCALE_WORDS], zero[ZERO_WORDS];

    // `row` is the index of the row's first group.
    MEMBER void load(const void *scales, const void *zeros, uint32 row, int groups, int chunk) {
        const int group = GROUP > CHUNK ? chunk / (GROUP > CHUNK ? GROUP / CHUNK : 1) : chunk * PER;
        const uint32 at = row + min(group, groups - PER);
        load_words<PER * SCALE_BYTES>(scale, (const char *)scales + (uint64)at * SCALE_BYTES);
        if constexpr (ZERO == 1) load_words<PER>(zero, (const char *)zeros + at);
        if constexpr (ZERO == 2) load_words<PER * 4>(zero, (const char *)zeros + at * 4ull);
        if constexpr (ZERO == 3) load_words<PER * 2>(zero, (const char *)zeros + at * 2ull);
    }

    // Not 0 if one of the scales is NaN. As numbers they would be 480 or infinite.
    MEMBER uint32 nan() const {
        uint32 found = 0;
#pragma unroll
        for (int i = 0; i < SCALE_WORDS; ++i) {
            const uint32 full = ((scale[i] & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
            found |= SCALE == E8M0 ? full & scale[i] : full;
        }
        return found;
    }

    // The zero point of the chunk's group `i` among codes that start at 0.
    MEMBER uint32 offset(int i) const {
        const uint32 byte = zero[i / 4] >> i % 4 * 8;
        const float point = UNSIGNED ? (float)(byte & 255) : (float)(signed char)byte + (1 << BITS - 1);
        return packed<DTYPE>(point, point);
    }

    // `origin`: of the row, with RELATIVE.
    MEMBER Factor factor(int i, uint32 origin) const {
        Factor result = {0, 0, 0};
        if constexpr (RELATIVE) {  // the bytes are bfloat16's exponents
            result.scale = byte_of(scale[i / 4], i % 4) * 0x00800080 + origin;
        } else if constexpr (SCALE == DTYPE) {
            result.scale = permute(scale[i / 2], 0, i % 2 ? 0x3232 : 0x1010);
        } else if constexpr (SCALE == E8M0) {  // 2**-127 is a subnormal number
            result.scale = larger_halves(permute(scale[i / 4], 0, 0x0404 + i % 4 * 0x1010) >> 1, 0x00400040);
        } else if constexpr (SCALE == E4M3) {  // sign, exponent and mantissa where bfloat16 has them: 2**-120 of it
            const uint32 four = scale[i / 4], low = four << 4 & 0xf0f0f0f0;
            const uint32 high = masked_or(four, 0x80808080, four >> 4 & 0x07070707);
            result.scale = permute(low, high, 0x4040 + i % 4 * 0x1111);
        } else {
            const uint32 bits = SCALE == FP32 ? scale[i] : scale[i / 2] >> i % 2 * 16 & 0xffff;
            const float number = SCALE == FP32 ? bits_float(bits) : from_half(bits);
            result.scale = packed<DTYPE>(number, number);
            const float rest = number - bits_float(result.scale << 16);
            const uint32 small = packed<DTYPE>(rest, rest);
            result.rest = rest == rest ? small : 0;  // of an infinite scale it would be NaN
        }
        if constexpr (ZERO == 2) result.zero = packed<DTYPE>(bits_float(zero[i]), bits_float(zero[i]));
        if constexpr (ZERO == 3) result.zero = permute(zero[i / 2], 0, i % 2 ? 0x3232 : 0x1010);
        return result;
    }
};

// Multiplies a pair of values by its scale.
DEVICE uint32 scaled(uint32 pair, const Factor &factor) {
    constexpr bool HAS_REST = SCALE != DTYPE && SCALE != E8M0 && SCALE != E4M3;
    const uint32 zero = ZERO >= 2 && HAS_REST ? fused(pair, factor.rest, factor.zero) : factor.zero;
    if constexpr (ZERO >= 2) return fused(pair, factor.scale, zero);
    else if constexpr (HAS_REST) return fused(pair, factor.scale, product_of(pair, factor.rest));
    else return product_of(pair, factor.scale);
}

// ---- integers and float8 --------------------------------------------------------------------------------------------

// Whether scales are multiplied into FACTOR and OFFSET, not into each weight. Both are 2**-40 of what they are else:
// products with scales below 2**40 are finite, and those with scales from 2**-80 on keep all bits.
static constexpr bool FOLDED = ROUNDED && !ZERO && !SCALED && DTYPE == BF16;

// Bits below the upper and the lower of two codes in their halves.
static constexpr int HIGHER = BITS <= 4 ? BITS : 0, LOWER = BITS > 4 ? 8 - BITS : 0;
// A number of DTYPE whose lowest bit counts 1, which codes are added to by their bits; or 0: see two_of.
static constexpr uint32 BASE = DTYPE == FP16 ? 0x6400 : ZERO > 1 ? 0x4300 : 0;

// A group's scale, and what unpacking multiplies two adjacent codes by, with FOLDED, and adds to them.
struct Group {
    float scale;
    uint32 factor, offset;
};

// The thread's place among the four of a row: which bytes of eight codes it selects, and what it multiplies them by and
// adds. The factor differs for an upper nibble, which is 16 times as large. The offset is hidden from the compiler, which
// would move a known constant to a register at each use.
struct Place {
    uint32 selector, factor, offset, shift;
    uint32 selectors[4];  // of a stream, for eight codes that begin at each byte of a word
    bool late;            // whether it is one of the last two threads
    MEMBER Place(int t, uint32 factor, uint32 offset) : factor(factor), offset(offset), late(t > 1) {
        const int bit = (2 * t + 1) * BITS - HIGHER;  // of eight codes, moved to the lowest one of the upper half
        shift = bit % 8;
        selector = CODES == INT4   ? t * 0x0101
                   : CODES == INT8 ? t * 0x0202 + 0x0100
                                   : t * (DTYPE == FP16 ? 0x0022 : 0x2222) + (DTYPE == FP16 ? 0x0010 : 0x9180);
        in_use(selector), in_use(this->factor), in_use(shift);
#pragma unroll
        for (int i = 0; CODES == STREAM && i < 4; ++i) {  // modulo 8, from the byte of `bit` on
            selectors[i] = ((bit / 8 + i) % 8 * 0x1111 + (LOWER ? 0x1007 : 0x1010)) & 0x7777;
            in_use(selectors[i]);
        }
    }
};

// The largest magnitude of E4M3's codes, each read as a bfloat16, that is not NaN.
static constexpr uint32 LARGEST = 0x07e0;

// Two adjacent codes of eight along K, minus the zero point, times UNIT: byte `t` of a word at 4 bits, bytes 2 t and 2
// t + 1 of two words at 8 bits. In bf16 an integer in the lowest 8 bits is a (subnormal) multiple of 2**-133, exactly.
// In fp16 it is or-ed into 1024 and adds to it; in bf16, with zero points that are values, into 128. E4M3 codes are
// numbers already, 2**-120 of their own, and `raw` gets their bits.
DEVICE uint32 two_of(uint32 low, uint32 high, const Place &place, const Group &group, uint32 scale, uint32 &raw) {
    uint32 x = permute(low, BITS == 4 ? 0 : high, place.selector);
    if constexpr (CODES == E4M3) {
        if constexpr (DTYPE == FP16) return from_e4m3x2(x & 0xffff);
        raw = x = x << 4 & 0x87f087f0;  // from bytes whose sign fills the halves
        return RELATIVE ? x : multiply_bf16x2(x, place.factor);
    }
    if constexpr (BITS == 4) x = BASE ? masked_or(x, 0x00f0000f, BASE * 0x10001) : x & 0x00f0000f;
    else x = masked_xor(x, 0x00ff00ff, BASE * 0x10001 | (UNSIGNED ? 0 : 0x00800080));
    x = fused(x, FOLDED ? group.factor : place.factor, group.offset);
    return ROUNDED && !FOLDED ? product_of(x, scale) : x;
}

// The same for the eight codes of a stream that begin at bit 8 * BITS * j of the words. Each half gets two bytes, and one
// shift moves both codes. Up to 4 bits the halves have the same bytes, and the upper code ends above the lower one's
// bits. Above, the upper half begins a byte later: its code ends in the lowest of 8 bits, the lower one in the highest.
template <int WORDS>
DEVICE uint32 two_of_stream(const uint32 (&words)[WORDS], int j, const Place &place, const Group &group, uint32 scale) {
    const int first = BITS * j / 4, byte = BITS * j % 4;
    uint32 low = words[first], high = words[min(first + 1, WORDS - 1)];
    if (byte + BITS > 8 && place.late) low = words[min(first + 2, WORDS - 1)];  // selectors count bytes modulo 8
    constexpr uint32 MASK = (1u << BITS) - 1, BOTH = MASK << 16 + HIGHER | MASK << LOWER;
    uint32 x = permute(low, high, place.selectors[byte]) >> place.shift;
    x = BASE ? masked_or(x, BOTH, BASE * 0x10001) : x & BOTH;
    x = fused(x, FOLDED ? group.factor : place.factor, group.offset);
    return ROUNDED && !FOLDED && !SCALED ? product_of(x, scale) : x;
}
