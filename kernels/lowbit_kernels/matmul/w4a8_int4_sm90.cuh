// The consumers of int4 weights in w4a8_mm_sm90.cu: scaled sums of int8 products. w4a8_tiles_sm90.cuh, int4_as_int8.cuh and
// `multiply` stand before.
//
// Sums are scaled without a conversion. An int32 in 0 .. 2**24 has the bits of the float that is 2**-149 times as
// large. So sums begin at BASE, stay positive, and one fused multiplication and addition scales each. They are not set
// to zero for the next group:
//   sum_g scale[g] * (S[g] - S[g - 1]) = sum_g (scale[g] - scale[g + 1]) * S[g],  where S[g] is the sum up to g.
// After PERIOD chunks they begin at BASE again. On an H200 all other instructions add to the time of the products, about
// two clocks each. Four warp groups, turns of two, halves of the tokens, codes unpacked between the instructions of the
// units, and two sets of sums, of which one is scaled while the other multiplies, were not faster.

static constexpr int PARTS = GROUP && GROUP < CHUNK ? CHUNK / GROUP : 1;  // groups of a chunk
static_assert(GROUP % CHUNK == 0 || GROUP == 64, "");
static constexpr int WINDOW = 3;  // see `window`

// Without zero points `four_of` gives 16 times the codes. A chunk's sum is at most 2**21, and with them below 2**18.
static constexpr int BASE = ZERO ? 1 << 20 : 1 << 23;
// Scales are multiplied by 2**100, so that nothing is subnormal but the sums themselves.
static constexpr float UP = 0x1p100f, BASE_UP = BASE * 0x1p-49f, UNIT = ZERO ? 0x1p49f : 0x1p45f;

// Scales and zero points of a chunk's groups as stored in memory, for a thread's two rows.
struct Fetched {
    uint32 scale[PARTS][2];
    int zero[PARTS][2];

    MEMBER float number(int part, int i) const {
        const uint32 bits = scale[part][i];
        return SCALE == FP32 ? bits_float(bits) : SCALE == FP16 ? from_half(bits) : bits_float(bits << 16);
    }
};

typedef uint32 Operand[STEPS][4];

DEVICE void in_use(int &x) { asm volatile("" : "+r"(x)::"memory"); }

// A thread's sums of rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Consumer {
    Shared &shared;
    const void *scale;
    const signed char *zero;
    const Shape &shape;
    const Schedule &schedule;
    Ring ring;
    long long first[2];  // index of the rows' first group
    Fetched window[WINDOW];  // of this chunk and those after
    int slot[2];             // of the unpacked chunks
    uint32 tokens[2];

    MEMBER Consumer(Shared &shared, const void *scale, const signed char *zero, const Shape &shape,
                    const Schedule &schedule)
        : shared(shared), scale(scale), zero(zero), shape(shape), schedule(schedule) {}

    static MEMBER void prepare(Shared &) {}

    MEMBER Fetched fetched(int chunk) const {
        Fetched result;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int group = GROUP == 0 ? 0 : min((chunk * CHUNK + part * GROUP) / GROUP, shape.groups - 1);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const long long at = first[i] + group;
                if constexpr (SCALE == FP32) result.scale[part][i] = ((const uint32 *)scale)[at];
                else result.scale[part][i] = ((const unsigned short *)scale)[at];
                result.zero[part][i] = ZERO ? zero[at] : 0;
            }
        }
        return result;
    }

    // Unpacks the codes in the ring's present slot.
    MEMBER void unpack(Operand &a, const Fetched &groups) const {
        each_word(shared, ring, [&](uint32 word, int step, int i) {
            const int own = groups.zero[step * PARTS / STEPS][i];
            a[step][i] = four_of<false, ZERO>(word, own);
            a[step][i + 2] = four_of<true, ZERO>(word, own);
        });
    }

    // Begins the products of a part of a chunk.
    MEMBER void multiply_part(int (&sums)[SUMS], const Operand &a, uint32 tokens, int part) const {
        product_fence();
#pragma unroll
        for (int i = part * (STEPS / PARTS); i < (part + 1) * (STEPS / PARTS); ++i)
            multiply(sums, a[i], (uint64)OPERAND_HIGH << 32 | tokens + 2 * i, 1);
        product_commit();
    }

    // Unpacks the codes of the next chunk of the ring, chunk `i` of a period, with groups `groups`.
    MEMBER void take(Operand (&a)[2], int i, const Fetched &groups) {
        slot[i % 2] = ring.slot, tokens[i % 2] = tokens_at(shared, ring.slot);
        unpack(a[i % 2], groups);
        ring.advance();
    }

    // Adds the scaled sums of PERIOD chunks. Products are not in flight when it ends: across iterations of a loop, the
    // compiler would serialise them.
    MEMBER void add_period(float (&totals)[SUMS], Operand (&a)[2], int chunk) {
        constexpr int UNITS = PERIOD * PARTS;
        const float base[2] = {window[0].number(0, 0) * BASE_UP, window[0].number(0, 1) * BASE_UP};
        int sums[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) totals[i] -= base[i / 2 % 2], sums[i] = BASE, in_use(sums[i]);
        multiply_part(sums, a[0], tokens[0], 0);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const int i = unit / PARTS, part = unit % PARTS, later = part + 1;
            const bool ends = unit + 1 == UNITS, is_last = later == PARTS;
            const bool takes = part == 0 && (i + 1 < PERIOD || chunk + PERIOD < schedule.last);
            float factor[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float other = ends ? 0.0f : window[later / PARTS].number(later % PARTS, j);
                factor[j] = UP * (window[0].number(part, j) - other);
            }
            if (takes) take(a, i + 1, window[1]);
            product_wait<0>();
#pragma unroll
            for (int j = 0; j < SUMS; ++j) in_use(sums[j]);
            if (is_last) release(shared, schedule, slot[i % 2]);
#pragma unroll
            for (int j = 0; (GROUP || ends) && j < SUMS; ++j)
                totals[j] = fma_exactly(bits_float(sums[j]), factor[j / 2 % 2], totals[j]);
            const int next = (unit + 1) / PARTS % 2;
            if (!ends) multiply_part(sums, a[next], tokens[next], later % PARTS);
            if (is_last) {
#pragma unroll
                for (int j = 0; j + 1 < WINDOW; ++j) window[j] = window[j + 1];
                window[WINDOW - 1] = fetched(chunk + i + WINDOW);
            }
        }
    }

    // The scaled sums of the block's chunks of the tile whose rows of this thread begin at `row`.
    MEMBER void sum(float (&totals)[SUMS], int row) {
        Operand a[2];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) totals[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) first[i] = (long long)min(row + i * 8, shape.n - 1) * shape.groups;
#pragma unroll
        for (int i = 0; i < WINDOW; ++i) window[i] = fetched(schedule.first + i);
        take(a, 0, window[0]);
        for (int chunk = schedule.first; chunk < schedule.last; chunk += PERIOD) add_period(totals, a, chunk);
    }
};
