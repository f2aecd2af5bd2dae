/* What is in a message, as docs/wire-format.md has it: Elias-Fano codes of sorted sets, and values that are signs and scales. */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* --- Sets: a row of bits for each, then the packed low bits of all ---------------------------------------------------- */

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

/* Bits `low` of numbers `first` to `first + k` of `count`. */
static void unpack(const uint8_t *packed, long count, int low, long first, int k, uint16_t *out) {
    long nbytes = count * (low / 8) + (count + 7) / 8 * (low % 8);
    if (low >= 8 || first % 8 || k % 8 || (first + k) / 8 * low + 8 > nbytes) {
        for (int i = 0; i < k; i++) out[i] = (uint16_t)unpacked(packed, count, low, first + i);
        return;
    }
    for (int i = 0; i < k; i += 8) { /* eight numbers in `low` bytes */
        uint64_t eight;
        memcpy(&eight, packed + (first + i) / 8 * low, 8);
        for (int j = 0; j < 8; j++) out[i + j] = (uint16_t)(eight >> j * low & ((1u << low) - 1));
    }
}

/* Sets of k numbers below `limit` each, strictly increasing; returns 0, or 1 where the code is none of such sets. */
int thinwire_read_sets(const uint8_t *code, long sets, int k, int row, int low, int limit, uint16_t *out) {
    const uint8_t *packed = code + sets * row;
    for (long n = 0; n < sets; n++, out += k) {
        const uint8_t *bits = code + n * row;
        unpack(packed, sets * k, low, n * k, k, out);
        int found = 0;
        long last = -1;
        for (int at = 0; at < row; at += 8) {
            uint64_t word = 0;
            memcpy(&word, bits + at, row - at < 8 ? (size_t)(row - at) : 8);
            for (; word; word &= word - 1) {
                if (found == k) return 1;
                long high = at * 8 + __builtin_ctzll(word) - found;
                long number = high << low | out[found];
                if (number <= last || number >= limit) return 1;
                out[found++] = (uint16_t)number;
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

/* --- Values ------------------------------------------------------------------------------------------------------------- */

/* The values of blocks `first` to `first + blocks`, k to a block: its scale in bfloat16, negative where the value's bit is set. */
void thinwire_read_signs(const uint8_t *scales, const uint8_t *signs, long first, long blocks, int k, uint32_t *out) {
    for (long n = first; n < first + blocks; n++, out += k) {
        uint32_t scale = (uint32_t)scales[2 * n] << 16 | (uint32_t)scales[2 * n + 1] << 24;
        if (k % 8 == 0) {
            const uint8_t *bits = signs + n * k / 8;
            for (int i = 0; i < k; i += 8)
                for (int j = 0; j < 8; j++) out[i + j] = scale ^ ((uint32_t)bits[i / 8] >> j << 31);
        } else {
            for (int i = 0; i < k; i++) out[i] = scale ^ ((uint32_t)signs[(n * k + i) / 8] >> (n * k + i) % 8 << 31);
        }
    }
}

/* Whether the sum of the magnitudes of k values is finite, and exact in double precision, so that its order does not matter. */
static int exact(const float *values, int k) {
    int spare = 29; /* bits of a double beyond those of a single number, but for those that the sum grows by */
    for (int many = 1; many < k; many *= 2) spare--;
    uint32_t least = UINT32_MAX, most = 0;
    for (int i = 0; i < k; i++) {
        uint32_t size;
        memcpy(&size, values + i, 4);
        size &= INT32_MAX;
        most = size > most ? size : most;
        least = size - 1 < least ? size - 1 : least; /* zeros add nothing */
    }
    return most < 0xFFu << 23 && (!most || (int)(most >> 23) - (int)((least + 1) >> 23) <= spare);
}

/* Those of blocks of k values each, whose scale is their mean magnitude: all scales, then a bit for each value, which hold zeros;
 * values become what is read of them. Returns 1 where a sum of magnitudes might depend on its order: no value was changed. */
int thinwire_write_signs(float *values, long blocks, int k, uint8_t *scales, uint8_t *signs) {
    for (long n = 0; n < blocks; n++)
        if (!exact(values + n * k, k)) return 1;
    for (long n = 0; n < blocks; n++, values += k) {
        double sum = 0;
        for (int i = 0; i < k; i++) sum += fabs((double)values[i]);
        float mean = (float)(sum / k);
        uint32_t scale;
        memcpy(&scale, &mean, 4);
        scale = (scale + 0x7FFF + (scale >> 16 & 1)) & 0xFFFF0000; /* to nearest, of two as near to the even one */
        scales[2 * n] = (uint8_t)(scale >> 16), scales[2 * n + 1] = (uint8_t)(scale >> 24);
        for (int i = 0; i < k; i++) {
            uint32_t bits, read;
            memcpy(&bits, values + i, 4);
            read = scale | (bits & 0x80000000);
            memcpy(values + i, &read, 4);
            signs[(n * k + i) / 8] |= (uint8_t)(bits >> 31 << (n * k + i) % 8);
        }
    }
    return 0;
}
