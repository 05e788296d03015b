// Random bits, for kernels on GPUs and CPUs; random_bits.py defines them.

typedef unsigned int uint32;
typedef unsigned long long uint64;

DEVICE uint32 finalise(uint32 h) {
    h ^= h >> 16;
    h *= 0x7feb352du;
    h ^= h >> 15;
    h *= 0x846ca68bu;
    return h ^ (h >> 16);
}

DEVICE uint32 mix(uint32 key, uint64 word) {
    key = finalise((key ^ (uint32)word) + 0x9e3779b9u);
    return finalise((key ^ (uint32)(word >> 32)) + 0x9e3779b9u);
}

DEVICE uint32 hash(const uint32 *keys, uint64 octet) {
    uint32 h = (uint32)octet ^ keys[0];
    h ^= h >> 16;
    h *= 0x7feb352du;
    h ^= h >> 15 ^ keys[1] + 0x9e3779b9u * (uint32)(octet >> 32);
    h *= 0x846ca68bu;
    return h ^ h >> 16;
}

// The bits of element j of an octet are the octet's hash times this number. Callers use the upper ones.
DEVICE constexpr uint32 multiplier(int j) {
    return j == 0   ? 0x2265b1f5u
           : j == 1 ? 0xd8f16adfu
           : j == 2 ? 0x414c343du
           : j == 3 ? 0x4a2f20abu
           : j == 4 ? 0xaa2ca1afu
           : j == 5 ? 0x29e821a5u
           : j == 6 ? 0xcb6915c1u
                    : 0x56c58311u;
}
