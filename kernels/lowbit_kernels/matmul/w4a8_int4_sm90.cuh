// The consumers of int4 weights in w4a8_mm_sm90.cu: scaled sums of int8 products. w4a8_tiles_sm90.cuh, int4_as_int8.cuh and
// `multiply` stand before.
//
// Sums are scaled without a conversion. An int32 in 0 .. 2**24 has the bits of the float that is 2**-149 times as
// large. So sums begin at BASE, stay positive, and one fused multiplication and addition scales each. They are not set
// to zero for the next unit, a chunk or a group within it:
//   sum_u scale[u] * (S[u] - S[u - 1]) = sum_u (scale[u] - scale[u + 1]) * S[u],  where S[u] is the sum up to u.
// The two warp groups take turns to begin products: one scales its sums while the units multiply for the other.
//
// Sums begin at BASE again at multiples of LEAST chunks, or of WINDOW chunks if no token of the tile is loud: the sums of
// other tokens cannot leave the range. quantize_rows_sm90.cu finds loud tokens, and gives them a negative scale. The last
// bits of a token's results thus depend on whether another token of its tile is loud.
//
// On an H200 the units are idle for 38% of a loop that scales a sixteenth of its sums: with one set of sums a warp group waits
// for its products before it goes on, and registers do not hold two sets of 128 tokens. Two sets of fewer tokens, three and
// four warp groups, halves of the tokens, scaling that yields to the other group, and codes of groups of 128 unpacked between
// the products of a chunk were not faster.

static constexpr int PARTS = GROUP && GROUP < CHUNK ? CHUNK / GROUP : 1;  // units of a chunk
static constexpr int UNITS = PERIOD * PARTS;
static_assert(GROUP % CHUNK == 0 || GROUP == 64, "");
static constexpr int LEAST = 4, WINDOW = 8;  // chunks; WINDOW is SPAN of quantize_rows_sm90.cu
static_assert(PERIOD == LEAST || (PERIOD == WINDOW && LANES == 1), "");

// Without zero points `four_of` gives 16 times the codes. Sums of LEAST chunks are at most 2**23, and with zero points
// below 2**20. Those of WINDOW chunks are too if the magnitudes of a token's codes add up to at most 2**16.
static constexpr int BASE = ZERO ? 1 << 20 : 1 << 23;
// Scales are multiplied by 2**100, so that nothing is subnormal but the sums themselves.
static constexpr float UP = 0x1p100f, BASE_UP = BASE * 0x1p-49f, UNIT = ZERO ? 0x1p49f : 0x1p45f;

// Scales and zero points of a period's units as stored in memory, for a thread's two rows.
struct Fetched {
    static constexpr int NUMBERS = GROUP ? UNITS : 1, WORDS = SCALE == FP32 ? NUMBERS : (NUMBERS + 1) / 2;
    uint32 scale[2][WORDS], zero[2][(NUMBERS + 3) / 4];

    MEMBER float number(int unit, int i) const {
        const int at = GROUP ? unit : 0;
        if constexpr (SCALE == FP32) return bits_float(scale[i][at]);
        const uint32 pair = scale[i][at / 2];
        if constexpr (SCALE == FP16) return from_half(at % 2 ? pair >> 16 : pair & 0xffff);
        return bits_float(at % 2 ? pair & 0xffff0000 : pair << 16);
    }
    // The zero point plus 8, in each byte.
    MEMBER uint32 zeros(int unit, int i) const {
        const int at = GROUP ? unit : 0;
        return permute(masked_xor(zero[i][at / 4], 0x0f0f0f0f, 0x08080808), 0, at % 4 * 0x1111);
    }
};

typedef uint32 Operand[HALF][4];  // of half a chunk

DEVICE void in_use(int &x) { asm volatile("" : "+r"(x)::"memory"); }

// A thread's sums of rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Consumer {
    Shared &shared;
    const void *scale;
    const signed char *zero;
    const Shape &shape;
    const Schedule &schedule;
    const float *token_scale;
    Ring ring;           // its slot is a multiple of PERIOD
    long long first[2];  // index of the rows' first group
    Fetched own, next;   // of this period and the next one
    bool loud;           // whether a token of the tile is

    MEMBER Consumer(Shared &shared, const void *scale, const signed char *zero, const Shape &shape,
                    const Schedule &schedule, const float *token_scale)
        : shared(shared), scale(scale), zero(zero), shape(shape), schedule(schedule), token_scale(token_scale),
          ring{turn() * PERIOD} {
        if (LANES == 1 && threadIdx.x >= 128) pass_turn();  // the first group begins
    }

    static MEMBER void prepare(Shared &) {}

    MEMBER Fetched fetched(int chunk) const {
        constexpr int BYTES = SCALE == FP32 ? 4 : 2;
        Fetched result = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (VECTOR) {
                const long long at = first[i] + min(chunk * PARTS, shape.groups - UNITS);  // codes beyond K are zeros
                load_words<UNITS * BYTES>(result.scale[i], (const char *)scale + at * BYTES);
                if constexpr (ZERO) load_words<UNITS>(result.zero[i], zero + at);
                continue;
            }
#pragma unroll
            for (int unit = 0; unit < Fetched::NUMBERS; ++unit) {
                const int k = chunk * CHUNK + unit * (CHUNK / PARTS);
                const long long at = first[i] + (GROUP ? min(k / GROUP, shape.groups - 1) : 0);
                if constexpr (BYTES == 4) result.scale[i][unit] = ((const uint32 *)scale)[at];
                else result.scale[i][unit / 2] |= (uint32)((const unsigned short *)scale)[at] << unit % 2 * 16;
                if constexpr (ZERO) result.zero[i][unit / 4] |= (uint32)(unsigned char)zero[at] << unit % 4 * 8;
            }
        }
        return result;
    }

    // Unpacks half of the codes in slot `slot` of the ring, chunk `i` of the period of `groups`.
    MEMBER void unpack(Operand &a, int slot, int half, const Fetched &groups, int i) const {
        uint32 words[4];
        half_words(shared, slot, half, words);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32 own_zero = ZERO ? groups.zeros(i * PARTS + half * (PARTS - 1), j % 2) : 0;
            a[j / 2][j % 2] = four_of<false, ZERO>(words[j], own_zero);
            a[j / 2][j % 2 + 2] = four_of<true, ZERO>(words[j], own_zero);
        }
    }

    // Waits for a slot. Codes that were unpacked before stay so: the compiler would unpack them after the wait for products,
    // which is when the units are idle. It can't, since it must have them if the slot is not full yet.
    MEMBER void wait_with(Operand (&a)[2], int slot, uint32 parity) const {
        const uint32 full = shared_address(&shared.full[slot]);
        if (barrier_is_over(full, parity)) return;
        barrier_wait(full, parity);
        const uint32 zero = shape.m >> 31;
#pragma unroll
        for (int half = 0; half < 2 / PARTS; ++half)
#pragma unroll
            for (int i = 0; i < HALF; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) a[half][i][j] |= zero;
    }

    // Begins the products of halves `first` .. `end` - 1 of a chunk.
    template <int COUNT>
    MEMBER void begin_products(int (&sums)[COUNT], const Operand (&a)[2], uint32 tokens, int first, int end) const {
        product_fence();
#pragma unroll
        for (int i = first * HALF; i < end * HALF; ++i)
            multiply(sums, a[i / HALF][i % HALF], (uint64)OPERAND_HIGH << 32 | tokens + 2 * i, 1);
        product_commit();
    }

    // Whether sums begin at BASE within a period, before unit `unit`, if the tile is loud.
    static constexpr MEMBER bool may_begin(int unit) { return PERIOD > LEAST && unit == LEAST * PARTS; }

    // The factors of a unit's sums. `begins`: the next period's sums begin at BASE.
    MEMBER void factors_of(float (&factor)[2], int unit, bool begins, bool more) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool is_own = unit + 1 < UNITS;
            float other = is_own ? own.number(unit + 1, i) : begins || !more ? 0.0f : next.number(0, i);
            if (may_begin(unit + 1) && loud) other = 0.0f;
            factor[i] = UP * (own.number(unit, i) - other);
            in_use(factor[i]);
        }
    }

    // Sums begin at BASE with this unit. What BASE will add is taken from totals.
    template <int COUNT>
    MEMBER void begin_at_base(float (&totals)[COUNT], int (&sums)[COUNT], int unit) const {
        const float base[2] = {own.number(unit, 0) * BASE_UP, own.number(unit, 1) * BASE_UP};
#pragma unroll
        for (int i = 0; i < COUNT; ++i) totals[i] -= base[i / 2 % 2], sums[i] = BASE, in_use(sums[i]);
    }

    // Adds the scaled sums of a unit, whose products are done.
    template <int COUNT>
    MEMBER void add_unit(float (&totals)[COUNT], int (&sums)[COUNT], const float (&factor)[2]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) in_use(sums[i]);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) totals[i] = fma_exactly(bits_float(sums[i]), factor[i / 2 % 2], totals[i]);
    }

    MEMBER void await_turn() const {
        if constexpr (LANES == 1) named_barrier_sync(4 + threadIdx.x / 128, 256);
    }
    MEMBER void pass_turn() const {
        if constexpr (LANES == 1) named_barrier_arrive(4 + (threadIdx.x / 128 ^ 1), 256);
    }

    // Adds the scaled sums of PERIOD chunks, whose first codes `a` has, and unpacks the first codes of the next ones.
    // Products are not in flight when it ends: across iterations of a loop, the compiler would serialise them.
    // begin, begins: whether sums begin at BASE, now and in the next period.
    template <int COUNT>
    MEMBER void add_period(float (&totals)[COUNT], int (&sums)[COUNT], Operand (&a)[2][2], int chunk, bool begin,
                           bool begins) {
        const int slot = ring.slot;
        const uint32 parity = ring.parity, tokens = tokens_at(shared, slot);
        ring.advance(TURN);
        const bool more = chunk + TURN < schedule.last;
        if (more) next = fetched(chunk + TURN);
        if (begin) begin_at_base(totals, sums, 0);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            if (may_begin(unit) && loud) begin_at_base(totals, sums, unit);
            const int i = unit / PARTS, part = unit % PARTS;
            const bool ends = i + 1 == PERIOD;
            const uint32 here = tokens + i * (STAGE_BYTES / 16);
            await_turn();
            begin_products(sums, a[i % 2], here, part, part + 2 / PARTS);
            pass_turn();
            float factor[2];
            factors_of(factor, unit, begins, more);
            // Codes of one half are unpacked while the other half of 64 is multiplied, and a whole chunk while the one before is.
            if (PARTS == 2 && part == 0) unpack(a[i % 2][1], slot + i, 1, own, i);
            if (part + 1 == PARTS) {
                if (!ends || more) {
#pragma unroll
                    for (int half = 0; half < 2 / PARTS; ++half)
                        unpack(a[(i + 1) % 2][half], ends ? ring.slot : slot + i + 1, half, ends ? next : own, ends ? 0 : i + 1);
                }
                if (i + 2 < PERIOD) wait_with(a[(i + 1) % 2], slot + i + 2, parity);
                else if (more) wait_with(a[(i + 1) % 2], ring.slot + i + 2 - PERIOD, ring.parity);
            }
            product_wait<0>();
            if (GROUP || (ends ? begins || !more : may_begin(unit + 1) && loud)) add_unit(totals, sums, factor);
            if (part + 1 == PARTS) release(shared, schedule, slot + i);
        }
        own = next;
    }

    // Whether a token of the schedule's tile is loud.
    MEMBER bool is_loud() const {
        uint32 found = 0;
#pragma unroll
        for (int i = 0; i < TOKENS; i += 32)
            found |= float_bits(token_scale[min(schedule.token + i + (int)threadIdx.x % 32, shape.m - 1)]) >> 31;
        return warp_max(found);
    }

    // The scaled sums of the block's chunks of the tile whose rows of this thread begin at `row`.
    template <int COUNT>
    MEMBER void sum(float (&totals)[COUNT], int row) {
        Operand a[2][2];
        int sums[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) totals[i] = 0.0f, sums[i] = BASE;
#pragma unroll
        for (int i = 0; i < 2; ++i) first[i] = (long long)min(row + i * 8, shape.n - 1) * shape.groups;
        const int begin_at = schedule.first + turn() * PERIOD;
        own = fetched(begin_at);
        loud = is_loud();
        const int most = loud ? LEAST : WINDOW;
        barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
#pragma unroll
        for (int half = 0; half < 2 / PARTS; ++half) unpack(a[0][half], ring.slot, half, own, 0);
        barrier_wait(shared_address(&shared.full[ring.slot + 1]), ring.parity);
        for (int chunk = begin_at; chunk < schedule.last; chunk += TURN) {
            const bool always = PERIOD == WINDOW, begins = always || (chunk + TURN & most - 1) < TURN;
            const bool begin = always || chunk == begin_at || (chunk & most - 1) < TURN;
            add_period(totals, sums, a, chunk, begin, begins);
        }
    }
};
