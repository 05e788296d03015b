// The common part of fused_step.cu and fused_step_cpu.cpp: the macros that a variant is compiled with, the table that
// the host fills in, and the algorithm. random_bits.h comes before it.
//
//   PARAM, GRAD        dtypes: FP32, BF16, FP16
//   STATES             number of states of an element, 0..3
//   SIGNED             bit n is set if the values of state n have a sign
//   STOCHASTIC_STATES  bit n is set if state n is rounded stochastically where it is stored in bf16; 4 bits always are
//   FORMAT_n           format of state n: STATE_FP32, STATE_BF16, STATE_FLOAT8, STATE_8BIT, STATE_4BIT
//   ROUNDING           of bf16 weights: NEAREST, STOCHASTIC, CORRECTED with a byte below the bf16 (24-bit weights), or
//                      EXACT with two (32 bits)
//   ERROR              what becomes of the rounding error of a weight:
//                      DROPPED   it is lost, or kept by ROUNDING
//                      RETURNED  COMPENSATE adds it to the states; for weights in bf16 or codes
//                      TRIED     the new float32 weights go to `correction`, nothing else is stored, and the step counts
//                      GIVEN     `correction` holds the errors: as RETURNED, but the weights stay, and no step counts.
//                                These two are one step of weights that the caller rounds in between
//   CODE_BITS          8 or 4: `param` holds integers of a symmetric range, with scales, and PARAM is FP32. The new
//                      values are rounded as quantize/round_rows.py says. 0: `param` holds values
//   PREPARE, UPDATE    the algorithm, as statements; HYPER declares names for its options in `h`
//   COMPENSATE         statements that add the error `e` of a weight to the states
//   CELLS_n, BASE_n, SHIFT_n   the encoding table of state n (see `ranked` of fused_step_lanes.cuh)

enum { FP32, BF16, FP16 };
enum { STATE_FP32, STATE_BF16, STATE_FLOAT8, STATE_8BIT, STATE_4BIT };
enum { NEAREST, STOCHASTIC, CORRECTED, EXACT };
enum { DROPPED, RETURNED, TRIED, GIVEN };

static constexpr int TILE = 256;
static constexpr int COEFFICIENTS = 12;
static constexpr int FORMATS[3] = {FORMAT_0, FORMAT_1, FORMAT_2};
static constexpr bool TWO_PARTS = ERROR == TRIED || ERROR == GIVEN;
// Bytes of an element of `correction`.
static constexpr int CORRECTION_BYTES = ROUNDING == CORRECTED ? 1 : ROUNDING == EXACT ? 2 : TWO_PARTS ? 4 : 0;

DEVICE constexpr bool is_signed(int slot) { return (SIGNED >> slot & 1) != 0; }
// Codes of 4 bits stand for squares, with a sign, or powers of two, without: lowbit/numerics/codebook.py defines their rounding.
DEVICE constexpr bool has_powers(int slot) { return FORMATS[slot] == STATE_4BIT && !is_signed(slot); }
DEVICE constexpr bool is_stochastic(int slot) {
    return slot < STATES && (FORMATS[slot] == STATE_4BIT ||
                             (FORMATS[slot] == STATE_BF16 && (STOCHASTIC_STATES >> slot & 1) != 0));
}
DEVICE constexpr bool has_codes(int slot) { return FORMATS[slot] == STATE_8BIT || FORMATS[slot] == STATE_4BIT; }
DEVICE constexpr bool has_scale(int slot) { return has_codes(slot) || FORMATS[slot] == STATE_FLOAT8; }
DEVICE constexpr int block_of(int slot) { return FORMATS[slot] == STATE_4BIT ? 128 : 256; }
DEVICE constexpr bool any_codes() {
    return (STATES > 0 && has_codes(0)) || (STATES > 1 && has_codes(1)) || (STATES > 2 && has_codes(2));
}
static constexpr bool CODES = any_codes();
static constexpr bool RANDOM =  // whether anything needs random bits
    ROUNDING == STOCHASTIC || is_stochastic(0) || is_stochastic(1) || is_stochastic(2);

// A row of the table that the host fills in. All fields are 64 bits.
struct alignas(16) Tensor {
    const void *grad;
    void *param;
    void *state[3];           // codes, or values
    void *correction;         // [numel] of CORRECTION_BYTES each
    float *scale[3];          // [rows, ceil(cols / block)]
    double *step;             // steps done; float32 counts to 2**24 only
    long long first_tile;     // tiles of the tensors before this one
    uint64 cols;              // elements of a row
    uint64 tiles_a_row;       // 0 if there is only one row
    uint64 aligned;           // 1 if elements 8 n to 8 n + 7 of the tensor can be read at once from every array
    uint64 key;               // third word of the random bits' key for the weight; state n takes key + 1 + n
    uint64 first_index;       // global index of local element i: first_index + (i / run) * stride + i % run,
    uint64 run, stride;       // or first_index + i if run is 0
    uint64 group;
    uint64 numel;             // elements
    // Of codes: a scale for `scale_width` elements of a row of `width`, and the random offset of each row.
    float *param_scale;
    long long *place;
    uint64 width, scale_width;
};

// The options of a parameter group.
struct Group {
    double lr;
    const void *lr_pointer;  // on the device, read instead of `lr` if not null
    uint64 lr_is_double;
    uint64 seed;
    double least_lr;  // at lower rates errors return as at this one
    double h[8];
};

// The numbers that `prepare` computes for every tensor.
struct alignas(16) Scalars {
    float c[COEFFICIENTS];
    uint32 keys[4][2];  // of the random bits of the weight and of each state
    // On a GPU, for its short path: `first_tile` of Tensor, the tiles that take this path, and first_index / 8.
    uint32 first_tile, short_tiles, first_octet, unused;
};

// ---- states in few bits ------------------------------------------------------------------------------------------

static constexpr int CELLS[3] = {CELLS_0, CELLS_1, CELLS_2};
static constexpr int BASES[3] = {BASE_0, BASE_1, BASE_2};
static constexpr int SHIFTS[3] = {SHIFT_0, SHIFT_1, SHIFT_2};

DEVICE constexpr int values_of(int slot) { return !has_codes(slot) ? 0 : FORMATS[slot] == STATE_4BIT ? 16 : 256; }
DEVICE constexpr int values_before(int slot) {
    return (slot > 0 ? values_of(0) : 0) + (slot > 1 ? values_of(1) : 0) + (slot > 2 ? values_of(2) : 0);
}
DEVICE constexpr int cells_before(int slot) {
    return (slot > 0 ? CELLS_0 : 0) + (slot > 1 ? CELLS_1 : 0) + (slot > 2 ? CELLS_2 : 0);
}

// The table of all states holds the values of every state's codes, then every state's cells.
DEVICE const uint32 *cells_of(const uint32 *table, int slot) {
    return table + values_before(STATES) + cells_before(slot);
}

// ---- the algorithm -----------------------------------------------------------------------------------------------

DEVICE void update_element(const float *c, float g, float &w, float s[3]) { UPDATE }

// `e`: the weight before rounding less the weight after it. An error that is not finite is dropped.
DEVICE void compensate_element(const float *c, float e, float s[3]) {
    e = e - e == 0.0f ? e : 0.0f;
    COMPENSATE
}

// float32 as the nearest bf16 (a tie goes away from zero), which is the upper half of the result, and the signed
// distance in units of the last bit. A NaN stays as it is.
DEVICE float nearest_upper_half(float w, int &below) {
    const uint32 bits = float_bits(w), upper = bits + 0x8000 & 0xffff0000u;
    below = w != w ? 0 : (int)(bits - upper);
    return w != w ? w : bits_float(upper);
}

// A weight as bf16, the upper half of the result, and `below`, what `correction` keeps of it: 16 more bits if EXACT, else
// 8. For 8 the weight is rounded to these 24 bits first. `below` is 0 for NaN, infinities and values beyond bf16.
DEVICE float split_weight(float w, int &below) {
    if constexpr (ROUNDING == EXACT) return nearest_upper_half(w, below);
    const uint32 own = float_bits(w), bits = own + 0x80 & 0xffffff00u, upper = bits + 0x8000 & 0xffff0000u;
    // `own` too, since the sum may carry the bits of a NaN into the sign
    const bool kept = (upper & 0x7f800000) != 0x7f800000 && (own & 0x7f800000) != 0x7f800000;
    below = kept ? (int)(bits - upper) >> 8 : 0;
    return kept ? bits_float(upper) : w;
}
DEVICE float joined_weight(float upper, int below) {
    return bits_float(float_bits(upper) + ((uint32)below << (ROUNDING == EXACT ? 0 : 8)));
}

// Count the step of a tensor, and compute the numbers that depend on it and the keys of the random bits.
DEVICE void prepare_tensor(const Tensor &tensor, const Group &group, Scalars &out) {
    const double t = *tensor.step + (ERROR == GIVEN ? 0.0 : 1.0);
    *tensor.step = t;
    const double least_lr = group.least_lr;
    double lr = group.lr;
    if (group.lr_pointer) lr = group.lr_is_double ? *(const double *)group.lr_pointer : *(const float *)group.lr_pointer;
    const double *h = group.h;
    double c[COEFFICIENTS] = {};
    HYPER
    { PREPARE }
    for (int j = 0; j < COEFFICIENTS; ++j) out.c[j] = (float)c[j];
    if constexpr (RANDOM) {
        for (int slot = 0; slot <= STATES; ++slot) {
            const uint64 words[3] = {group.seed, (uint64)t, tensor.key + slot};
            uint32 k0 = 0x243f6a88u, k1 = 0x85a308d3u;
            for (int j = 0; j < 3; ++j) k0 = mix(k0, words[j]), k1 = mix(k1, words[j]);
            out.keys[slot][0] = k0, out.keys[slot][1] = k1;
        }
    }
}
