// out[m, n] = sum_k x[m, k] * value(code[n, k]), for many tokens.
//
// A panel is PANEL rows by DEPTH columns of the weight, decoded into the first-level cache with the rows next to each
// other. It is multiplied by all tokens, TOKENS at a time, in registers: one vector of the panel and one number of x,
// broadcast, give the products of 16 rows. Sums of a panel's rows stay in the second-level cache.
//
// A `Kind` says what a panel holds:
//
// Values   float32 values of the weight, a column a step
// Pairs    numbers in bfloat16, without their scales, two columns a step, for processors that multiply such pairs. Sums
//          of a group are multiplied by its scale in float32, so nothing is rounded.

typedef uint32_t UnalignedWord16 __attribute__((vector_size(64), aligned(1)));
typedef uint16_t Half16 __attribute__((vector_size(32)));
typedef uint16_t UnalignedHalf16 __attribute__((vector_size(32), aligned(2)));
typedef uint16_t Half32 __attribute__((vector_size(64)));

static constexpr int PER_WORD = 32 / BITS, CHUNK = 16 * PER_WORD;

// Vectors of 16 rows in a panel, and what a register holds of a vector.
#ifdef __AVX512F__
static constexpr int WIDE = 4;
typedef Float16 FloatPart;
#else
static constexpr int WIDE = 1;
typedef Floats FloatPart;
#endif
static constexpr int PANEL = 16 * WIDE, TOKENS = 6, DEPTH = BITS < 3 ? CHUNK : 128;
#ifdef __AMX_BF16__
static constexpr int MOST_DEPTH = BITS < 3 ? CHUNK : 256;  // fewer sums are moved between tiles and memory
#else
static constexpr int MOST_DEPTH = DEPTH;
#endif

// Memory that a thread keeps for its next product.
struct Kept {
    void* memory = nullptr;
    int64_t size = 0;
    ~Kept() { __builtin_free(memory); }
    void* bytes(int64_t wanted) {
        if (wanted > size) {
            __builtin_free(memory);
            size = (wanted + 4095) / 4096 * 4096;
            memory = aligned_alloc(4096, size);
        }
        return memory;
    }
};
static thread_local Kept kept_x, kept_sums;

// ---- numbers of 16 bits ----------------------------------------------------------------------------------------------

INLINE Float16 of_bfloat16(const uint16_t* p) {
    return (Float16)(__builtin_convertvector(*(const UnalignedHalf16*)p, Word16) << 16);
}

static inline float of_bfloat16_one(uint16_t half) { return bits_float((uint32_t)half << 16); }

static inline uint16_t to_bfloat16_one(float number) {
    const uint32_t bits = float_bits(number);
    if (number != number) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE void to_bfloat16(uint16_t* p, Float16 numbers) {
    const Word16 bits = (Word16)numbers, rounded = bits + 0x7fff + (bits >> 16 & 1);
    const Word16 is_nan = (Word16)(numbers != numbers);
    *(UnalignedHalf16*)p = __builtin_convertvector(((rounded & ~is_nan) | (0x7fc00000u & is_nan)) >> 16, Half16);
}

// x and the result of a product, float32 or bfloat16.
struct Operands {
    const void* x;
    void* out;
    const void* bias;  // of the type of x; may be null
    int64_t tokens, columns, rows;  // of x, and of the result: the weight's may be padded
    bool halves;
};

// How many of `count` columns from k on x has; the weight may have more.
INLINE int64_t own_columns(const Operands& given, int64_t k, int64_t count) {
    const int64_t left = given.columns > k ? given.columns - k : 0;
    return left < count ? left : count;
}

static inline void write_one(const Operands& given, int64_t m, int64_t n, float sum) {
    const int64_t at = m * given.rows + n;
    if (n >= given.rows) return;
    if (given.halves) {
        if (given.bias) sum += of_bfloat16_one(((const uint16_t*)given.bias)[n]);
        ((uint16_t*)given.out)[at] = to_bfloat16_one(sum);
    } else {
        if (given.bias) sum += ((const float*)given.bias)[n];
        ((float*)given.out)[at] = sum;
    }
}

INLINE void write(const Operands& given, int64_t m, int64_t n, Float16 sums) {
    const int64_t at = m * given.rows + n, left = given.rows - n;
    if (left >= 16 && given.halves) {
        if (given.bias) sums += of_bfloat16((const uint16_t*)given.bias + n);
        to_bfloat16((uint16_t*)given.out + at, sums);
    } else if (left >= 16) {
        if (given.bias) sums += *(const UnalignedFloat16*)((const float*)given.bias + n);
        *(UnalignedFloat16*)((float*)given.out + at) = sums;
    } else {
        for (int i = 0; i < left; i++) write_one(given, m, n + i, sums[i]);
    }
}

// ---- words of 16 rows ------------------------------------------------------------------------------------------------

// 16 words of each of 16 rows: all[i] becomes the i-th words of all rows.
INLINE void load_turned(const uint8_t* const* rows, int64_t byte, Word16* all) {
#ifdef HAS_SHUFFLE
    Word16 a[16], b[16];
    UNROLL for (int i = 0; i < 8; i++) {
        a[i] = *(const UnalignedWord16*)(rows[i] + byte);
        a[i + 8] = *(const UnalignedWord16*)(rows[i + 8] + byte);
    }
    const Word16 low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    const Word16 high = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
    typedef uint64_t Long8 __attribute__((vector_size(64)));
    const Long8 low2 = {0, 8, 2, 10, 4, 12, 6, 14}, high2 = {1, 9, 3, 11, 5, 13, 7, 15};
    const Word16 even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const Word16 odd = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    UNROLL for (int i = 0; i < 8; i++) {
        b[2 * i] = __builtin_shuffle(a[2 * i], a[2 * i + 1], low);
        b[2 * i + 1] = __builtin_shuffle(a[2 * i], a[2 * i + 1], high);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int j = 0; j < 2; j++) {
            const Long8 first = (Long8)b[4 * i + j], second = (Long8)b[4 * i + j + 2];
            a[4 * i + 2 * j] = (Word16)__builtin_shuffle(first, second, low2);
            a[4 * i + 2 * j + 1] = (Word16)__builtin_shuffle(first, second, high2);
        }
    }
    // a[4 * i + c]: of rows 4 * i .. 4 * i + 3, words c, c + 4, c + 8 and c + 12
    UNROLL for (int c = 0; c < 4; c++) {
        UNROLL for (int i = 0; i < 2; i++) {
            b[8 * i + c] = __builtin_shuffle(a[8 * i + c], a[8 * i + 4 + c], even);
            b[8 * i + 4 + c] = __builtin_shuffle(a[8 * i + c], a[8 * i + 4 + c], odd);
        }
    }
    // b[8 * i + c]: of rows 8 * i .. 8 * i + 7, words c and c + 8; b[8 * i + 4 + c]: words c + 4 and c + 12
    UNROLL for (int c = 0; c < 8; c++) {
        all[c] = __builtin_shuffle(b[c], b[8 + c], even);
        all[c + 8] = __builtin_shuffle(b[c], b[8 + c], odd);
    }
#else
    for (int n = 0; n < 16; n++) {
        uint32_t words[16];
        memcpy(words, rows[n] + byte, sizeof(words));
        for (int i = 0; i < 16; i++) ((uint32_t*)(all + i))[n] = words[i];
    }
#endif
}

#if EXPONENT && defined(__AVX512BW__)
#define HAS_FLOAT8_PAIRS
// The bfloat16 numbers of all codes without a sign.
struct Float8Table {
    Half32 parts[4];
    Float8Table() {
        const Denormals denormals;
        for (int i = 0; i < 128; i++) ((uint16_t*)parts)[i] = (uint16_t)(float_bits(number(i)) >> 16);
    }
    // The numbers of the lower codes of each 16 bits.
    INLINE_MEMBER Word16 operator()(Word16 codes) const {
        Half32 low = (Half32)codes, high = (Half32)codes;  // of codes below 64, and of others, by 6 bits of the index
        __asm__("vpermi2w %2, %1, %0" : "+v"(low) : "v"(parts[0]), "v"(parts[1]));
        __asm__("vpermi2w %2, %1, %0" : "+v"(high) : "v"(parts[2]), "v"(parts[3]));
        typedef int16_t Signed __attribute__((vector_size(64)));
        const Half32 is_high = (Half32)((Signed)((Half32)codes << 9) >> 15);
        return (Word16)((low & ~is_high) | (high & is_high) | ((Half32)codes << 8 & (uint16_t)0x8000));
    }
};
static const Float8Table float8_table;
#endif

// The j-th code of each word, as a number.
INLINE Float16 number_of_word(Word16 words, int j) {
#if defined(HAS_TABLE)
    return __builtin_shuffle(numbers_of_all(), (Int16)(words >> (uint32_t)(j * BITS)));
#elif BITS == 8 && !EXPONENT && !defined(TABLE)
    // The code, plus 128 if it has a sign, as bits of 2^23 (codes 0 and 2) or 2^15 (1 and 3) and more.
    const Word16 codes = j < 2 ? words : words >> 16;
    const uint32_t mask = j % 2 ? 0xff00 : 0xff, sign = LOW < 0 ? 0x8080 & mask : 0;
    const float base = j % 2 ? 0x1p15f : 0x1p23f;
    return (Float16)((codes & mask) ^ (float_bits(base) | sign)) - (base + (LOW < 0 ? 128 : 0));
#else
    return numbers_of<Float16>((Int16)(words >> (uint32_t)(j * BITS) & (uint32_t)MASK));
#endif
}

// Columns k to k + 15 of 16 rows of floats, MOST_DEPTH apart: turned[i] becomes column k + i.
INLINE void turn_rows(const float* rows, int64_t k, Word16* turned) {
    const uint8_t* all[16];
    for (int i = 0; i < 16; i++) all[i] = (const uint8_t*)(rows + i * MOST_DEPTH);
    load_turned(all, k * 4, turned);
}

struct ToRows {
    float* to;  // [16, MOST_DEPTH]
    int64_t from;
    INLINE_MEMBER void operator()(int r, int64_t k, float value) { to[r * MOST_DEPTH + k - from] = value; }
    INLINE_MEMBER void operator()(int r, int64_t k, Floats values) { *(Unaligned*)(to + r * MOST_DEPTH + k - from) = values; }
#ifdef HAS_TABLE
    INLINE_MEMBER void operator()(int r, int64_t k, Float16 values) { *(UnalignedFloat16*)(to + r * MOST_DEPTH + k - from) = values; }
#endif
};

// 16 rows of a weight, of which some may be beyond its last.
struct Strip {
    const Weight& weight;
    int64_t first, count;
    const uint8_t* codes[16];
    int64_t scales[16];  // indices of each row's first scale

    Strip(const Weight& weight, int64_t n) : weight(weight), first(n) {
        const Layout& l = *weight.layout;
        count = l.rows - n < 16 ? l.rows - n : 16;
        for (int i = 0; i < 16 && count > 0; i++) {
            const int64_t row = n + (i < count ? i : count - 1);
            codes[i] = weight.codes + row * l.row_bytes;
            scales[i] = first_group(l, row);
        }
    }
    // The scales of all groups, or their zero points: to[group * WIDE].
    template <typename At>
    void turned(At at, Float16* to) const {
        const int64_t groups = weight.layout->groups;
        for (int64_t g = 0; g < groups; g += 16) {
            const int64_t left = groups - g < 16 ? groups - g : 16;
            alignas(64) float found[16][16] = {};
            const uint8_t* all[16];
            for (int i = 0; i < 16; i++) {
                for (int64_t j = 0; j < left; j++) found[i][j] = at(scales[i] + g + j);
                all[i] = (const uint8_t*)found[i];
            }
            Word16 words[16];
            load_turned(all, 0, words);
            for (int64_t j = 0; j < left; j++) to[(g + j) * WIDE] = (Float16)words[j];
        }
    }
    // The words from column k on (`load_turned`). Asks for those of the next block of columns, or of the next panel.
    INLINE_MEMBER void words(int64_t k, Word16* to) const {
        const Layout& l = *weight.layout;
        const int64_t next = k + DEPTH < l.columns ? (k + DEPTH) * BITS / 8 : (k + DEPTH - l.columns) * BITS / 8 + PANEL * l.row_bytes;
        for (int i = 0; i < 16; i++) __builtin_prefetch(codes[i] + next);
        load_turned(codes, k * BITS / 8, to);
    }
    // Columns k to end, of any format, row by row.
    template <bool SCALED>
    void rows(int64_t k, int64_t end, float* to) const {
        ToRows sink = {to, k};
        int n = 0;
        for (; n + 4 <= count; n += 4, sink.to += 4 * MOST_DEPTH) decode_columns<4, SCALED>(weight, first + n, k, end, sink);
        for (; n < count; n++, sink.to += MOST_DEPTH) decode_columns<1, SCALED>(weight, first + n, k, end, sink);
    }
};

// ---- what a panel holds ----------------------------------------------------------------------------------------------

struct Values {
    typedef float Unit;
    typedef Float16 Vector;
    static constexpr int COLUMNS = 1, DEPTH = ::DEPTH;  // of a unit, and of a panel
    static constexpr bool SCALED = true;

    typedef FloatPart Part;
    static INLINE_MEMBER Part broadcast(Unit x) { return x - Part{}; }  // 0 + x would add
    static INLINE_MEMBER Part added(Part sum, Part x, Part number) { return sum + x * number; }

    // One token's columns from k on.
    static void take_x(const Operands& given, int64_t m, int64_t k, int64_t count, bool, Unit* to) {
        const int64_t own = own_columns(given, k, count);
        if (given.halves) {
            const uint16_t* from = (const uint16_t*)given.x + m * given.columns + k;
            for (int64_t i = 0; i < own; i++) to[i] = of_bfloat16_one(from[i]);
        } else {
            memcpy(to, (const float*)given.x + m * given.columns + k, own * sizeof(float));
        }
        for (int64_t i = own; i < count; i++) to[i] = 0;
    }
    static void take_words(const Strip& strip, const Float16* scales, const Float16* zeros, int64_t k, int64_t end, Vector* to) {
        const Layout& l = *strip.weight.layout;
        int64_t group = -1;
        Float16 scale = {}, zero = {};
#ifdef HAS_FLOAT8_PAIRS
        const Float8Table table = float8_table;
#endif
        for (; k < end; k += CHUNK) {
            Word16 words[16];
            strip.words(k, words);
            for (int w = 0; w < 16; w++, to += PER_WORD * WIDE) {
                const int64_t next = (k + w * PER_WORD) / l.group;
                if (next != group) group = next, scale = scales[group * WIDE], zero = ZERO ? zeros[group * WIDE] : zero;
#ifdef HAS_FLOAT8_PAIRS
                UNROLL for (int j = 0; j < 2; j++) {
                    const Word16 both = table(words[w] >> (uint32_t)(8 * j));
                    to[j * WIDE] = (Float16)(both << 16) * scale;
                    to[(j + 2) * WIDE] = (Float16)(both & 0xffff0000u) * scale;
                }
                continue;
#endif
                UNROLL for (int j = 0; j < PER_WORD; j++) {
                    const Float16 number = number_of_word(words[w], j);
#if ZERO == 2
                    to[j * WIDE] = (number - (float)MID) * scale + zero;
#else
                    to[j * WIDE] = (ZERO ? number - zero : number) * scale;
#endif
                }
            }
        }
    }
    static void take_rows(const float* rows, int64_t columns, Vector* to) {
        for (int64_t k = 0; k < columns; k += 16) {
            Word16 turned[16];
            turn_rows(rows, k, turned);
            for (int i = 0; i < 16 && k + i < columns; i++) to[(k + i) * WIDE] = (Float16)turned[i];
        }
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(HAS_SHUFFLE)
#define HAS_PAIRS

// Where the numbers of 32 columns stand in x, in the order of the pairs of words.
static Half32 order_of_words() {
    constexpr int HALF = PER_WORD / 2;
    Half32 found = {};
    for (int i = 0; i < 16 && HALF; i++) {
        const int first = i / (HALF ? HALF : 1) * PER_WORD + i % (HALF ? HALF : 1);
        found[2 * i] = (uint16_t)first, found[2 * i + 1] = (uint16_t)(first + HALF);
    }
    return found;
}
static const Half32 ORDER_OF_WORDS = order_of_words();  // a static of a member is one for all loaded formats

struct Pairs {
    typedef uint32_t Unit;
    typedef Word16 Vector;
    static constexpr int COLUMNS = 2, DEPTH = MOST_DEPTH;
    static constexpr bool SCALED = false;

    typedef Word16 Part;
    static INLINE_MEMBER Part broadcast(Unit x) { return Part{} + x; }
    static INLINE_MEMBER Float16 added(Float16 sum, Vector x, Vector number) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(number), "v"(x));
        return sum;
    }
    static INLINE_MEMBER Vector both(Float16 first, Float16 second) {
        return ((Word16)first >> 16) | ((Word16)second & 0xffff0000u);
    }

    // In words, code j of a word is beside code j + PER_WORD / 2.
    static void take_x(const Operands& given, int64_t m, int64_t k, int64_t count, bool in_words, Unit* to) {
        const uint16_t* from = (const uint16_t*)given.x + m * given.columns + k;
        const int64_t own = own_columns(given, k, count);
        constexpr int HALF = PER_WORD / 2;
        int64_t i = 0;
        if (in_words) {
            typedef Half32 Unaligned32 __attribute__((aligned(2)));
            typedef Word16 UnalignedPairs __attribute__((aligned(4)));
            for (; i + 32 <= own; i += 32, from += 32, to += 16)
                *(UnalignedPairs*)to = looked_up(*(const Unaligned32*)from, (Word16)ORDER_OF_WORDS);
            for (; i + PER_WORD <= own; i += PER_WORD, from += PER_WORD, to += HALF)
                UNROLL for (int j = 0; j < HALF; j++) to[j] = from[j] | (uint32_t)from[j + HALF] << 16;
            if (i < own) {
                uint16_t last[PER_WORD] = {};
                memcpy(last, from, (own - i) * 2);
                for (int j = 0; j < HALF; j++) *to++ = last[j] | (uint32_t)last[j + HALF] << 16;
                i += PER_WORD;
            }
        } else {
            for (; i < own; i += 2, from += 2) *to++ = from[0] | (i + 1 < own ? (uint32_t)from[1] << 16 : 0);
        }
        for (; i < count; i += 2) *to++ = 0;
    }
    static void take_words(const Strip& strip, const Float16* scales, const Float16* zeros, int64_t k, int64_t end, Vector* to) {
        constexpr int HALF = PER_WORD / 2;
        const Layout& l = *strip.weight.layout;
        int64_t group = -1;
        Float16 zero = {};
#if BITS <= 4
        const Half32 table = halves_of_codes();
#elif defined(HAS_FLOAT8_PAIRS)
        const Float8Table table = float8_table;
#endif
        for (; k < end; k += CHUNK) {
            Word16 words[16];
            strip.words(k, words);
            for (int w = 0; w < 16; w++, to += HALF * WIDE) {
#if ZERO
                const int64_t next = (k + w * PER_WORD) / l.group;
                if (next != group) group = next, zero = zeros[group * WIDE];
#endif
                UNROLL for (int j = 0; j < HALF; j++) {
#if BITS <= 4 && !ZERO
                    to[j * WIDE] = looked_up(table, words[w] >> (uint32_t)(j * BITS));
#elif defined(HAS_FLOAT8_PAIRS)
                    to[j * WIDE] = table(words[w] >> (uint32_t)(8 * j));
#else
                    to[j * WIDE] = both(number_of_word(words[w], j) - zero, number_of_word(words[w], j + HALF) - zero);
#endif
                }
            }
        }
    }
#if BITS <= 4
    static INLINE_MEMBER Half32 halves_of_codes() {
        const Half16 halves = __builtin_convertvector((Word16)numbers_of_all() >> 16, Half16);
        Half32 found;
        memcpy(&found, &halves, 32);
        memcpy((char*)&found + 32, &halves, 32);
        return found;
    }
#endif
    // By the lowest 5 bits of each 16.
    static INLINE_MEMBER Vector looked_up(Half32 table, Word16 codes) {
        Word16 found;
        __asm__("vpermw %1, %2, %0" : "=v"(found) : "v"(table), "v"(codes));
        return found;
    }
    static void take_rows(const float* rows, int64_t columns, Vector* to) {
        for (int64_t k = 0; k < columns; k += 16) {
            Word16 turned[16];
            turn_rows(rows, k, turned);
            for (int i = 0; i < 16 && k + i < columns; i += 2)
                to[(k + i) / 2 * WIDE] = both((Float16)turned[i], k + i + 1 < columns ? (Float16)turned[i + 1] : Float16{});
        }
    }
};

// True if bfloat16 holds all numbers of codes, and what zero points make of them.
static bool fits_bfloat16() {
#if defined(TABLE)
    for (float number : TABLE_VALUES)
        if (float_bits(number) & 0xffff) return false;
#endif
    return ZERO == 0 || (ZERO == 1 && BITS < 8);
}
#endif

#if defined(HAS_PAIRS) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>

// Tiles of 16 rows of 64 bytes: a panel has the layout that the processor wants of its second operand. Registers 0 to 3
// hold sums of up to 16 tokens and 16 rows of the weight each, 4 the tokens, and 5 to 7 parts of the panel.
struct Tiles {
    // Linux gives a process these registers when it asks.
    static bool granted() {
        constexpr int REQUEST = 0x1023, TILE_DATA = 18;
        return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    }
    static INLINE_MEMBER void configure(int64_t tokens) {
        struct {
            uint8_t palette = 1, start = 0, none[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        for (int i = 0; i < 5; i++) config.rows[i] = (uint8_t)(tokens < 16 ? tokens : 16);
        __asm__ volatile("ldtilecfg %0" : : "m"(config));
    }
    static INLINE_MEMBER void release() { __asm__ volatile("tilerelease"); }

    // The same as `Blocked::all_tiles`, for steps in multiples of 16. x has memory for 16 tokens, or for blocks
    // of 32.
    static void multiply(int64_t tokens, const uint32_t* x, int64_t x_stride, const Word16* panel, int64_t steps,
                         const Float16* scale, Float16* sums) {
        static_assert(WIDE == 4, "a panel has as many vectors as there are registers for sums");
        for (; tokens > 16; tokens -= 32, x += 32 * x_stride, sums += 32 * WIDE)
            for (int v = 0; v < WIDE; v += 2) two_by_two(tokens, x, x_stride, panel + v, steps, scale + v, sums + v);
        if (tokens > 0) one_by_four(tokens, x, x_stride, panel, steps, scale, sums);
    }

    // 16 tokens and the whole panel.
    static void one_by_four(int64_t tokens, const uint32_t* x, int64_t x_stride, const Word16* panel, int64_t steps,
                            const Float16* scale, Float16* sums) {
        zero();
        for (int64_t s = 0; s < steps; s += 16)
            __asm__ volatile(
                "tileloadd (%0,%1,1), %%tmm4\n\t"
                "tileloadd (%2,%3,1), %%tmm5\n\ttdpbf16ps %%tmm5, %%tmm4, %%tmm0\n\t"
                "tileloadd 64(%2,%3,1), %%tmm6\n\ttdpbf16ps %%tmm6, %%tmm4, %%tmm1\n\t"
                "tileloadd 128(%2,%3,1), %%tmm7\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm2\n\t"
                "tileloadd 192(%2,%3,1), %%tmm5\n\ttdpbf16ps %%tmm5, %%tmm4, %%tmm3"
                : : "r"(x + s), "r"(x_stride * 4), "r"(panel + s * WIDE), "r"(STEP) : "memory");
        Float16 found[4][16];
        store(found);
        for (int64_t i = 0; i < tokens; i++)
            UNROLL for (int v = 0; v < WIDE; v++) sums[i * WIDE + v] += found[v][i] * scale[v];
    }

    // 32 tokens, of which 17 or more count, and two vectors of the panel.
    static void two_by_two(int64_t tokens, const uint32_t* x, int64_t x_stride, const Word16* panel, int64_t steps,
                           const Float16* scale, Float16* sums) {
        zero();
        for (int64_t s = 0; s < steps; s += 16)
            __asm__ volatile(
                "tileloadd (%0,%2,1), %%tmm4\n\t"
                "tileloadd (%3,%4,1), %%tmm6\n\ttdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
                "tileloadd 64(%3,%4,1), %%tmm7\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
                "tileloadd (%1,%2,1), %%tmm5\n\ttdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t"
                "tdpbf16ps %%tmm7, %%tmm5, %%tmm3"
                : : "r"(x + s), "r"(x + 16 * x_stride + s), "r"(x_stride * 4), "r"(panel + s * WIDE), "r"(STEP)
                : "memory");
        Float16 found[4][16];
        store(found);
        const Float16 first = scale[0], second = scale[1];
        for (int64_t i = 0; i < 16; i++) {
            sums[i * WIDE] += found[0][i] * first;
            sums[i * WIDE + 1] += found[1][i] * second;
        }
        sums += 16 * WIDE;
        for (int64_t i = 0; i < 16 && i < tokens - 16; i++) {
            sums[i * WIDE] += found[2][i] * first;
            sums[i * WIDE + 1] += found[3][i] * second;
        }
    }

    static constexpr int64_t STEP = WIDE * 64, ROW = 64;
    static INLINE_MEMBER void zero() {
        __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" : :);
    }
    static INLINE_MEMBER void store(Float16 (&found)[4][16]) {
        __asm__ volatile(
            "tilestored %%tmm0, (%0,%1,1)\n\ttilestored %%tmm1, 1024(%0,%1,1)\n\t"
            "tilestored %%tmm2, 2048(%0,%1,1)\n\ttilestored %%tmm3, 3072(%0,%1,1)"
            : : "r"(found), "r"(ROW) : "memory");
    }
};
#endif

// True if the processor has tiles, and the system lets this process use them.
static bool has_tiles() {
#ifdef HAS_AMX
    static const bool granted = Tiles::granted();
    return granted;
#else
    return false;
#endif
}
