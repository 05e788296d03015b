// The products of all tokens and the panels of weight_mm_panels_cpu.h, which comes before this file.

template <typename Kind>
struct Blocked {
    typedef typename Kind::Unit Unit;
    typedef typename Kind::Vector Vector;
    Weight weight;
    Operands given;
    Unit* x;  // [blocks of DEPTH, tokens, DEPTH / COLUMNS]
    int64_t first, tokens;  // the tokens of this pass
    int64_t room;           // tokens that x has memory for
    bool in_words, in_tiles;

    static constexpr int DEPTH = Kind::DEPTH, STEPS = DEPTH / Kind::COLUMNS;

    struct Pack {
        const Blocked& job;
        void rows(int64_t m, int64_t end) {
            const int64_t columns = job.weight.layout->columns;
            for (int64_t k = 0; k < columns; k += DEPTH) {
                const int64_t count = columns - k < DEPTH ? (columns - k + 1) / 2 * 2 : DEPTH;
                for (int64_t i = m; i < end; i++)
                    Kind::take_x(job.given, job.first + i, k, count, job.in_words, job.x + (k / DEPTH * job.room + i) * STEPS);
            }
        }
    };

    // M tokens times a panel, `groups` of `steps` at a time. Without SCALED, sums of a group are multiplied by its scales.
    // With several groups M is at most GROUPED, so that sums of the group and of all stay in registers.
    // A function of its own has all registers.
    template <int M, bool SEVERAL>
    static __attribute__((noinline)) void tile(const Unit* x, const Vector* panel, int64_t steps, int64_t groups,
                                               const Float16* scale, Float16* sums) {
        typedef typename Kind::Part Part;
        constexpr int PARTS = WIDE * sizeof(Vector) / sizeof(Part);
        const Part* from = (const Part*)panel;
        const FloatPart* scales = (const FloatPart*)scale;
        FloatPart* to = (FloatPart*)sums;
        FloatPart all[SEVERAL ? M : 1][PARTS] = {};
        for (int64_t g = 0; g < groups; g++, x += steps) {
            FloatPart own[M][PARTS] = {};
            for (int64_t s = 0; s < steps; s++, from += PARTS) {
                Part numbers[PARTS];
                UNROLL for (int v = 0; v < PARTS; v++) numbers[v] = from[v];
                UNROLL for (int i = 0; i < M; i++) {
                    const Part one = Kind::broadcast(x[i * STEPS + s]);
                    UNROLL for (int v = 0; v < PARTS; v++) own[i][v] = Kind::added(own[i][v], one, numbers[v]);
                }
            }
            UNROLL for (int v = 0; v < PARTS; v++) {
                UNROLL for (int i = 0; i < M; i++) {
                    FloatPart& sum = SEVERAL ? all[i][v] : to[i * PARTS + v];
                    sum += Kind::SCALED ? own[i][v] : own[i][v] * scales[g * PARTS + v];
                }
            }
        }
        if (SEVERAL)
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int v = 0; v < PARTS; v++) to[i * PARTS + v] += all[SEVERAL ? i : 0][v];
    }

    static constexpr int GROUPED = 3;

    static void all_tiles(int64_t tokens, const Unit* x, const Vector* panel, int64_t steps, int64_t groups,
                          const Float16* scale, Float16* sums) {
        if (groups > 1) {
            for (; tokens >= GROUPED; tokens -= GROUPED, x += GROUPED * STEPS, sums += GROUPED * WIDE)
                tile<GROUPED, true>(x, panel, steps, groups, scale, sums);
            for (; tokens; tokens--, x += STEPS, sums += WIDE) tile<1, true>(x, panel, steps, groups, scale, sums);
            return;
        }
        for (int64_t tiles = (tokens + TOKENS - 1) / TOKENS; tiles; tiles--) {  // tiles of few tokens are slow
            const int64_t own = (tokens + tiles - 1) / tiles;
            switch (own) {
                case 6: tile<6, false>(x, panel, steps, 1, scale, sums); break;
                case 5: tile<5, false>(x, panel, steps, 1, scale, sums); break;
                case 4: tile<4, false>(x, panel, steps, 1, scale, sums); break;
                case 3: tile<3, false>(x, panel, steps, 1, scale, sums); break;
                case 2: tile<2, false>(x, panel, steps, 1, scale, sums); break;
                case 1: tile<1, false>(x, panel, steps, 1, scale, sums); break;
            }
            tokens -= own, x += own * STEPS, sums += own * WIDE;
        }
    }

    void rows(int64_t n, int64_t end) {
        const Denormals denormals;
#ifdef HAS_AMX
        if (in_tiles) Tiles::configure(tokens);
#endif
        for (; n < end; n += PANEL) one_panel(n);
#ifdef HAS_AMX
        if (in_tiles) Tiles::release();
#endif
    }

    // Groups of `steps` each, of tokens from `x` on.
    void multiply(const Unit* x, const Vector* panel, int64_t steps, int64_t groups, const Float16* scale,
                  Float16* sums) const {
#ifdef HAS_AMX
        if constexpr (!Kind::SCALED) {
            if (in_tiles && steps % 16 == 0) {
                for (int64_t g = 0; g < groups; g++, x += steps, panel += steps * WIDE, scale += WIDE)
                    Tiles::multiply(tokens, x, STEPS, panel, steps, scale, sums);
                return;
            }
        }
#endif
        all_tiles(tokens, x, panel, steps, groups, scale, sums);
    }

    void one_panel(int64_t n) const {
        const Layout& l = *weight.layout;
        const int strips = l.rows - n < PANEL ? (int)((l.rows - n + 15) / 16) : WIDE;
        const bool has_scales = in_words || !Kind::SCALED;
        const int64_t tabled = has_scales ? l.groups * WIDE : 0;
        Float16* sums = (Float16*)kept_sums.bytes((tokens * WIDE + (ZERO ? 2 : 1) * tabled) * sizeof(Float16));
        Float16 *scales = sums + tokens * WIDE, *zeros = scales + tabled;
        memset(sums, 0, tokens * WIDE * sizeof(Float16));
        alignas(64) Vector panel[STEPS * WIDE];
        const Strip all[] = {Strip(weight, n), Strip(weight, n + 16), Strip(weight, n + 32), Strip(weight, n + 48)};
        for (int v = 0; has_scales && v < strips; v++) {
            all[v].turned([&](int64_t i) { return scale_at(weight, i); }, scales + v);
            if (ZERO) all[v].turned([&](int64_t i) { return (float)weight.zero[i]; }, zeros + v);
        }
        for (int64_t k = 0; k < l.columns; k += DEPTH) {
            const int64_t stop = k + DEPTH < l.columns ? k + DEPTH : l.columns;
            for (int v = 0; v < strips; v++) {
                if (in_words) {
                    Kind::take_words(all[v], scales + v, zeros + v, k, stop, panel + v);
                } else {
                    alignas(64) float rows[16 * MOST_DEPTH + 16];
                    all[v].template rows<Kind::SCALED>(k, stop, rows);
                    Kind::take_rows(rows, stop - k, panel + v);
                }
            }
            const Unit* own = x + k / DEPTH * room * STEPS;
            if (Kind::SCALED) {
                all_tiles(tokens, own, panel, stop - k, 1, nullptr, sums);
                continue;
            }
            for (int64_t from = k; from < stop;) {
                const int64_t group = from / l.group, last = (group + 1) * l.group, to = last < stop ? last : stop;
                const int64_t whole = from % l.group ? 0 : (stop - from) / l.group, groups = whole > 1 ? whole : 1;
                const int64_t step = (from - k) / Kind::COLUMNS, steps = (to - from + 1) / Kind::COLUMNS;
                multiply(own + step, panel + step * WIDE, steps, groups, scales + group * WIDE, sums);
                from += groups * (to - from);
            }
        }
        for (int64_t m = 0; m < tokens; m++)
            for (int v = 0; v < strips; v++) write(given, first + m, n + 16 * v, sums[m * WIDE + v]);
    }
};

static constexpr int64_t MOST_OF_X = 1 << 21;  // elements of x that are multiplied at a time

template <typename Kind>
static void multiply_panels(const Weight& weight, const Operands& given, bool in_words, Parallel parallel, int64_t threads) {
    const Layout& l = *weight.layout;
    constexpr int DEPTH = Kind::DEPTH;
    const int64_t blocks = (l.columns + DEPTH - 1) / DEPTH, fitting = MOST_OF_X / (blocks * DEPTH) / 96 * 96;  // whole tiles
    const int64_t most = fitting < 96 ? 96 : fitting;
    for (int64_t m = 0; m < given.tokens; m += most) {
        const int64_t tokens = given.tokens - m < most ? given.tokens - m : most;
        const bool in_tiles = !Kind::SCALED && has_tiles();
        const int64_t room = !in_tiles ? tokens : tokens > 16 ? (tokens + 31) / 32 * 32 : 16;
        const int64_t bytes = blocks * DEPTH / Kind::COLUMNS * room * sizeof(typename Kind::Unit);
        auto* x = (typename Kind::Unit*)kept_x.bytes(bytes);
        Blocked<Kind> job = {weight, given, x, m, tokens, room, in_words, in_tiles};
        typename Blocked<Kind>::Pack pack = {job};
        all_rows(pack, 0, tokens, tokens * l.columns < (1 << 15) ? nullptr : parallel, threads, 1);
        all_rows(job, 0, l.rows, parallel, threads, PANEL);
    }
}
