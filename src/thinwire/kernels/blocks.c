/* Sparse rounds on a CPU: blocks of 64 x 64 entries, each worked on while it is in a core's cache. See vectors.h on bits. */
#include "vectors.h"

#include "cosines.h"

#define SPARSE (3 * N)    /* entries of a block up to which its rows are summed entry by entry */
#define SCATTERED (4 * N) /* entries of all workers up to which they are merged one by one */

static float basis[N][N]; /* P / sqrt(32): what an entry adds to its row, before the other side is transformed */

void thinwire_init(const float *matrix, const float *table) {
    memcpy(basis, matrix, sizeof basis);
    make_cosines(table);
}

/* --- The largest entries ------------------------------------------------------------------------------------------------ */

typedef struct {
    int16_t top[L] __attribute__((aligned(64)));
    int32_t size[L + 8] __attribute__((aligned(64)));
    uint16_t at[L + 8];
} Candidates;

/* A number that at least k of n are not below, n a multiple of 2 LANES: the upper half of the k-th largest, or a little less. */
static int32_t about_kth(const int16_t *x, int n, int k) {
    int found = 0;
    for (int bit = 14; bit >= 0; bit--) {
        int trial = found | 1 << bit;
        S limit = (int16_t)(trial - 1) - (S){0}, many = {0};
        for (int i = 0; i < n; i += 2 * LANES) many -= *(const S *)(x + i) > limit;
        int count = total((((I)many << 16) >> 16) + ((I)many >> 16));
        if (count < k) continue;
        found = trial;
        if (count <= k + k / 16) break;
    }
    return (int32_t)found << 16;
}

/* A limit: those above it and the first of those equal to it are the k largest of n numbers, n a multiple of LANES.
 *
 * None is negative, and k of them are not below `low`. */
static int32_t limit_of(const int32_t *x, int n, int k, int32_t low) {
    I most = *(const I *)x;
    for (int i = LANES; i < n; i += LANES) most = larger(most, *(const I *)(x + i));
    int32_t high = low;
    for (int i = 0; i < LANES; i++) high = most[i] > high ? most[i] : high;
    if (high == low) return low;
    int first = 31 - __builtin_clz((uint32_t)(high ^ low));
    int32_t found = (int32_t)((uint32_t)low & ~((2u << first) - 1));
    for (int bit = first; bit >= 0; bit--) {
        int32_t trial = found | (int32_t)(1u << bit);
        I limit = all_bits(trial - 1), many = {0};
        for (int i = 0; i < n; i += LANES) many -= *(const I *)(x + i) > limit;
        int count = total(many);
        if (count == k) return trial - 1;
        if (count > k) found = trial;
    }
    return found;
}

/* Places of the bits that are set in a row, from place n on; more may be written behind them. */
INLINE int places(uint64_t hits, int row, uint16_t *at, int n) {
    int many = __builtin_popcountll(hits), base = row * N;
    uint16_t *to = at + n;
    for (int i = 0; i < 2; i++, hits &= hits - 1) to[i] = (uint16_t)(base + __builtin_ctzll(hits | 1ull << 63));
    if (many > 2)
        for (int i = 2; i < 6; i++, hits &= hits - 1) to[i] = (uint16_t)(base + __builtin_ctzll(hits | 1ull << 63));
    for (int i = 6; i < many; i++, hits &= hits - 1) to[i] = (uint16_t)(base + __builtin_ctzll(hits));
    return n + many;
}

/* The k entries of largest magnitude: places in ascending order, and values. Of equal ones the first; NaN counts as largest.
 *
 * Magnitudes are compared as bit patterns without the sign. A lane is every `rows`-th row of one column. The k-th largest of
 * the maxima of all lanes is a lower limit of the k-th largest entry, so few entries are left to look at. */
static void largest(const float *in, long stride, int k, uint16_t *indices, float *values, Candidates *c) {
    const I magnitude = all_bits(INT32_MAX);
    int rows = 1, n = 0;
    int32_t least = 0;
    while (rows * N < 8 * k && rows < N) rows *= 2;
    if (rows <= N / 2) {
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < N; j += LANES) {
                I most = load_bits(in + r * stride + j) & magnitude;
                for (int d = r + rows; d < N; d += rows) most = larger(most, load_bits(in + d * stride + j) & magnitude);
                *(Half *)(c->top + r * N + j) = __builtin_convertvector(most >> 16, Half);
            }
        least = about_kth(c->top, rows * N, k);
    }
    I below = all_bits(least - 1);
    for (int r = 0; r < N; r++) {
        uint64_t hits = 0;
        for (int j = 0; j < N; j += LANES) hits |= greater(load_bits(in + r * stride + j) & magnitude, below) << j;
        n = places(hits, r, c->at, n);
    }
    if (n > k) {
        int padded = (n + LANES - 1) / LANES * LANES, spare = k, kept = 0;
        for (int i = 0; i < n; i++) {
            int32_t bits;
            memcpy(&bits, in + (c->at[i] / N) * stride + c->at[i] % N, 4);
            c->size[i] = bits & INT32_MAX;
        }
        for (int i = n; i < padded; i++) c->size[i] = -1;
        int32_t limit = limit_of(c->size, padded, k, least);
        for (int i = 0; i < n; i++) spare -= c->size[i] > limit;
        for (int i = 0; i < n; i++) {
            int equal = c->size[i] == limit;
            c->at[kept] = c->at[i];
            kept += (c->size[i] > limit) | (equal & (spare > 0));
            spare -= equal;
        }
    }
    for (int i = 0; i < k; i++) indices[i] = c->at[i], values[i] = in[(c->at[i] / N) * stride + c->at[i] % N];
}

/* --- Encoding ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *in;
    float *out, *square; /* the running second moment of `in`, or null */
    long in_stride, out_stride, square_stride, X;
    float decay, scale;
    float clip, b2, fade, eps; /* of the second moment; fade: 1 / sqrt(1 - b2^step) */
    int k;
    uint16_t *indices;
    float *values;
} Encode;

/* g / (sqrt(v) fade + eps) of a block, with v <- b2 v + (1 - b2) g^2 first. */
static void whiten(const Encode *e, const float *in, float *square, Block out) {
    V clip = all(e->clip), b2 = all(e->b2), rest = all(1 - e->b2), fade = all(e->fade), eps = all(e->eps);
    for (int r = 0; r < N; r++)
        for (int j = 0; j < N; j += LANES) {
            float *at = square + r * e->square_stride + j;
            V g = load(in + r * e->in_stride + j) * clip, v = fused(g * rest, g, load(at) * b2);
            store(at, v), store(&out[r][j], g / fused(root(v), fade, eps));
        }
}

static inline long corner(long n, long X, long stride) { return n / X * N * stride + n % X * N; }

/* out <- decay out + scale a of a block, and a likewise. */
static void accumulate(const Encode *e, float *out, Block a) {
    V decay = all(e->decay), scale = all(e->scale / 32);
    for (int r = 0; r < N; r++)
        for (int j = 0; j < N; j += LANES) {
            float *here = out + r * e->out_stride + j;
            V new = load(&a[r][j]) * scale;
            if (e->decay != 0) new = fused(load(&a[r][j]), scale, load(here) * decay);
            store(here, new), store(&a[r][j], new);
        }
}

static void encode_blocks(void *job, long first, long last) {
    const Encode *e = job;
    Block a;
    Candidates c;
    for (long n = first; n < last; n++) {
        float *out = e->out + corner(n, e->X, e->out_stride);
        if (e->in) {
            const float *in = e->in + corner(n, e->X, e->in_stride);
            Ahead in2 = {0}, out2 = {0}, square2 = {0}; /* the next block is on its way while this one is worked on */
            if (n + 1 < last) {
                in2 = (Ahead){e->in + corner(n + 1, e->X, e->in_stride), e->in_stride};
                out2 = (Ahead){e->out + corner(n + 1, e->X, e->out_stride), e->out_stride};
                if (e->square) square2 = (Ahead){e->square + corner(n + 1, e->X, e->square_stride), e->square_stride};
            }
            if (e->square) whiten(e, in, e->square + corner(n, e->X, e->square_stride), a);
            forward(e->square ? a[0] : in, e->square ? N : e->in_stride, a, in2, square2);
            transpose(a);
            forward(a[0], N, a, out2, (Ahead){0});
            transpose(a);
            accumulate(e, out, a);
        }
        if (!e->k) continue;
        const float *from = e->in ? a[0] : out;
        largest(from, e->in ? N : e->out_stride, e->k, e->indices + n * e->k, e->values + n * e->k, &c);
    }
}

/* out <- decay out + scale P in P^T of Y x X blocks, unless `in` is null; then the k largest entries of each, unless k is 0.
 * Where `square` is not null, `in` is whitened first. */
void thinwire_encode(const float *in, long in_stride, float *out, long out_stride, long Y, long X, float decay, float scale,
                     float *square, long square_stride, float clip, float b2, float fade, float eps, int k, uint16_t *indices,
                     float *values, int threads) {
    Encode e = {in, out, square, in_stride, out_stride, square_stride, X, decay, scale, clip, b2, fade, eps, k, indices, values};
    deal(encode_blocks, &e, Y * X, threads);
}

/* slot[index] <- slot[index] - scale value for the k entries of each block; the product is rounded first. */
void thinwire_subtract(float *slot, long stride, long Y, long X, int k, const uint16_t *indices, const float *values,
                       float scale) {
    for (long n = 0; n < Y * X; n++) {
        float *block = slot + corner(n, X, stride), *next = slot + corner(n + 1 < Y * X ? n + 1 : n, X, stride);
        const uint16_t *then = n + 1 < Y * X ? indices + k : indices;
        for (int i = 0; i < k; i++, indices++, values++) {
            __builtin_prefetch(next + then[i] / N * stride + then[i] % N, 1, 3);
            block[*indices / N * stride + *indices % N] += *values * -scale;
        }
    }
}

/* --- Decoding ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    const uint16_t *indices; /* [workers][index_stride] */
    const float *values;     /* [workers][value_stride] */
    const float *weights;    /* [workers], or null where all are 1 */
    long workers, index_stride, value_stride;
    int k;
    float total; /* divides all sums; 0 to divide each by the weight of its senders */
    float *out;
    long stride, X;
    long rows, cols; /* of `out`, which is stepped; 0 where it is overwritten */
    float rate;
    int sign;
    double *squares;
} Decode;

typedef struct {
    float sum[L] __attribute__((aligned(64))), share[L] __attribute__((aligned(64)));
    uint16_t seen[SCATTERED];
} Merged;

/* The mean of each entry that anybody sent, added in the order of the workers; returns how many there are. */
static int merge_few(const Decode *d, long block, Merged *m) {
    float *sum = m->sum, *share = m->share;
    int count = 0;
    uint8_t known[L / 8];
    memset(known, 0, sizeof known);
    for (long w = 0; w < d->workers; w++) {
        const uint16_t *at = d->indices + w * d->index_stride + block * d->k;
        const float *value = d->values + w * d->value_stride + block * d->k;
        float weight = d->weights ? d->weights[w] : 1;
        for (int i = 0; i < d->k; i++) {
            int e = at[i];
            float v = d->weights ? value[i] * weight : value[i];
            if (known[e / 8] >> e % 8 & 1) {
                sum[e] += v, share[e] += weight;
            } else {
                known[e / 8] |= (uint8_t)(1 << e % 8);
                sum[e] = v, share[e] = weight, m->seen[count++] = (uint16_t)e;
            }
        }
    }
    for (int i = 0; i < count; i++) {
        int e = m->seen[i];
        float by = d->total != 0 ? d->total : share[e];
        sum[e] = by > 0 ? sum[e] / by : 0;
    }
    return count;
}

/* The same of many: the mean of every entry, zero where nobody sent it, as a block that is transposed. */
static void merge_many(const Decode *d, long block, Merged *m) {
    float *sum = m->sum, *share = m->share;
    memset(m->sum, 0, sizeof m->sum);
    if (d->total == 0) memset(m->share, 0, sizeof m->share);
    for (long w = 0; w < d->workers; w++) {
        const uint16_t *at = d->indices + w * d->index_stride + block * d->k;
        const float *value = d->values + w * d->value_stride + block * d->k;
        float weight = d->weights ? d->weights[w] : 1;
        for (int i = 0; i < d->k; i++) {
            int e = at[i] % N * N + at[i] / N;
            sum[e] += d->weights ? value[i] * weight : value[i];
            if (d->total == 0) share[e] += weight;
        }
    }
    V by = all(d->total), none = {0};
    for (int i = 0; i < L; i += LANES) {
        if (d->total == 0) by = load(share + i);
        I there = by > none;
        store(sum + i, (V)((I)(load(sum + i) / (V)((I)by | (~there & (I)all(1)))) & there));
    }
}

/* Q P of a block, up to the factor that makes it orthonormal. */
static void half_inverse(const Decode *d, long block, Merged *m, Block out) {
    if (d->workers * d->k <= SCATTERED) {
        int count = merge_few(d, block, m);
        const float *sum = m->sum;
        if (count <= SPARSE) { /* a row is a sum of few basis vectors */
            memset(out, 0, sizeof(Block));
            for (int i = 0; i < count; i++) {
                int e = m->seen[i];
                V q = all(sum[e]);
                for (int j = 0; j < N; j += LANES) store(&out[e / N][j], fused(q, load(&basis[e % N][j]), load(&out[e / N][j])));
            }
            return;
        }
        memset(out, 0, sizeof(Block));
        for (int i = 0; i < count; i++) out[m->seen[i] % N][m->seen[i] / N] = sum[m->seen[i]] / 32;
    } else {
        merge_many(d, block, m);
        V less = all(1.0f / 32);
        for (int i = 0; i < L; i += LANES) store(&out[i / N][i % N], load(m->sum + i) * less);
    }
    inverse(out, out[0], N, (Ahead){0});
    transpose(out);
}

static double square_of(const Decode *d, long block, Merged *m) {
    double sum = 0;
    if (d->workers * d->k <= SCATTERED) {
        int count = merge_few(d, block, m);
        for (int i = 0; i < count; i++) sum += (double)m->sum[m->seen[i]] * m->sum[m->seen[i]];
        return sum;
    }
    merge_many(d, block, m);
    double some[8] = {0}; /* one order of additions, whatever the width of vectors */
    for (int i = 0; i < L; i += 8)
        for (int j = 0; j < 8; j++) some[j] += (double)m->sum[i + j] * m->sum[i + j];
    for (int j = 0; j < 8; j++) sum += some[j];
    return sum;
}

/* x <- x - rate q of the part of a block that is there, or of the sign of q. */
static void step(const Decode *d, long block, Block q) {
    long y = block / d->X * N, x = block % d->X * N;
    long rows = d->rows - y < N ? d->rows - y : N, cols = d->cols - x < N ? d->cols - x : N;
    V rate = all(-d->rate), none = {0};
    I plus = (I)all(1), minus = (I)all(-1);
    float last[N];
    if (cols < N) memset(last, 0, sizeof last);
    for (long r = 0; r < rows; r++) {
        float *to = d->out + (y + r) * d->stride + x, *here = to;
        if (cols < N) memcpy(here = last, to, 4 * (size_t)cols);
        for (int j = 0; j < cols; j += LANES) {
            V by = load(&q[r][j]);
            if (d->sign) by = (V)(((by > none) & plus) | ((by < none) & minus));
            store(here + j, fused(by, rate, load(here + j)));
        }
        if (cols < N) memcpy(to, last, 4 * (size_t)cols);
    }
}

static void decode_blocks(void *job, long first, long last) {
    const Decode *d = job;
    Merged m;
    Block a;
    for (long n = first; n < last; n++) {
        if (d->squares) {
            d->squares[n] = square_of(d, n, &m);
            continue;
        }
        float *out = d->out + corner(n, d->X, d->stride);
        half_inverse(d, n, &m, a);
        if (d->rows) {
            long y = (n + 1) / d->X * N, x = (n + 1) % d->X * N; /* the next block, where it is a whole one */
            int whole = n + 1 < last && y + N <= d->rows && x + N <= d->cols;
            inverse(a, a[0], N, whole ? (Ahead){d->out + y * d->stride + x, d->stride} : (Ahead){0});
            step(d, n, a);
        } else {
            inverse(a, out, d->stride, (Ahead){0});
        }
    }
}

/* The mean of the entries of all workers and its inverse transform, for Y x X blocks: written to `out`, or taken off it times
 * `rate`, or its sign, where it has `rows`; or, where `squares` is not null, the sum of squares of each block's mean. */
void thinwire_decode(const uint16_t *indices, long index_stride, const float *values, long value_stride, const float *weights,
                     long workers, int k, float total, float *out, long stride, long Y, long X, long rows, long cols,
                     float rate, int sign, double *squares, int threads) {
    Decode d = {indices, values, weights, workers, index_stride, value_stride, k, total, out, stride, X, rows, cols, rate, sign,
                squares};
    deal(decode_blocks, &d, Y * X, threads);
}
