/* Elias-Fano codes of sorted sets, as docs/wire-format.md has them: a row of bits for each set, then the packed low bits of all. */
#include <stdint.h>
#include <string.h>

/* Bits `low` of number i of `count` that are packed: whole bytes of each first, then the rest of eight numbers together. */
static inline uint32_t unpacked(const uint8_t *packed, long count, int low, long i) {
    int bytes = low / 8, rest = low % 8;
    uint32_t number = bytes ? packed[i] : 0; /* low < 16 */
    if (rest) {
        const uint8_t *eight = packed + count * bytes + i / 8 * rest;
        int bit = (int)(i % 8) * rest;
        uint32_t two = eight[bit / 8];
        if (bit / 8 + 1 < rest) two |= (uint32_t)eight[bit / 8 + 1] << 8;
        number |= (two >> bit % 8 & ((1u << rest) - 1)) << 8 * bytes;
    }
    return number;
}

/* Sets of k numbers below `limit` each, strictly increasing; returns 0, or 1 where the code is none of such sets. */
int thinwire_read_sets(const uint8_t *code, long sets, int k, int row, int low, int limit, uint16_t *out) {
    const uint8_t *packed = code + sets * row;
    for (long n = 0; n < sets; n++) {
        const uint8_t *bits = code + n * row;
        int found = 0;
        long last = -1;
        for (int at = 0; at < row; at += 8) {
            uint64_t word = 0;
            memcpy(&word, bits + at, row - at < 8 ? (size_t)(row - at) : 8);
            for (; word; word &= word - 1) {
                if (found == k) return 1;
                long high = at * 8 + __builtin_ctzll(word) - found;
                long number = high << low | (long)unpacked(packed, sets * k, low, n * k + found);
                if (number <= last || number >= limit) return 1;
                out[n * k + found++] = (uint16_t)number;
                last = number;
            }
        }
        if (found != k) return 1;
    }
    return 0;
}

/* The code of such sets; `code` holds zeros. */
void thinwire_write_sets(const uint16_t *numbers, long sets, int k, int row, int low, uint8_t *code) {
    int bytes = low / 8, rest = low % 8;
    uint8_t *packed = code + sets * row, *eights = packed + sets * k * bytes;
    for (long n = 0; n < sets; n++)
        for (int j = 0; j < k; j++) {
            long i = n * k + j;
            uint32_t number = numbers[i], at = (number >> low) + (uint32_t)j;
            code[n * row + at / 8] |= (uint8_t)(1u << at % 8);
            if (bytes) packed[i] = (uint8_t)number;
            if (rest) {
                int bit = (int)(i % 8) * rest;
                uint32_t two = (number >> 8 * bytes & ((1u << rest) - 1)) << bit % 8;
                eights[i / 8 * rest + bit / 8] |= (uint8_t)two;
                if (two >> 8) eights[i / 8 * rest + bit / 8 + 1] |= (uint8_t)(two >> 8);
            }
        }
}
