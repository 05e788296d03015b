// Codes of 4 bits as operands of int8 products. ptx.cuh stands before.

// The four codes in the low or in the high halves of a word's bytes, minus the zero point, as int8. Without HAS_ZERO they are
// 16 times as large: the upper halves of the bytes. `zeros`: the zero point plus 8, in each byte.
template <bool HIGH, bool HAS_ZERO>
DEVICE unsigned int four_of(unsigned int word, unsigned int zeros) {
    if constexpr (!HAS_ZERO) return masked_xor(HIGH ? word : word << 4, 0xf0f0f0f0, 0x80808080);
    const unsigned int codes = masked_or(HIGH ? word >> 4 : word, 0x0f0f0f0f, 0x80808080);
    return codes - zeros ^ 0x80808080;  // no byte borrows from the next
}
