// The codes of a weight of 1 to 8 bits in registers, in every format: how a lane reads, unpacks and scales them. The
// macros CODES, BITS, VALUES, GROUP, SCALING, X, SCALE and ZERO are those of weight_mm_decode_sm90.cu, which this file
// comes before.

enum { BF16, FP16, FP32, E8M0, E4M3, INT, TABLE, E2M1, INT8, UINT8 };
enum { BY_UNIT, BY_COLUMN, IN_CODES };
enum { NONE, CODE, UNSIGNED, VALUE, SILU, GELU_TANH };

static constexpr bool IS_STREAM = CODES == INT || CODES == TABLE || CODES == E2M1;
static constexpr int WORD = IS_STREAM ? 8 : 4;  // codes that a lane unpacks at once, a word: BITS bytes, or 4
static constexpr int CHUNK = 16 * WORD, CHUNK_BYTES = CHUNK * BITS / 8;
static constexpr int SPAN = GROUP == 0 ? 1 << 30 : GROUP;  // codes along k with one scale
static constexpr int UNIT = SCALING != BY_UNIT || SPAN % CHUNK == 0 ? CHUNK
                            : SPAN % (CHUNK / 2) == 0               ? CHUNK / 2
                                                                    : CHUNK / 4;  // scaled at once
static constexpr int UNITS = CHUNK / UNIT, VECTOR = 4 / UNITS;  // adjacent words of a unit that a lane reads
static constexpr int PAIRS = WORD / 2;                             // registers of x for a word
static constexpr int SCALE_SIZE = SCALE == FP32 ? 4 : SCALE == E8M0 || SCALE == E4M3 ? 1 : 2;
static constexpr int ZERO_SIZE = ZERO == NONE ? 0 : ZERO == VALUE ? SCALE_SIZE : 1;
static constexpr int MIDDLE = 1 << (BITS - 1);
static constexpr bool IS_BF16_E4M3 = CODES == E4M3 && X == BF16;
static constexpr bool IS_INTEGER = CODES == INT || CODES == INT8 || CODES == UINT8;
// Whether mma multiplies the bits of codes as numbers, which SCALES_X makes up for: in bf16 an integer in the lowest 8 bits
// is a multiple of 2^-133, exactly, whether it is subnormal or not. The bits of E2M1 stand for 2^-126 of a number, and
// those of E4M3 for 2^-120. For 16 tokens of 8 bits registers are too few for the sums of x that integers then need.
static constexpr bool AS_BITS = SCALES_X && X == BF16 && SCALING != IN_CODES && (BITS < 8 || TOKENS <= 8) &&
                                (IS_INTEGER ? UNITS == 1 : CODES == E2M1 || CODES == E4M3);
// Whether mma multiplies the codes + an offset (8 at 4 bits, or 136 without AS_BITS), and (offset + zero point) times the
// sum of x is subtracted from the unit's sum. The only loss is that of float32 sums that are larger by this offset.
// Otherwise the offset is subtracted from each code.
static constexpr bool FOLD = IS_INTEGER && X == BF16 && UNITS == 1 && SCALING != IN_CODES && (CODES == INT || AS_BITS);
static constexpr int TABLE_STEP = BITS == 4 ? 256 : 128;  // bytes from pair to pair of a table
// Whether a product with the scale also makes numbers of the bits that `e2m1_of` moves.
static constexpr bool IS_MOVED = CODES == E2M1 && SCALING == IN_CODES && SCALE == E4M3;
static constexpr int TABLE_BYTES = CODES == TABLE || LOOK_UP ? TABLE_STEP << 2 * BITS : 0;
static_assert(CODES == E2M1 || !LOOK_UP, "");
#ifdef VALUES
__constant__ unsigned short NUMBERS[1 << BITS] = {VALUES};
#endif

// ---- unpacking ------------------------------------------------------------------------------------------------------

DEVICE uint32 subtract(uint32 a, uint32 b) {
    if constexpr (X == FP16) return subtract_half2(a, b);
    else return subtract_bf16x2(a, b);
}

// The lowest bit, in a half register, of the codes of pair `i`: where `unpack` takes them without a shift.
DEVICE constexpr int place_of(int i) {
    if (CODES != INT) return 0;
    if (AS_BITS && (BITS == 2 || BITS == 4)) return BITS * i % 8;
    return BITS == 1 ? i : BITS == 2 ? i % 3 * 2 : BITS == 3 ? i % 2 * 3 : 0;
}

// A number of X whose bit `place` counts 1, in both halves; `unpack` puts the codes of INT into its lowest bits.
DEVICE constexpr uint32 base_of(int place) {
    if (AS_BITS) return 0;
    return (X == FP16 ? 25 - place << 10 : 134 - place << 7) * 0x10001u;
}

// The offset that `unpack` subtracts from pair `i`, in both halves of a register. For INT it is the base + the middle of
// the codes + the zero point; for 8 bits in fp16: 1024 + 128 + the zero point. 8 bits in bf16 need only the zero point,
// converted.
DEVICE uint32 offset_of(int zero_point, int i) {
    if constexpr (CODES == INT || AS_BITS) return base_of(place_of(i)) + ((zero_point + MIDDLE) * 0x10001 << place_of(i));
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
        pairs[0] = pairs[1] = pairs[2] = low, pairs[3] = AS_BITS ? low : low >> 6;
    } else if constexpr (BITS == 3) {
        const uint32 both = permute(low, low << 4, 0x7610);
        pairs[0] = pairs[1] = both, pairs[2] = pairs[3] = both >> 6;
    } else if constexpr (BITS == 4) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) pairs[i] = low >> (AS_BITS ? i / 2 * 8 : 4 * i);
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

// The numbers of two codes of E2M1 in the halves of a register, both at bit 0 or 4; `factor`: 0x1040 or 0x104. A product
// moves the sign and the other bits to those of bf16, which are 2^-126 of the number.
DEVICE uint32 e2m1_of(uint32 codes, uint32 factor) {
    const uint32 moved = codes * factor & 0x81c081c0;
    return IS_MOVED || AS_BITS ? moved : multiply_bf16x2(moved, 0x7e807e80);
}

// The numbers of the two codes of 4 bits in byte `i`, from the table of `write_table`.
DEVICE uint32 looked_up(const unsigned char *table, uint32 word, int i) {
    return *(const uint32 *)(table + permute(word, threadIdx.x % 32 * 4, 0x5504 | i << 4));
}

// A word's codes minus their zero point, in the pairs of `order_x`. `table`: that of `write_table`.
DEVICE void unpack(uint32 (&pairs)[PAIRS], Word word, int zero_point, const unsigned char *table) {
    if constexpr (CODES == INT) {
        align(pairs, word);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const uint32 mask = ((1u << BITS) - 1) * 0x10001u << place_of(i);
            pairs[i] = masked_or(pairs[i], mask, base_of(place_of(i)));
            if constexpr (!FOLD) pairs[i] = subtract(pairs[i], offset_of(zero_point, i));
        }
    } else if constexpr (CODES == E2M1) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const uint32 own = LOOK_UP ? word.low : word.low >> i / 2 * 8;
            if (LOOK_UP && i >= 2) pairs[i] = looked_up(table, word.low, 2 * i - 3);
            else pairs[i] = i % 2 ? e2m1_of(own & 0x00f000f0, 0x104) : e2m1_of(own & 0x000f000f, 0x1040);
        }
    } else if constexpr (CODES == TABLE) {
        constexpr uint32 mask = (1u << 2 * BITS) - 1 << 7;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int shift = 2 * BITS * i - 7;
            const uint32 moved = shift < 0 ? word.low << -shift : word.low >> (shift < 0 ? 0 : shift);
            if constexpr (BITS == 4) pairs[i] = looked_up(table, word.low, i);
            else pairs[i] = *(const uint32 *)(table + masked_or(moved, mask, threadIdx.x % 32 * 4));
        }
    } else if constexpr (IS_BF16_E4M3) {  // the bits moved to those of bf16 are 2^-120 of the number
        const uint32 own = word.low;
        pairs[0] = masked_or(own << 8, 0x80008000, own << 4 & 0x07f007f0);
        pairs[1] = masked_or(own, 0x80008000, own >> 4 & 0x07f007f0);
        if constexpr (!AS_BITS)
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
            } else if constexpr (AS_BITS) {
                pairs[i] = masked_xor(own, 0x00ff00ff, 0x00800080);
            } else {  // (128 + the low 7 bits) - (128, or 256 with the sign bit, which is the exponent's last bit)
                pairs[i] = subtract(masked_or(own, 0x007f007f, 0x43004300), masked_or(own, 0x00800080, 0x43004300));
                if constexpr (ZERO == CODE || ZERO == UNSIGNED) pairs[i] = subtract(pairs[i], offset);
            }
        }
    }
}

// Writes the numbers of every two adjacent codes to shared memory, once for each lane, so that lanes that look up
// different codes read different banks. The first `warps` warps of the block write it.
DEVICE void write_table(unsigned char *table, int warps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
    for (int i = warp; i < 1 << 2 * BITS; i += warps) {
        uint32 pair = e2m1_of((i & 15) | i >> 4 << 16, 0x1040);
#ifdef VALUES
        pair = NUMBERS[i & (1 << BITS) - 1] | (uint32)NUMBERS[i >> BITS] << 16;
#endif
        ((uint32 *)(table + i * TABLE_STEP))[lane] = pair;
    }
}

// ---- reading --------------------------------------------------------------------------------------------------------

// The first code of word `word` of a lane's four words in a chunk.
DEVICE int word_at(int word, int t) { return word / VECTOR * UNIT + (t * VECTOR + word % VECTOR) * WORD; }

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

// A scale, or a zero point that is a value, from its bits.
DEVICE float number_of(uint32 bits) {
    if constexpr (SCALE == FP32) return bits_float(bits);
    else if constexpr (SCALE == FP16) return from_half(bits);
    else if constexpr (SCALE == BF16) return bits_float(bits << 16);
    else if constexpr (SCALE == E4M3) return from_half(from_e4m3x2(bits) & 0xffff);
    else {  // 0 is 2^-127, a subnormal number; 255 gives infinity, which times 0 is NaN
        const float power = bits_float(max(bits << 23, 0x400000u));
        return fma_exactly(power, 0.0f, power);
    }
}

DEVICE float number_at(const unsigned char *numbers, int i) {
    if constexpr (SCALE_SIZE == 4) return number_of(((const uint32 *)numbers)[i]);
    else if constexpr (SCALE_SIZE == 2) return number_of(((const unsigned short *)numbers)[i]);
    else return number_of(numbers[i]);
}

// With BY_COLUMN: the scales of a lane's two columns, which belong to one group or, for one token, to adjacent ones. 0
// where the group does not exist.
DEVICE void numbers_at(float (&found)[2], const unsigned char *numbers, int i, bool exists, bool next_exists) {
    uint32 bits[2] = {};
    if constexpr (PAIRED && SCALE_SIZE == 4) {  // `i` and the number of groups of a row are even
        const uint2 both = ((const uint2 *)numbers)[i / 2];
        bits[0] = both.x, bits[1] = both.y;
    } else if constexpr (PAIRED && SCALE_SIZE == 2) {
        const uint32 both = ((const uint32 *)numbers)[i / 2];
        bits[0] = both & 0xffff, bits[1] = both >> 16;
    } else if constexpr (PAIRED) {
        const uint32 both = ((const unsigned short *)numbers)[i / 2];
        bits[0] = both & 0xff, bits[1] = both >> 8;
    } else {
        const float first = number_at(numbers, exists ? i : 0);  // a load in place of a branch
        const float next = TOKENS == 1 ? number_at(numbers, next_exists ? i + 1 : 0) : first;
        found[0] = exists ? first : 0.0f, found[1] = next_exists ? next : 0.0f;
        return;
    }
    if constexpr (SCALE == E8M0) {  // both at once, as bf16; see number_of
        const uint32 both = larger_halves(permute(bits[0] | bits[1] << 8, 0, 0x1404) >> 1, 0x00400040);
        const float low = bits_float(both << 16), high = bits_float(both & 0xffff0000);
        found[0] = exists ? fma_exactly(low, 0.0f, low) : 0.0f;
        found[1] = next_exists ? fma_exactly(high, 0.0f, high) : 0.0f;
        return;
    }
    found[0] = exists ? number_of(bits[0]) : 0.0f, found[1] = next_exists ? number_of(bits[1]) : 0.0f;
}

// A zero point that is a code, counted from the middle of the codes; 0 without one.
DEVICE int zero_at(const unsigned char *zero_points, int i) {
    if constexpr (ZERO == CODE) return ((const signed char *)zero_points)[i];
    else if constexpr (ZERO == UNSIGNED) return zero_points[i] - MIDDLE;
    else return 0;
}

// E4M3 in bf16: NaN would be 480. Collects a bit of each of a word's codes that is NaN.
DEVICE void collect(uint32 &bad, uint32 codes) { bad |= (codes & 0x7f7f7f7f) + 0x01010101; }

// ---- the x of a product ---------------------------------------------------------------------------------------------

// Whether `unpack` gives codes in the order of memory. Otherwise it gives (k, k + 4), (k + 1, k + 5), … of eight, with
// LOOK_UP (k, k + 4), (k + 1, k + 5), (k + 2, k + 3), (k + 6, k + 7), and (k, k + 2), (k + 1, k + 3) of four.
static constexpr bool IN_ORDER = CODES == TABLE || (CODES == E4M3 && X == FP16);

// Loads the x of one token that belongs to a word, in the order of memory; 0 beyond the last k. BY_WORD: whether rows of x
// begin at multiples of 16 bytes.
template <bool BY_WORD>
DEVICE void load_x(uint32 (&two)[PAIRS], const unsigned short *x, int first, int k) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) two[i] = 0;
    if constexpr (BY_WORD) {
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

// Pairs x in the order in which `unpack` gives codes, unless that is its own.
template <bool IS_SAME>
DEVICE void order_x(uint32 (&pairs)[PAIRS]) {
    if constexpr (IS_SAME) return;
    uint32 two[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) two[i] = pairs[i];
    if constexpr (LOOK_UP) {
        pairs[0] = permute(two[0], two[2], 0x5410), pairs[1] = permute(two[0], two[2], 0x7632);
        pairs[2] = two[1], pairs[3] = two[3];
        return;
    }
#pragma unroll
    for (int i = 0; i < PAIRS / 2; ++i) {
        pairs[2 * i] = permute(two[i], two[i + PAIRS / 2], 0x5410);
        pairs[2 * i + 1] = permute(two[i], two[i + PAIRS / 2], 0x7632);
    }
}

DEVICE void multiply(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    if constexpr (X == FP16) warp_multiply_half(sums, a0, a1, a2, a3, b0, b1);
    else warp_multiply_bf16(sums, a0, a1, a2, a3, b0, b1);
}
