// Writes rows of a weight to memory as float32. codes_cpu.h decodes; dequantize_cpu.py calls.

struct ToMemory {
    float* out;
    void operator()(int, int64_t k, float value) { out[k] = value; }
#ifndef BYTES
    void operator()(int, int64_t k, Floats values) { *(Unaligned*)(out + k) = values; }
#endif
#ifdef HAS_TABLE
    void operator()(int, int64_t k, Float16 values) { *(UnalignedFloat16*)(out + k) = values; }
#endif
};

struct Dequantize {
    Weight weight;
    float* out;
    int64_t first;  // the row that `out` begins with
    void rows(int64_t n, int64_t end) {
        const Denormals denormals;
        for (; n < end; n++) {
            ToMemory sink = {out + (n - first) * weight.layout->columns};
            decode_rows<1>(weight, n, sink);
        }
    }
};

// out [end - first, columns]: the rows from `first` to `end`.
extern "C" int64_t dequantize(const Layout* layout, float* out, const uint8_t* codes, const Scale* scale,
                              const Zero* zero, const float* of_byte, int64_t first, int64_t end, Parallel parallel,
                              int64_t threads) {
    Dequantize job = {{layout, codes, scale, zero, of_byte, false}, out, first};
    all_rows(job, first, end, parallel, threads);
    return 1;
}

// out [count, columns]: the rows that `index` names. Returns 0, with `out` unfinished, for an index out of range.
extern "C" int64_t look_up(const Layout* layout, float* out, const uint8_t* codes, const Scale* scale,
                           const Zero* zero, const float* of_byte, const int64_t* index, int64_t count) {
    const Denormals denormals;
    const Weight weight = {layout, codes, scale, zero, of_byte, false};
    for (int64_t i = 0; i < count; i++) {
        if (index[i] < 0 || index[i] >= layout->rows) return 0;
        ToMemory sink = {out + i * layout->columns};
        decode_rows<1>(weight, index[i], sink);
    }
    return 1;
}
