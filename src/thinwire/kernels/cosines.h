/* The DCT of 64 numbers and its inverse, of many columns at once: about 650 operations for a vector instead of 4,096 products.
 *
 * With w = pi / 2n, and without the factors that make them orthonormal:
 *
 *     II    X[k] = sum over j of x[j] cos(w (2j + 1) k)
 *     III   x[j] = sum over k of X[k] cos(w (2j + 1) k)
 *     IV    X[k] = sum over j of x[j] cos(w (2j + 1)(2k + 1) / 2)
 *
 * II of n is II of n / 2 of the sums x[j] + x[n - 1 - j], which gives the even X, and IV of n / 2 of the differences, the odd
 * ones; III is the same backwards. IV of n is n / 2 rotations of x[j] and x[n - 1 - j], then two II of n / 2, c and t, then
 * X[2m] = c[m] + t[n / 2 - m] and X[2m - 1] = c[m] - t[n / 2 - m]. Of 4 and of 8, IV is a product with a matrix.
 */

static float cosine[256]; /* of pi m / 128 */
static float m4[4][4], m8[8][8];
static float cos16[8], sin16[8], cos32[16], sin32[16];

static void make_cosines(const float *table) {
    memcpy(cosine, table, sizeof cosine);
    for (int k = 0; k < 4; k++)
        for (int j = 0; j < 4; j++) m4[k][j] = cosine[8 * (2 * j + 1) * (2 * k + 1) % 256];
    for (int k = 0; k < 8; k++)
        for (int j = 0; j < 8; j++) m8[k][j] = cosine[4 * (2 * j + 1) * (2 * k + 1) % 256];
    for (int j = 0; j < 8; j++) cos16[j] = cosine[4 * j + 2], sin16[j] = cosine[62 - 4 * j];
    for (int j = 0; j < 16; j++) cos32[j] = cosine[2 * j + 1], sin32[j] = cosine[63 - 2 * j];
}

typedef V Two[2]; /* a number of each column, two vectors of them */
#define BOTH for (int h = 0; h < 2; h++)

/* out[k] = sum over j of M[k][j] x[j], four k at a time; numbers of x are `a` apart, those of out `b`. */
#define PRODUCT(n, M)                                                                                  \
    INLINE void iv##n(const Two *x, int a, Two *out, int b) {                                          \
        for (int k = 0; k < n; k += 4) {                                                               \
            V u = x[0][0], v = x[0][1], m, p0, p1, q0, q1, r0, r1, t0, t1;                             \
            m = all(M[k][0]), p0 = m * u, p1 = m * v, m = all(M[k + 1][0]), q0 = m * u, q1 = m * v;     \
            m = all(M[k + 2][0]), r0 = m * u, r1 = m * v, m = all(M[k + 3][0]), t0 = m * u, t1 = m * v; \
            for (int j = 1; j < n; j++) {                                                              \
                u = x[j * a][0], v = x[j * a][1];                                                      \
                m = all(M[k][j]), p0 = fused(m, u, p0), p1 = fused(m, v, p1);                          \
                m = all(M[k + 1][j]), q0 = fused(m, u, q0), q1 = fused(m, v, q1);                      \
                m = all(M[k + 2][j]), r0 = fused(m, u, r0), r1 = fused(m, v, r1);                      \
                m = all(M[k + 3][j]), t0 = fused(m, u, t0), t1 = fused(m, v, t1);                      \
            }                                                                                          \
            out[k * b][0] = p0, out[k * b][1] = p1, out[(k + 1) * b][0] = q0, out[(k + 1) * b][1] = q1; \
            out[(k + 2) * b][0] = r0, out[(k + 2) * b][1] = r1;                                        \
            out[(k + 3) * b][0] = t0, out[(k + 3) * b][1] = t1;                                        \
        }                                                                                              \
    }

#define II(n, half)                                                                                      \
    INLINE void ii##n(const Two *x, Two *out, int b) {                                                   \
        Two s[half], d[half];                                                                            \
        for (int j = 0; j < half; j++)                                                                   \
            BOTH s[j][h] = x[j][h] + x[n - 1 - j][h], d[j][h] = x[j][h] - x[n - 1 - j][h];               \
        ii##half(s, out, 2 * b);                                                                         \
        iv##half(d, 1, out + b, 2 * b);                                                                  \
    }

#define III(n, half)                                                                                     \
    INLINE void iii##n(const Two *x, int a, Two *out) {                                                  \
        Two e[half], o[half];                                                                            \
        iii##half(x, 2 * a, e);                                                                          \
        iv##half(x + a, 2 * a, o, 1);                                                                    \
        for (int j = 0; j < half; j++) BOTH out[j][h] = e[j][h] + o[j][h], out[n - 1 - j][h] = e[j][h] - o[j][h]; \
    }

#define IV(n, half)                                                                                      \
    INLINE void iv##n(const Two *x, int a, Two *out, int b) {                                            \
        Two p[half], q[half], c[half], t[half];                                                          \
        for (int j = 0; j < half; j++) {                                                                 \
            V cosj = all(cos##n[j]), sinj = all(sin##n[j]);                                              \
            BOTH {                                                                                       \
                V u = x[j * a][h], v = x[(n - 1 - j) * a][h];                                            \
                p[j][h] = fused(u, cosj, v * sinj);                                                      \
                q[j][h] = j % 2 ? fused(u, sinj, v * -cosj) : fused(v, cosj, u * -sinj);                 \
            }                                                                                            \
        }                                                                                                \
        ii##half(p, c, 1);                                                                               \
        ii##half(q, t, 1);                                                                               \
        BOTH out[0][h] = c[0][h], out[(n - 1) * b][h] = -t[0][h];                                        \
        for (int m = 1; m < half; m++)                                                                   \
            BOTH out[2 * m * b][h] = c[m][h] + t[half - m][h], out[(2 * m - 1) * b][h] = c[m][h] - t[half - m][h]; \
    }

INLINE void ii4(const Two *x, Two *out, int b) {
    V c = all(cosine[32]), c1 = all(cosine[16]), c3 = all(cosine[48]);
    BOTH {
        V s0 = x[0][h] + x[3][h], s1 = x[1][h] + x[2][h], d0 = x[0][h] - x[3][h], d1 = x[1][h] - x[2][h];
        out[0][h] = s0 + s1, out[2 * b][h] = (s0 - s1) * c;
        out[b][h] = fused(d0, c1, d1 * c3), out[3 * b][h] = fused(d0, c3, d1 * -c1);
    }
}

INLINE void iii4(const Two *x, int a, Two *out) {
    V c = all(cosine[32]), c1 = all(cosine[16]), c3 = all(cosine[48]);
    BOTH {
        V e0 = fused(x[2 * a][h], c, x[0][h]), e1 = fused(x[2 * a][h], -c, x[0][h]);
        V o0 = fused(x[a][h], c1, x[3 * a][h] * c3), o1 = fused(x[a][h], c3, x[3 * a][h] * -c1);
        out[0][h] = e0 + o0, out[3][h] = e0 - o0, out[1][h] = e1 + o1, out[2][h] = e1 - o1;
    }
}

PRODUCT(4, m4)
PRODUCT(8, m8)
II(8, 4)
II(16, 8)
IV(16, 8)
IV(32, 16)
II(32, 16)
III(8, 4)
III(16, 8)
III(32, 16)

/* out = sqrt(32) P in of all columns of a block, with the orthonormal DCT matrix P; `in` has rows that are `stride` apart. */
static void forward(const float *in, long stride, Block out, Ahead one, Ahead other) {
    for (int c = 0, part = 0; c < N; c += 2 * LANES) {
        Two s[32], d[32], e[32], o[32];
        for (int j = 0; j < 32; j++)
            BOTH {
                V x = load(in + j * stride + c + LANES * h), y = load(in + (63 - j) * stride + c + LANES * h);
                s[j][h] = x + y, d[j][h] = x - y;
            }
        for (int i = 0; i < LANES / 4; i++, part++) fetch(one, part), fetch(other, part);
        ii32(s, e, 1);
        for (int i = 0; i < LANES / 4; i++, part++) fetch(one, part), fetch(other, part);
        iv32(d, 1, o, 1);
        BOTH e[0][h] *= all(cosine[32]);
        for (int k = 0; k < 32; k++)
            BOTH store(&out[2 * k][c + LANES * h], e[k][h]), store(&out[2 * k + 1][c + LANES * h], o[k][h]);
    }
}

/* out = sqrt(32) P^T in of all columns of a block; `out` has rows that are `stride` apart. */
static void inverse(Block in, float *out, long stride, Ahead one) {
    for (int c = 0, part = 0; c < N; c += 2 * LANES) {
        Two x[64], e[32], o[32];
        for (int k = 0; k < N; k++) BOTH x[k][h] = load(&in[k][c + LANES * h]);
        BOTH x[0][h] *= all(cosine[32]);
        for (int i = 0; i < LANES / 4; i++, part++) fetch(one, part);
        iii32(x, 2, e);
        for (int i = 0; i < LANES / 4; i++, part++) fetch(one, part);
        iv32(x + 1, 2, o, 1);
        for (int j = 0; j < 32; j++)
            BOTH {
                store(out + j * stride + c + LANES * h, e[j][h] + o[j][h]);
                store(out + (63 - j) * stride + c + LANES * h, e[j][h] - o[j][h]);
            }
    }
}
