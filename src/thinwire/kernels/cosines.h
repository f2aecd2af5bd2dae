/* The DCT of 64 numbers and its inverse, of many columns at once: about 580 operations for a vector instead of 4,096 products.
 *
 * With w = pi / 2n, and without the factors that make them orthonormal:
 *
 *     II    X[k] = sum over j of x[j] cos(w (2j + 1) k)
 *     III   x[j] = sum over k of X[k] cos(w (2j + 1) k)
 *     IV    X[k] = sum over j of x[j] cos(w (2j + 1)(2k + 1) / 2)
 *
 * II of n is II of n / 2 of the sums x[j] + x[n - 1 - j], which gives the even X, and IV of n / 2 of the differences, the odd
 * ones; III is the same backwards. IV of n is n / 2 rotations of x[j] and x[n - 1 - j], then two II of n / 2, c and t, then
 * X[2m] = c[m] + t[n / 2 - m] and X[2m - 1] = c[m] - t[n / 2 - m]. Of 4 numbers IV is a product with a matrix.
 */

static float cosine[256]; /* of pi m / 128 */
static float m4[4][4];
static float cos8[4], sin8[4], cos16[8], sin16[8], cos32[16], sin32[16];

static void make_cosines(const float *table) {
    memcpy(cosine, table, sizeof cosine);
    for (int k = 0; k < 4; k++)
        for (int j = 0; j < 4; j++) m4[k][j] = cosine[8 * (2 * j + 1) * (2 * k + 1) % 256];
    for (int j = 0; j < 4; j++) cos8[j] = cosine[8 * j + 4], sin8[j] = cosine[60 - 8 * j];
    for (int j = 0; j < 8; j++) cos16[j] = cosine[4 * j + 2], sin16[j] = cosine[62 - 4 * j];
    for (int j = 0; j < 16; j++) cos32[j] = cosine[2 * j + 1], sin32[j] = cosine[63 - 2 * j];
}

/* A number is a vector of columns; numbers are `a` or `b` apart in memory, LANES where nothing is between them. */
#define ALIGNED __attribute__((aligned(64)))

INLINE void iv4(const float *x, int a, float *out, int b) {
    V u = load(x), p = all(m4[0][0]) * u, q = all(m4[1][0]) * u, r = all(m4[2][0]) * u, t = all(m4[3][0]) * u;
    for (int j = 1; j < 4; j++) {
        u = load(x + j * a);
        p = fused(all(m4[0][j]), u, p), q = fused(all(m4[1][j]), u, q);
        r = fused(all(m4[2][j]), u, r), t = fused(all(m4[3][j]), u, t);
    }
    store(out, p), store(out + b, q), store(out + 2 * b, r), store(out + 3 * b, t);
}

INLINE void ii4(const float *x, float *out, int b) {
    V c = all(cosine[32]), c1 = all(cosine[16]), c3 = all(cosine[48]);
    V x0 = load(x), x1 = load(x + LANES), x2 = load(x + 2 * LANES), x3 = load(x + 3 * LANES);
    V s0 = x0 + x3, s1 = x1 + x2, d0 = x0 - x3, d1 = x1 - x2;
    store(out, s0 + s1), store(out + 2 * b, (s0 - s1) * c);
    store(out + b, fused(d0, c1, d1 * c3)), store(out + 3 * b, fused(d0, c3, d1 * -c1));
}

INLINE void iii4(const float *x, int a, float *out) {
    V c = all(cosine[32]), c1 = all(cosine[16]), c3 = all(cosine[48]);
    V x0 = load(x), x1 = load(x + a), x2 = load(x + 2 * a), x3 = load(x + 3 * a);
    V e0 = fused(x2, c, x0), e1 = fused(x2, -c, x0), o0 = fused(x1, c1, x3 * c3), o1 = fused(x1, c3, x3 * -c1);
    store(out, e0 + o0), store(out + 3 * LANES, e0 - o0), store(out + LANES, e1 + o1), store(out + 2 * LANES, e1 - o1);
}

/* The sums and differences of mirrored numbers. */
INLINE void fold(int n, const float *x, long a, float *s, float *d) {
    for (int j = 0; j < n / 2; j++) {
        V u = load(x + j * a), v = load(x + (n - 1 - j) * a);
        store(s + j * LANES, u + v), store(d + j * LANES, u - v);
    }
}

INLINE void unfold(int n, const float *e, const float *o, float *out, long b) {
    for (int j = 0; j < n / 2; j++) {
        V u = load(e + j * LANES), v = load(o + j * LANES);
        store(out + j * b, u + v), store(out + (n - 1 - j) * b, u - v);
    }
}

#define II(n, half)                                                                                              \
    INLINE void ii##n(const float *x, float *out, int b) {                                                       \
        ALIGNED float s[half * LANES], d[half * LANES];                                                          \
        fold(n, x, LANES, s, d);                                                                                 \
        ii##half(s, out, 2 * b);                                                                                 \
        iv##half(d, LANES, out + b, 2 * b);                                                                      \
    }

#define III(n, half)                                                                                             \
    INLINE void iii##n(const float *x, int a, float *out) {                                                      \
        ALIGNED float e[half * LANES], o[half * LANES];                                                          \
        iii##half(x, 2 * a, e);                                                                                  \
        iv##half(x + a, 2 * a, o, LANES);                                                                        \
        unfold(n, e, o, out, LANES);                                                                             \
    }

#define IV(n, half)                                                                                              \
    INLINE void iv##n(const float *x, int a, float *out, int b) {                                                \
        ALIGNED float p[half * LANES], q[half * LANES], c[half * LANES], t[half * LANES];                        \
        for (int j = 0; j < half; j++) {                                                                         \
            V u = load(x + j * a), v = load(x + (n - 1 - j) * a), cosj = all(cos##n[j]), sinj = all(sin##n[j]);  \
            store(p + j * LANES, fused(u, cosj, v * sinj));                                                      \
            store(q + j * LANES, j % 2 ? fused(u, sinj, v * -cosj) : fused(v, cosj, u * -sinj));                 \
        }                                                                                                        \
        ii##half(p, c, LANES);                                                                                   \
        ii##half(q, t, LANES);                                                                                   \
        store(out, load(c)), store(out + (n - 1) * b, -load(t));                                                 \
        for (int m = 1; m < half; m++) {                                                                         \
            V u = load(c + m * LANES), v = load(t + (half - m) * LANES);                                         \
            store(out + 2 * m * b, u + v), store(out + (2 * m - 1) * b, u - v);                                  \
        }                                                                                                        \
    }

II(8, 4)
IV(8, 4)
II(16, 8)
IV(16, 8)
II(32, 16)
IV(32, 16)
III(8, 4)
III(16, 8)
III(32, 16)

/* out = sqrt(32) P in of all columns of a block, with the orthonormal DCT matrix P; `in` has rows that are `stride` apart, and
 * may be `out`. */
static void forward(const float *in, long stride, Block out, Ahead one, Ahead other) {
    for (int c = 0; c < N; c += LANES) {
        ALIGNED float s[32 * LANES], d[32 * LANES];
        fold(64, in + c, stride, s, d);
        fetch(one, c), fetch(other, c);
        ii32(s, &out[0][c], 2 * N);
        fetch(one, c + LANES / 2), fetch(other, c + LANES / 2);
        iv32(d, LANES, &out[1][c], 2 * N);
        store(&out[0][c], load(&out[0][c]) * all(cosine[32]));
    }
}

/* out = sqrt(32) P^T in of all columns of a block; `out` has rows that are `stride` apart, and may be `in`, which is changed. */
static void inverse(Block in, float *out, long stride, Ahead one) {
    for (int c = 0; c < N; c += LANES) {
        ALIGNED float e[32 * LANES], o[32 * LANES];
        store(&in[0][c], load(&in[0][c]) * all(cosine[32]));
        fetch(one, c);
        iii32(&in[0][c], 2 * N, e);
        fetch(one, c + LANES / 2);
        iv32(&in[1][c], 2 * N, o, LANES);
        unfold(64, e, o, out + c, stride);
    }
}
