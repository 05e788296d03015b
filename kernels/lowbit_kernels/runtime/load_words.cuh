// Loads of a few adjacent words from memory. ptx.cuh and sm90.cuh stand before.

// Loads BYTES, a power of two, from a multiple of it (of 16, if it is larger).
template <int BYTES, int WORDS>
DEVICE void load_words(uint32 (&to)[WORDS], const void *from) {
    if constexpr (BYTES == 1) to[0] = *(const unsigned char *)from;
    else if constexpr (BYTES == 2) to[0] = *(const unsigned short *)from;
    else if constexpr (BYTES == 4) to[0] = *(const uint32 *)from;
    else if constexpr (BYTES == 8) {
        const uint2 x = *(const uint2 *)from;
        to[0] = x.x, to[1] = x.y;
    } else {
#pragma unroll
        for (int i = 0; i < BYTES / 16; ++i) {
            const uint4 x = ((const uint4 *)from)[i];
            to[i * 4] = x.x, to[i * 4 + 1] = x.y, to[i * 4 + 2] = x.z, to[i * 4 + 3] = x.w;
        }
    }
}
