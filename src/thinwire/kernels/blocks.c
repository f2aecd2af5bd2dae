/* Sparse rounds on a CPU: blocks of 64 x 64 entries, each worked on while it is in a core's cache.
 *
 * Every sum has one order and every fused multiply-add is written as such (compile with -ffp-contract=off). Vectors run over
 * columns, whose sums do not meet, so their width changes no bit: AVX-512, AVX2 and plain C give the same results.
 */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && !defined(PLAIN_C)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && !defined(PLAIN_C)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif

#define N 64                /* rows and columns of a block */
#define L (N * N)           /* its entries */
#define MOST_THREADS 64
#define BLOCKS_OF_A_THREAD 8 /* for fewer a thread does not pay */
#define SPARSE (6 * N)      /* entries of a block up to which its rows are summed entry by entry */

typedef float V __attribute__((vector_size(4 * LANES), may_alias));
typedef float VU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t IU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Block[N][N] __attribute__((aligned(64)));

static inline V load(const float *p) { return (V) * (const VU *)p; }
static inline void store(float *p, V v) { *(VU *)p = (VU)v; }
static inline I load_bits(const float *p) { return (I) * (const IU *)p; }

/* The same number in all lanes; x - 0 is x, of any x. */
static inline V all(float x) { return x - (V){0}; }
static inline I all_bits(int32_t x) { return x - (I){0}; }

/* a b + c, rounded once */
static inline V fused(V a, V b, V c) {
#if LANES == 16
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* Bit i is set where a[i] > b[i]. */
static inline uint32_t greater(I a, I b) {
#if LANES == 16
    return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b);
#elif LANES == 8
    return (uint32_t)_mm256_movemask_ps((__m256)_mm256_cmpgt_epi32((__m256i)a, (__m256i)b));
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint32_t)(a[i] > b[i]) << i;
    return bits;
#endif
}

static inline I larger(I a, I b) {
    I first = a > b;
    return (a & first) | (b & ~first);
}

/* --- Threads over blocks ------------------------------------------------------------------------------------------------ */

typedef void (*Work)(void *job, long first, long last);
typedef struct {
    Work work;
    void *job;
    long first, last;
} Share;

static void *run(void *share) {
    Share *s = share;
    s->work(s->job, s->first, s->last);
    return NULL;
}

/* Blocks are independent of each other, so how they are dealt to threads changes nothing. */
static void deal(Work work, void *job, long blocks, int threads) {
    Share shares[MOST_THREADS];
    pthread_t ids[MOST_THREADS];
    int started[MOST_THREADS];
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > blocks / BLOCKS_OF_A_THREAD) threads = (int)(blocks / BLOCKS_OF_A_THREAD);
    if (threads < 1) threads = 1;
    for (int t = 0; t < threads; t++) shares[t] = (Share){work, job, blocks * t / threads, blocks * (t + 1) / threads};
    for (int t = 1; t < threads; t++) started[t] = pthread_create(&ids[t], NULL, run, &shares[t]) == 0;
    run(&shares[0]);
    for (int t = 1; t < threads; t++) {
        if (started[t])
            pthread_join(ids[t], NULL);
        else
            run(&shares[t]); /* no more threads to be had */
    }
}

/* --- The transform ------------------------------------------------------------------------------------------------------ */

/* The DCT matrix, and what is left of it after folding three times into sums and differences of mirrored entries: odd rows of
 * 64, of 32, of 16, and the 8 x 8 rest. With a t: transposed, for the inverse. 1,408 products for a vector instead of 4,096. */
static float P[N][N], A[32][32], B[16][16], C[8][8], D[8][8], At[32][32], Bt[16][16], Ct[8][8], Dt[8][8];

void thinwire_init(const float *matrix) {
    memcpy(P, matrix, sizeof P);
    for (int k = 0; k < 32; k++)
        for (int j = 0; j < 32; j++) At[j][k] = A[k][j] = P[2 * k + 1][j];
    for (int k = 0; k < 16; k++)
        for (int j = 0; j < 16; j++) Bt[j][k] = B[k][j] = P[4 * k + 2][j];
    for (int k = 0; k < 8; k++)
        for (int j = 0; j < 8; j++) {
            Ct[j][k] = C[k][j] = P[8 * k + 4][j];
            Dt[j][k] = D[k][j] = P[8 * k][j];
        }
}

/* out[k] = sum over j of M[k][j] in[j], four k at a time, for two vectors of columns. */
#define PRODUCT(n, M, in, OUT)                                                             \
    for (int k = 0; k < n; k += 4) {                                                       \
        V p0 = {0}, p1 = {0}, q0 = {0}, q1 = {0}, r0 = {0}, r1 = {0}, t0 = {0}, t1 = {0}; \
        for (int j = 0; j < n; j++) {                                                      \
            V x = in[j][0], y = in[j][1], m;                                               \
            m = all(M[k][j]), p0 = fused(m, x, p0), p1 = fused(m, y, p1);                  \
            m = all(M[k + 1][j]), q0 = fused(m, x, q0), q1 = fused(m, y, q1);              \
            m = all(M[k + 2][j]), r0 = fused(m, x, r0), r1 = fused(m, y, r1);              \
            m = all(M[k + 3][j]), t0 = fused(m, x, t0), t1 = fused(m, y, t1);              \
        }                                                                                  \
        OUT(k, p0, p1) OUT(k + 1, q0, q1) OUT(k + 2, r0, r1) OUT(k + 3, t0, t1)            \
    }

/* out = P in, for all columns of a block; `in` has rows that are `stride` apart. */
static void forward(const float *in, long stride, Block out) {
    for (int c = 0; c < N; c += 2 * LANES) {
        V s1[32][2], d1[32][2], s2[16][2], d2[16][2], s3[8][2], d3[8][2];
        for (int h = 0; h < 2; h++) {
            for (int j = 0; j < 32; j++) {
                V x = load(in + j * stride + c + LANES * h), y = load(in + (63 - j) * stride + c + LANES * h);
                s1[j][h] = x + y, d1[j][h] = x - y;
            }
            for (int j = 0; j < 16; j++) s2[j][h] = s1[j][h] + s1[31 - j][h], d2[j][h] = s1[j][h] - s1[31 - j][h];
            for (int j = 0; j < 8; j++) s3[j][h] = s2[j][h] + s2[15 - j][h], d3[j][h] = s2[j][h] - s2[15 - j][h];
        }
#define ROW(at, x, y) store(&out[at][c], x), store(&out[at][c + LANES], y);
#define ROW_A(k, x, y) ROW(2 * (k) + 1, x, y)
#define ROW_B(k, x, y) ROW(4 * (k) + 2, x, y)
#define ROW_C(k, x, y) ROW(8 * (k) + 4, x, y)
#define ROW_D(k, x, y) ROW(8 * (k), x, y)
        PRODUCT(32, A, d1, ROW_A)
        PRODUCT(16, B, d2, ROW_B)
        PRODUCT(8, C, d3, ROW_C)
        PRODUCT(8, D, s3, ROW_D)
    }
}

/* out = P^T in, for all columns of a block; `out` has rows that are `stride` apart. */
static void inverse(Block in, float *out, long stride) {
    for (int c = 0; c < N; c += 2 * LANES) {
        V i1[32][2], i2[16][2], i3[8][2], i4[8][2], o1[32][2], o2[16][2], o3[8][2], o4[8][2], e2[16][2], e1[32][2];
        for (int h = 0; h < 2; h++) {
            for (int k = 0; k < 32; k++) i1[k][h] = load(&in[2 * k + 1][c + LANES * h]);
            for (int k = 0; k < 16; k++) i2[k][h] = load(&in[4 * k + 2][c + LANES * h]);
            for (int k = 0; k < 8; k++) i3[k][h] = load(&in[8 * k + 4][c + LANES * h]), i4[k][h] = load(&in[8 * k][c + LANES * h]);
        }
#define TO_1(k, x, y) o1[k][0] = x, o1[k][1] = y;
#define TO_2(k, x, y) o2[k][0] = x, o2[k][1] = y;
#define TO_3(k, x, y) o3[k][0] = x, o3[k][1] = y;
#define TO_4(k, x, y) o4[k][0] = x, o4[k][1] = y;
        PRODUCT(8, Dt, i4, TO_4)
        PRODUCT(8, Ct, i3, TO_3)
        PRODUCT(16, Bt, i2, TO_2)
        PRODUCT(32, At, i1, TO_1)
        for (int h = 0; h < 2; h++) {
            for (int j = 0; j < 8; j++) e2[j][h] = o4[j][h] + o3[j][h], e2[15 - j][h] = o4[j][h] - o3[j][h];
            for (int j = 0; j < 16; j++) e1[j][h] = e2[j][h] + o2[j][h], e1[31 - j][h] = e2[j][h] - o2[j][h];
            for (int j = 0; j < 32; j++) {
                store(out + j * stride + c + LANES * h, e1[j][h] + o1[j][h]);
                store(out + (63 - j) * stride + c + LANES * h, e1[j][h] - o1[j][h]);
            }
        }
    }
}

static void transpose8(const float *in, float *out) {
#if LANES >= 8
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(in + i * N);
    for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44), r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44), r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * N, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * N, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
#else
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) out[j * N + i] = in[i * N + j];
#endif
}

static void transpose(Block in, Block out) {
    for (int i = 0; i < N; i += 8)
        for (int j = 0; j < N; j += 8) transpose8(&in[i][j], &out[j][i]);
}

/* --- The largest entries ------------------------------------------------------------------------------------------------ */

typedef struct {
    int32_t top[L] __attribute__((aligned(64))), size[L] __attribute__((aligned(64)));
    uint16_t at[L];
} Candidates;

/* The k-th largest of n numbers that are not negative, n a multiple of LANES: a search bit by bit, from the top. */
static int32_t kth_largest(const int32_t *x, int n, int k) {
    int32_t found = 0;
    for (int bit = 30; bit >= 0; bit--) {
        int32_t trial = found | (int32_t)(1u << bit), count = 0;
        I limit = all_bits(trial - 1), many = {0};
        for (int i = 0; i < n; i += LANES) many -= *(const I *)(x + i) > limit;
        for (int i = 0; i < LANES; i++) count += many[i];
        if (count < k) continue;
        found = trial;
        if (count == k) { /* the smallest of those that reach it */
            int32_t least = INT32_MAX;
            for (int i = 0; i < n; i++)
                if (x[i] >= found && x[i] < least) least = x[i];
            return least;
        }
    }
    return found;
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
                *(I *)(c->top + r * N + j) = most;
            }
        least = kth_largest(c->top, rows * N, k);
    }
    I below = all_bits(least - 1);
    for (int r = 0; r < N; r++)
        for (int j = 0; j < N; j += LANES) {
            I size = load_bits(in + r * stride + j) & magnitude;
            for (uint32_t hits = greater(size, below); hits; hits &= hits - 1) {
                int lane = __builtin_ctz(hits);
                c->at[n] = (uint16_t)(r * N + j + lane), c->size[n++] = size[lane];
            }
        }
    if (n > k) {
        int padded = (n + LANES - 1) / LANES * LANES, spare = k, kept = 0;
        for (int i = n; i < padded; i++) c->size[i] = -1;
        int32_t limit = kth_largest(c->size, padded, k);
        for (int i = 0; i < n; i++) spare -= c->size[i] > limit;
        for (int i = 0; i < n; i++)
            if (c->size[i] > limit || (c->size[i] == limit && spare-- > 0)) c->at[kept++] = c->at[i];
    }
    for (int i = 0; i < k; i++) indices[i] = c->at[i], values[i] = in[(c->at[i] / N) * stride + c->at[i] % N];
}

/* --- Encoding ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *in;
    float *out;
    long in_stride, out_stride, X;
    float decay, scale;
    int k;
    uint16_t *indices;
    float *values;
} Encode;

static void prefetch(const float *block, long stride) {
    for (int r = 0; r < N; r++)
        for (int j = 0; j < N; j += 16) __builtin_prefetch(block + r * stride + j, 0, 2);
}

static void encode_blocks(void *job, long first, long last) {
    const Encode *e = job;
    Block a, b;
    Candidates c;
    V decay = all(e->decay), scale = all(e->scale);
    for (long n = first; n < last; n++) {
        long y = n / e->X * N, x = n % e->X * N;
        float *out = e->out + y * e->out_stride + x;
        if (e->in) {
            const float *in = e->in + y * e->in_stride + x;
            int another = n % e->X + 1 < e->X; /* the next block is on its way while this one is worked on */
            forward(in, e->in_stride, a);
            if (another) prefetch(in + N, e->in_stride);
            transpose(a, b);
            forward(b[0], N, a);
            if (another) prefetch(out + N, e->out_stride);
            for (int i = 0; i < N; i += 8) {
                for (int j = 0; j < N; j += 8) transpose8(&a[j][i], &b[i][j]);
                for (int r = i; r < i + 8; r++)
                    for (int j = 0; j < N; j += LANES) {
                        float *here = out + r * e->out_stride + j;
                        V new = load(&b[r][j]) * scale;
                        if (e->decay != 0) new = fused(load(&b[r][j]), scale, load(here) * decay);
                        store(here, new), store(&b[r][j], new);
                    }
            }
        }
        if (!e->k) continue;
        if (e->in)
            largest(b[0], N, e->k, e->indices + n * e->k, e->values + n * e->k, &c);
        else
            largest(out, e->out_stride, e->k, e->indices + n * e->k, e->values + n * e->k, &c);
    }
}

/* out <- decay out + scale P in P^T of Y x X blocks, unless `in` is null; then the k largest entries of each, unless k is 0. */
void thinwire_encode(const float *in, long in_stride, float *out, long out_stride, long Y, long X, float decay, float scale,
                     int k, uint16_t *indices, float *values, int threads) {
    Encode e = {in, out, in_stride, out_stride, X, decay, scale, k, indices, values};
    deal(encode_blocks, &e, Y * X, threads);
}

/* slot[index] <- slot[index] - scale value for the k entries of each block; the product is rounded first. */
void thinwire_subtract(float *slot, long stride, long Y, long X, int k, const uint16_t *indices, const float *values,
                       float scale) {
    for (long n = 0; n < Y * X; n++) {
        float *block = slot + n / X * N * stride + n % X * N;
        for (int i = 0; i < k; i++, indices++, values++) block[*indices / N * stride + *indices % N] += *values * -scale;
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
    double *squares;
} Decode;

typedef struct {
    float sum[L], share[L];
    uint16_t seen[L];
} Merged;

/* The mean of each entry that anybody sent, added in the order of the workers; returns how many there are. */
static int merge(const Decode *d, long block, Merged *m) {
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
                m->sum[e] += v, m->share[e] += weight;
            } else {
                known[e / 8] |= (uint8_t)(1 << e % 8);
                m->sum[e] = v, m->share[e] = weight, m->seen[count++] = (uint16_t)e;
            }
        }
    }
    for (int i = 0; i < count; i++) {
        int e = m->seen[i];
        float by = d->total != 0 ? d->total : m->share[e];
        m->sum[e] = by > 0 ? m->sum[e] / by : 0;
    }
    return count;
}

static void decode_blocks(void *job, long first, long last) {
    const Decode *d = job;
    Merged m;
    Block a, b;
    for (long n = first; n < last; n++) {
        int count = merge(d, n, &m);
        if (d->squares) {
            double sum = 0;
            for (int i = 0; i < count; i++) sum += (double)m.sum[m.seen[i]] * m.sum[m.seen[i]];
            d->squares[n] = sum;
            continue;
        }
        memset(a, 0, sizeof a);
        if (count <= SPARSE) { /* a row is a sum of few basis vectors */
            for (int i = 0; i < count; i++) {
                int e = m.seen[i];
                V q = all(m.sum[e]);
                for (int j = 0; j < N; j += LANES) store(&a[e / N][j], fused(q, load(&P[e % N][j]), load(&a[e / N][j])));
            }
        } else {
            for (int i = 0; i < count; i++) a[m.seen[i] % N][m.seen[i] / N] = m.sum[m.seen[i]];
            inverse(a, b[0], N);
            transpose(b, a);
        }
        inverse(a, d->out + n / d->X * N * d->stride + n % d->X * N, d->stride);
    }
}

/* The mean of the entries of all workers and its inverse transform, for Y x X blocks; or, where `squares` is not null, the sum
 * of squares of each block's mean. */
void thinwire_decode(const uint16_t *indices, long index_stride, const float *values, long value_stride, const float *weights,
                     long workers, int k, float total, float *out, long stride, long Y, long X, double *squares, int threads) {
    Decode d = {indices, values, weights, workers, index_stride, value_stride, k, total, out, stride, X, squares};
    deal(decode_blocks, &d, Y * X, threads);
}
