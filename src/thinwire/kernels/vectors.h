/* Vectors of single numbers, as wide as the CPU has them, and threads over blocks.
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

typedef float V __attribute__((vector_size(4 * LANES), may_alias));
typedef float VU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t IU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t S __attribute__((vector_size(4 * LANES), may_alias)); /* twice as many */
typedef int16_t Half __attribute__((vector_size(2 * LANES), may_alias));
typedef float Block[N][N] __attribute__((aligned(64)));

#define INLINE static inline __attribute__((always_inline))

INLINE V load(const float *p) { return (V) * (const VU *)p; }
INLINE void store(float *p, V v) { *(VU *)p = (VU)v; }
INLINE I load_bits(const float *p) { return (I) * (const IU *)p; }

/* The same number in all lanes; x - 0 is x, of any x. */
INLINE V all(float x) { return x - (V){0}; }
INLINE I all_bits(int32_t x) { return x - (I){0}; }

/* a b + c, rounded once */
INLINE V fused(V a, V b, V c) {
#if LANES == 16
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE V root(V a) {
#if LANES == 16
    return (V)_mm512_sqrt_ps((__m512)a);
#elif LANES == 8
    return (V)_mm256_sqrt_ps((__m256)a);
#else
    for (int i = 0; i < LANES; i++) a[i] = sqrtf(a[i]);
    return a;
#endif
}

/* Bit i is set where a[i] > b[i]. */
INLINE uint64_t greater(I a, I b) {
#if LANES == 16
    return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b);
#elif LANES == 8
    return (uint32_t)_mm256_movemask_ps((__m256)_mm256_cmpgt_epi32((__m256i)a, (__m256i)b));
#else
    uint64_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint64_t)(a[i] > b[i]) << i;
    return bits;
#endif
}

INLINE I larger(I a, I b) {
    I first = a > b;
    return (a & first) | (b & ~first);
}

/* The sum of all lanes. */
INLINE int total(I a) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)a);
#elif LANES == 8
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
#else
    return a[0] + a[1] + a[2] + a[3];
#endif
}

#if LANES >= 8
/* Eight rows of eight columns, as columns. */
INLINE void turn(const float *in, __m256 *r) {
    __m256 t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(in + i * N);
    for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44), r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44), r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20), t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) r[i] = t[i];
}
#endif

/* In place: a block takes half of a core's first-level cache, and the rest is needed for what comes and goes. */
static void transpose(Block a) {
#if LANES >= 8
    for (int i = 0; i < N; i += 8)
        for (int j = 0; j <= i; j += 8) {
            __m256 one[8], other[8];
            turn(&a[i][j], one), turn(&a[j][i], other);
            for (int r = 0; r < 8; r++) _mm256_storeu_ps(&a[j + r][i], one[r]), _mm256_storeu_ps(&a[i + r][j], other[r]);
        }
#else
    for (int i = 0; i < N; i++)
        for (int j = 0; j < i; j++) {
            float one = a[i][j];
            a[i][j] = a[j][i], a[j][i] = one;
        }
#endif
}

/* A block that is fetched from memory while something else is computed. */
typedef struct {
    const float *at; /* null for none */
    long stride;
} Ahead;

/* LANES / 2 rows of it. */
INLINE void fetch(Ahead a, int row) {
    if (!a.at) return;
    for (int r = row; r < row + LANES / 2; r++)
        for (int j = 0; j < N; j += 16) __builtin_prefetch(a.at + r * a.stride + j, 0, 2);
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
