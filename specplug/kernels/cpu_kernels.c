/* What a decoder layer computes on a CPU, in float32, on the calling thread.

   A row's bits depend on nothing but the row: every sum runs in an order that follows from the row's
   own keys, whatever rows stand beside it. Compiled by cpu_kernels.py, which says what the
   arguments are. Vectors are the compiler's own, so this is C for any processor. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16   /* keys of a block, and floats of a vector: no wider than a register */
#define ALL(x) (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
#else
#define LANES 8
#define ALL(x) (vec){x, x, x, x, x, x, x, x}
#endif
#define ROWS 16    /* queries that share one reading of a request's keys */
#define CACHED 65536 /* floats of scores that stay in a cache */
#define PANEL (2 * LANES) /* columns of a product that stand together in memory */
#define AHEAD 16   /* rows of a panel that are asked for ahead of their turn */
#if LANES == 16
#define SHARING 12 /* rows that share one reading of a panel: their sums fill the registers */
#else
#define SHARING 6
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef float oct __attribute__((vector_size(32)));
typedef int32_t ioct __attribute__((vector_size(32)));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ioct){__VA_ARGS__})
#endif

INLINE vec load(const float *from) { vec v; memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }
INLINE vec all(float x) { return ALL(x); }

INLINE vec choose(ivec where, vec a, vec b)
{
    return (vec)(((ivec)a & where) | ((ivec)b & ~where));
}

INLINE float sum_of(vec v)
{
    float f[LANES];
    store(f, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) f[i] += f[i + half];
    return f[0];
}

INLINE float max_of(vec v)
{
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e to the power of x <= 88, within 2 units in the last place; 0 below -87. */
INLINE vec exp_of(vec x)
{
    const vec round = all(12582912.0f);
    ivec tiny = x < all(-87.0f);
    vec y = choose(tiny, all(-87.0f), x);
    vec shifted = y * all(1.44269504f) + round;
    vec n = shifted - round;
    vec r = y - n * all(0.693145752f);
    r = r - n * all(1.42860677e-6f);
    vec p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
    ivec power = ((ivec)shifted << 23) + (ivec)all(1.0f);
    return choose(tiny, all(0.0f), p * (vec)power);
}

/* Write 8 floats of each of 8 keys to columns of `to`, whose rows are LANES apart. */
INLINE void transpose_8(const float *const *from, int64_t at, float *to)
{
    oct a[8], b[8];
    for (int i = 0; i < 8; i++) memcpy(&a[i], from[i] + at, sizeof a[i]);
    for (int i = 0; i < 8; i += 2) {
        b[i] = SHUFFLE(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[i + 1] = SHUFFLE(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int k = 0; k < 8; k += 4)
        for (int i = k; i < k + 2; i++) {
            a[i] = SHUFFLE(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + 2] = SHUFFLE(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        b[i] = SHUFFLE(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        b[i + 4] = SHUFFLE(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; i++) memcpy(to + i * LANES, &b[i], sizeof b[i]);
}

/* Scores of N queries with a block of keys [D][LANES]. */
#define SCORE(N)                                                                       \
    INLINE void score_##N(const float *const *q, const float *k, int64_t size,         \
                          float *const *scores, int64_t at, vec scale)                 \
    {                                                                                  \
        vec even[N], odd[N];                                                           \
        for (int i = 0; i < N; i++) even[i] = odd[i] = all(0.0f);                      \
        for (int64_t d = 0; d < size; d += 2) {                                        \
            vec k0 = load(k + d * LANES), k1 = load(k + (d + 1) * LANES);              \
            for (int i = 0; i < N; i++) {                                              \
                even[i] += k0 * q[i][d];                                               \
                odd[i] += k1 * q[i][d + 1];                                            \
            }                                                                          \
        }                                                                              \
        for (int i = 0; i < N; i++) store(scores[i] + at, (even[i] + odd[i]) * scale); \
    }
SCORE(1)
SCORE(2)
SCORE(3)
SCORE(4)

/* Add a block's values, weighted by N rows' weights, to sums of WIDTH vectors in `out`. */
#define MIX(N, WIDTH)                                                                        \
    INLINE void mix_##N##_##WIDTH(float *const *weights, const float *const *values,         \
                                  int64_t first, int keys, float *const *out, int64_t d)     \
    {                                                                                        \
        vec sums[N][WIDTH];                                                                  \
        for (int i = 0; i < N; i++)                                                          \
            for (int w = 0; w < WIDTH; w++) sums[i][w] = load(out[i] + d + w * LANES);       \
        for (int j = 0; j < keys; j++) {                                                     \
            vec v[WIDTH];                                                                    \
            for (int w = 0; w < WIDTH; w++) v[w] = load(values[j] + d + w * LANES);          \
            for (int i = 0; i < N; i++)                                                      \
                for (int w = 0; w < WIDTH; w++) sums[i][w] += v[w] * weights[i][first + j];  \
        }                                                                                    \
        for (int i = 0; i < N; i++)                                                          \
            for (int w = 0; w < WIDTH; w++) store(out[i] + d + w * LANES, sums[i][w]);       \
    }                                                                                        \
    INLINE void mix_rows_##N##_##WIDTH(float *const *weights, const float *const *values,    \
                                       int64_t first, int keys, float *const *out, int64_t size) \
    {                                                                                        \
        for (int64_t d = 0; d < size; d += WIDTH * LANES)                                    \
            mix_##N##_##WIDTH(weights, values, first, keys, out, d);                         \
    }
MIX(1, 1) MIX(2, 1) MIX(3, 1) MIX(4, 1)
MIX(1, 2) MIX(2, 2) MIX(3, 2) MIX(4, 2)

INLINE void mix(int n, float *const *weights, const float *const *values, int64_t first, int keys,
                float *const *out, int64_t size)
{
    int wide = size % (2 * LANES) == 0;
#define MIX_N(N)                                                              \
    if (n == N) {                                                             \
        if (wide) mix_rows_##N##_2(weights, values, first, keys, out, size);  \
        else mix_rows_##N##_1(weights, values, first, keys, out, size);       \
    }
    MIX_N(1) MIX_N(2) MIX_N(3) MIX_N(4)
}

INLINE void score(int n, const float *const *q, const float *k, int64_t size, float *const *scores,
                  int64_t at, vec scale)
{
    if (n == 1) score_1(q, k, size, scores, at, scale);
    if (n == 2) score_2(q, k, size, scores, at, scale);
    if (n == 3) score_3(q, k, size, scores, at, scale);
    if (n == 4) score_4(q, k, size, scores, at, scale);
}

/* Turn scores into weights, from `first` to `end`, 0 outside of the row's own; return 1 / sum. */
INLINE float weigh(float *scores, int64_t first, int64_t own_first, int64_t own_end, int64_t end)
{
    const float hidden = -INFINITY;
    for (int64_t j = first; j < own_first; j++) scores[j] = hidden;
    for (int64_t j = own_end; j < end; j++) scores[j] = hidden;
    vec most = all(hidden);
    for (int64_t j = first; j < end; j += LANES) {
        vec s = load(scores + j);
        most = choose(s > most, s, most);
    }
    float top = max_of(most);
    vec total = all(0.0f);
    if (top == hidden) top = 0.0f; /* sees nothing: its weights are 0 */
    for (int64_t j = first; j < end; j += LANES) {
        vec p = exp_of(load(scores + j) - all(top));
        store(scores + j, p);
        total += p;
    }
    float sum = sum_of(total);
    return sum > 0.0f ? 1.0f / sum : 0.0f;
}

/* A request's queries that are attended together, and what each of them sees. */
struct rows {
    int n;
    const float *q[ROWS];
    float *out[ROWS];
    const uint8_t *masks[ROWS];
    int64_t firsts[ROWS], ends[ROWS];
};

/* Ask for the rows of a block ahead of its turn: all heads' floats, from its first head's on. */
INLINE void fetch(const float *rows, const int64_t *slots, int64_t row, int64_t floats,
                  int64_t first, int64_t end)
{
    for (int64_t j = first; j < first + LANES && j < end; j++)
        for (int64_t i = 0; i < floats; i += LANES)
            __builtin_prefetch(rows + slots[j] * row + i, 0, 2);
}

/* Attend with the queries of `heads` heads of keys; `rows` are those of the first of them.

   slots: of the request. start: where the masks begin, -1 if there are none. row: floats of a
   token's keys. step: floats from the queries of one head of keys to those of the next.
   scratch: heads * ROWS * room floats. block: LANES * size. */
static void attend_rows(const struct rows *rows, int64_t heads, int64_t step, const float *keys,
                        const float *values, const int64_t *slots, int64_t row, int64_t size,
                        int64_t start, float scale, float *scratch, int64_t room, float *block)
{
    int n = rows->n;
    int64_t first = rows->firsts[0], end = rows->ends[0];
    for (int i = 1; i < n; i++) {
        if (rows->firsts[i] < first) first = rows->firsts[i];
        if (rows->ends[i] > end) end = rows->ends[i];
    }
    first = first / LANES * LANES;
    const float *from[LANES], *q[ROWS];
    float *scores[ROWS], *out[ROWS];
    for (int64_t j = first; j < end; j += LANES) {
        fetch(keys, slots, row, heads * size, j + LANES, end);
        for (int64_t h = 0; h < heads; h++) {
            for (int k = 0; k < LANES; k++)
                from[k] = keys + slots[j + k < end ? j + k : j] * row + h * size;
            for (int64_t d = 0; d < size; d += 8) {
                for (int k = 0; k < LANES; k += 8)
                    transpose_8(from + k, d, block + d * LANES + k);
            }
            for (int i = 0; i < n; i++) {
                q[i] = rows->q[i] + h * step;
                scores[i] = scratch + (h * n + i) * room;
            }
            for (int i = 0; i < n; i += 4)
                score(n - i < 4 ? n - i : 4, q + i, block, size, scores + i, j, all(scale));
        }
    }
    int64_t padded = first + (end - first + LANES - 1) / LANES * LANES;
    float *shares = scratch + heads * n * room;
    for (int64_t h = 0; h < heads; h++)
        for (int i = 0; i < n; i++) {
            float *own = scratch + (h * n + i) * room, *sums = rows->out[i] + h * step;
            if (start >= 0)
                for (int64_t j = start; j < rows->ends[i]; j++)
                    if (!rows->masks[i][j - start] || !slots[j]) own[j] = -INFINITY;
            shares[h * n + i] = weigh(own, first, rows->firsts[i], rows->ends[i], padded);
            memset(sums, 0, (size_t)size * sizeof(float));
        }
    for (int64_t j = first; j < end; j += LANES) {
        fetch(values, slots, row, heads * size, j + LANES, end);
        for (int64_t h = 0; h < heads; h++) {
            int count = end - j < LANES ? (int)(end - j) : LANES;
            for (int k = 0; k < count; k++) from[k] = values + slots[j + k] * row + h * size;
            for (int i = 0; i < n; i++) {
                scores[i] = scratch + (h * n + i) * room;
                out[i] = rows->out[i] + h * step;
            }
            for (int i = 0; i < n; i += 4)
                mix(n - i < 4 ? n - i : 4, scores + i, from, j, count, out + i, size);
        }
    }
    for (int64_t h = 0; h < heads; h++)
        for (int i = 0; i < n; i++) {
            float *sums = rows->out[i] + h * step;
            for (int64_t d = 0; d < size; d += LANES)
                store(sums + d, load(sums + d) * shares[h * n + i]);
        }
}

/* The end of what a row sees, in 0..longest, whatever the committed length is. */
INLINE int64_t end_of(int64_t start, int64_t after, int64_t longest)
{
    const int64_t far = (int64_t)1 << 40;
    int64_t end = (start > far ? far : start < -far ? -far : start) + after;
    return end < 0 ? 0 : end > longest ? longest : end;
}

INLINE int are_within(const int64_t *numbers, int64_t count, int64_t bound)
{
    uint64_t outside = 0;
    for (int64_t i = 0; i < count; i++) outside |= (uint64_t)numbers[i] >= (uint64_t)bound;
    return !outside;
}

/* Returns 0; 1 if there is no memory; 2 if an index stands outside of what it is for: then nothing
   was read by it. mask_rows: of the mask for a request. num_slots: of keys and values. */
int paged_attention(const float *q, int64_t q_stride, const float *keys, const float *values,
                    int64_t num_slots, const int64_t *table, int64_t table_rows,
                    int64_t table_stride, const int64_t *req_indices, const int64_t *starts,
                    const int64_t *first_rows, int64_t bs, int64_t count, int64_t offset,
                    int64_t window, const uint8_t *mask, int64_t mask_batch, int64_t mask_rows,
                    int64_t span, int64_t heads, int64_t kv_heads, int64_t size, float scale,
                    float *out)
{
    if (!are_within(req_indices, bs, table_rows) || first_rows[0] != 0 || first_rows[bs] != count)
        return 2;
    for (int64_t b = 0; b < bs; b++) {
        int64_t width = first_rows[b + 1] - first_rows[b];
        if (width < 0 || (mask && width > mask_rows)) return 2;
        int64_t end = end_of(starts[b], mask ? span : offset + width, table_stride);
        if (!are_within(table + req_indices[b] * table_stride, end, num_slots)) return 2;
    }
    int64_t fold = heads / kv_heads, row = kv_heads * size, longest = 0, most_rows = 1;
    for (int64_t b = 0; b < bs; b++) {
        int64_t width = first_rows[b + 1] - first_rows[b];
        int64_t end = end_of(starts[b], mask ? span : offset + width, table_stride);
        if (end > longest) longest = end;
        if (width * fold > most_rows) most_rows = width * fold;
    }
    if (most_rows > ROWS) most_rows = ROWS;
    int64_t room = (longest / LANES + 2) * LANES;
    /* Several heads at once read memory in its order, while their scores stay in the cache. */
    int64_t together = CACHED / (most_rows * room);
    together = together < 1 ? 1 : together > kv_heads ? kv_heads : together;
    size_t floats = (size_t)(together * most_rows * (room + 1) + LANES * (size + 1));
    float *block = aligned_alloc(64, (floats + 15) / 16 * 64);
    if (!block) return 1;
    for (int64_t b = 0; b < bs; b++) {
        const int64_t *slots = table + req_indices[b] * table_stride;
        int64_t width = first_rows[b + 1] - first_rows[b], start = starts[b];
        for (int64_t r = 0; r < width * fold; r += most_rows) {
            struct rows rows;
            rows.n = (int)(width * fold - r < most_rows ? width * fold - r : most_rows);
            for (int64_t h = 0; h < kv_heads; h += together) {
                for (int i = 0; i < rows.n; i++) {
                    int64_t node = (r + i) / fold, head = h * fold + (r + i) % fold;
                    int64_t end = end_of(start, mask ? span : offset + node + 1, table_stride);
                    rows.ends[i] = end;
                    rows.firsts[i] = window > 0 && end > window ? end - window : 0;
                    rows.q[i] = q + (first_rows[b] + node) * q_stride + head * size;
                    rows.out[i] = out + ((first_rows[b] + node) * heads + head) * size;
                    if (mask) rows.masks[i] = mask + b * mask_batch + node * span;
                }
                attend_rows(&rows, kv_heads - h < together ? kv_heads - h : together, fold * size,
                            keys + h * size, values + h * size, slots, row, size,
                            mask ? start : -1, scale, block + LANES * size, room, block);
            }
        }
    }
    free(block);
    return 0;
}

INLINE float inverse_root(const float *x, int64_t size, float eps)
{
    vec total = all(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec v = load(x + i);
        total += v * v;
    }
    float sum = sum_of(total);
    for (; i < size; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)size + eps);
}

void rms_norm(const float *x, int64_t stride, const float *weight, float eps, int64_t rows,
              int64_t size, float *out, int64_t out_stride)
{
    for (int64_t r = 0; r < rows; r++, x += stride, out += out_stride) {
        float factor = inverse_root(x, size, eps);
        for (int64_t i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
    }
}

/* Numbers of bfloat16 are the upper halves of floats. */
INLINE vec load_halves(const uint16_t *from)
{
    halves h;
    memcpy(&h, from, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}

/* Products of N rows with a panel [size][PANEL], each summed up in the order of its inputs. */
#define PRODUCT(N, KIND, LOAD)                                                           \
    INLINE void product_##N##_##KIND(const float *x, int64_t stride, const KIND *panel,  \
                                     int64_t size, float *out)                           \
    {                                                                                    \
        vec left[N], right[N];                                                           \
        for (int i = 0; i < N; i++) left[i] = right[i] = all(0.0f);                      \
        for (int64_t k = 0; k < size; k++, panel += PANEL) {                             \
            vec a = LOAD(panel), b = LOAD(panel + LANES);                                \
            __builtin_prefetch(panel + AHEAD * PANEL);                                   \
            if (sizeof(KIND) == 4) __builtin_prefetch(panel + AHEAD * PANEL + LANES);    \
            for (int i = 0; i < N; i++) {                                                \
                left[i] += a * x[i * stride + k];                                        \
                right[i] += b * x[i * stride + k];                                       \
            }                                                                            \
        }                                                                                \
        for (int i = 0; i < N; i++) {                                                    \
            store(out + i * PANEL, left[i]);                                             \
            store(out + i * PANEL + LANES, right[i]);                                    \
        }                                                                                \
    }
#define PRODUCTS(N) PRODUCT(N, float, load) PRODUCT(N, uint16_t, load_halves)
PRODUCTS(1) PRODUCTS(2) PRODUCTS(3) PRODUCTS(4) PRODUCTS(5) PRODUCTS(6)
#if LANES == 16
PRODUCTS(7) PRODUCTS(8) PRODUCTS(9) PRODUCTS(10) PRODUCTS(11) PRODUCTS(12)
#endif

/* Multiply at most SHARING rows; half: whether the panel is of bfloat16, not of float. */
INLINE void product(int64_t n, const float *x, int64_t stride, const void *panel, int half,
                    int64_t size, float *out)
{
#define PRODUCT_OF(N)                                                \
    case N:                                                          \
        if (half) product_##N##_uint16_t(x, stride, panel, size, out); \
        else product_##N##_float(x, stride, panel, size, out);       \
        break;
    switch (n) {
        PRODUCT_OF(1) PRODUCT_OF(2) PRODUCT_OF(3) PRODUCT_OF(4) PRODUCT_OF(5) PRODUCT_OF(6)
#if LANES == 16
        PRODUCT_OF(7) PRODUCT_OF(8) PRODUCT_OF(9) PRODUCT_OF(10) PRODUCT_OF(11) PRODUCT_OF(12)
#endif
    }
}

/* How many columns stand together in the panels that linear() reads. */
int64_t panel_columns(void) { return PANEL; }

/* residual + (x @ weight.T + bias) of rows [rows][size], to [rows][outputs].

   panels: of the weight, [outputs / PANEL, rounded up][size][PANEL], of float or, if half is not
   0, of bfloat16. bias, residual: NULL for none. Weights are read once, in their order in memory,
   whatever the number of rows. */
void linear(const float *x, int64_t stride, const void *panels, int64_t half, const float *bias,
            const float *residual, int64_t residual_stride, int64_t rows, int64_t size,
            int64_t outputs, float *out)
{
    float sums[SHARING * PANEL], *whole = NULL;
    const char *next = panels;
    int64_t numbers = size * PANEL, bytes = numbers * (half ? 2 : 4);
    /* Many rows have a panel made float first: it is read for each SHARING of them. */
    if (half && rows > 4 * SHARING) whole = aligned_alloc(64, (size_t)numbers * sizeof(float));
    for (int64_t c = 0; c < outputs; c += PANEL, next += bytes) {
        const void *panel = next;
        for (int64_t i = 0; whole && i < numbers; i += LANES)
            store(whole + i, load_halves((const uint16_t *)next + i));
        if (whole) panel = whole;
        int64_t columns = outputs - c < PANEL ? outputs - c : PANEL;
        for (int64_t r = 0; r < rows; r += SHARING) {
            int64_t n = rows - r < SHARING ? rows - r : SHARING;
            product(n, x + r * stride, stride, panel, half && !whole, size, sums);
            for (int64_t i = 0; i < n; i++) {
                float *sum = sums + i * PANEL;
                for (int64_t j = 0; bias && j < columns; j++) sum[j] += bias[c + j];
                const float *own = residual ? residual + (r + i) * residual_stride + c : NULL;
                for (int64_t j = 0; own && j < columns; j++) sum[j] += own[j];
                memcpy(out + (r + i) * outputs + c, sum, (size_t)columns * sizeof(float));
            }
        }
    }
    free(whole);
}

/* Norm the heads of queries and keys if there are weights, turn them in place, and write keys and
   values to their slots. Returns 0, or 2 if a slot is none: then nothing was written. */
int rotate_and_write(float *qkv, const float *cos, const float *sin, const float *weights,
                     const float *eps, const int64_t *slots, int64_t rows, int64_t heads,
                     int64_t kv_heads, int64_t size, float *keys, float *values, int64_t num_slots)
{
    if (!are_within(slots, rows, num_slots)) return 2;
    int64_t half = size / 2, turned = heads + kv_heads;
    for (int64_t r = 0; r < rows; r++, cos += size, sin += size) {
        float *row = qkv + r * (turned + kv_heads) * size;
        for (int64_t h = 0; h < turned; h++) {
            float *x = row + h * size;
            if (weights) {
                float factor = inverse_root(x, size, eps[h]);
                for (int64_t i = 0; i < size; i++) x[i] = x[i] * factor * weights[h * size + i];
            }
            for (int64_t i = 0; i < half; i++) {
                float a = x[i], b = x[i + half];
                x[i] = a * cos[i] + b * sin[i];
                x[i + half] = b * cos[i + half] + a * sin[i + half];
            }
        }
        size_t bytes = (size_t)(kv_heads * size) * sizeof(float);
        memcpy(keys + slots[r] * kv_heads * size, row + heads * size, bytes);
        memcpy(values + slots[r] * kv_heads * size, row + turned * size, bytes);
    }
    return 0;
}

/* silu(gate) * up of rows that hold both, [rows, 2 * size]. */
void silu_and_mul(const float *both, int64_t rows, int64_t size, float *out)
{
    for (int64_t r = 0; r < rows; r++, both += 2 * size, out += size) {
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) {
            vec g = load(both + i);
            vec low = choose(g < all(-87.0f), all(-87.0f), g); /* exp would overflow */
            store(out + i, g / (all(1.0f) + exp_of(-low)) * load(both + size + i));
        }
        for (; i < size; i++) out[i] = both[i] / (1.0f + expf(-both[i])) * both[size + i];
    }
}

/* A decoder layer of the Llama kind: its weights, and its sizes. input_norm, head_norm with head_eps
   and the biases are NULL where there is none. */
struct layer {
    const void *qkv, *o, *gate_up, *down;
    const float *input_norm, *qkv_bias, *head_norm, *head_eps, *o_bias, *mlp_norm, *gate_up_bias,
        *down_bias;
    int64_t qkv_half, o_half, gate_up_half, down_half;
    int64_t inputs, hidden, inner, heads, kv_heads, size;
    float input_eps, mlp_eps;
};

/* The rows of a pass: what paged_attention() takes of them. */
struct pass {
    const int64_t *table, *req_indices, *starts, *first_rows;
    int64_t table_rows, table_stride, bs, count, offset;
    const uint8_t *mask;
    int64_t mask_batch, mask_rows, span;
};

/* Find the slots and positions of a pass's rows. floors: by request row, NULL if there are none.
   given: positions [bs or 1][width], NULL if they are those of the slots.
   Returns 0, or 2 if an index stands outside: nothing was written. */
int row_places(const struct pass *pass, const int64_t *floors, const int64_t *given,
               int64_t given_stride, int64_t width, int64_t last, int64_t *slots,
               int64_t *positions)
{
    const int64_t *first_rows = pass->first_rows, far = (int64_t)1 << 40;
    if (!are_within(pass->req_indices, pass->bs, pass->table_rows) || first_rows[0] != 0 ||
        first_rows[pass->bs] != pass->count || pass->table_stride < 1)
        return 2;
    for (int64_t b = 0; b < pass->bs; b++) {
        int64_t own = first_rows[b + 1] - first_rows[b];
        if (own < 0 || own > width) return 2;
    }
    for (int64_t b = 0; b < pass->bs; b++) {
        int64_t request = pass->req_indices[b], start = pass->starts[b];
        const int64_t *table = pass->table + request * pass->table_stride;
        start = start > far ? far : start < -far ? -far : start;
        for (int64_t r = first_rows[b], i = 0; r < first_rows[b + 1]; r++, i++) {
            int64_t index = start + pass->offset + i, end = pass->table_stride - 1;
            slots[r] = table[index < 0 ? 0 : index < end ? index : end];
            if (floors && index < floors[request]) slots[r] = 0;
            int64_t place = given ? given[b * given_stride + i] : index < 0 ? 0 : index;
            positions[r] = place < last ? place : last;
        }
    }
    return 0;
}

/* Run a layer over rows: input [count][inputs] and residual [count][hidden] to out [count][hidden].

   Each part is the function of that name; what they share is that nothing stands between them.
   Returns 0; 1 if there is no memory; 2 if an index stands outside. */
int decoder_layer(const struct layer *layer, const struct pass *pass, const float *input,
                  int64_t input_stride, const float *residual, int64_t residual_stride,
                  const float *cos, const float *sin, const int64_t *slots, float *keys,
                  float *values, int64_t num_slots, int64_t window, float scale, float *out)
{
    int64_t rows = pass->count, hidden = layer->hidden, inner = layer->inner;
    int64_t mixed = layer->heads * layer->size;
    int64_t turned = mixed + layer->kv_heads * layer->size;
    int64_t qkv = turned + layer->kv_heads * layer->size;
    int64_t most = layer->inputs > hidden ? layer->inputs : hidden;
    int64_t narrow = most > mixed ? most : mixed, wide = qkv > 2 * inner ? qkv : 2 * inner;
    size_t floats = (size_t)(rows * (narrow + wide + hidden + inner));
    float *first = aligned_alloc(64, (floats + 16) / 16 * 64);
    if (!first) return 1;
    float *second = first + rows * narrow, *sums = second + rows * wide;
    float *gated = sums + rows * hidden;
    if (layer->input_norm) {
        rms_norm(input, input_stride, layer->input_norm, layer->input_eps, rows, layer->inputs,
                 first, layer->inputs);
        input = first;
        input_stride = layer->inputs;
    }
    linear(input, input_stride, layer->qkv, layer->qkv_half, layer->qkv_bias, NULL, 0, rows,
           layer->inputs, qkv, second);
    int failed = rotate_and_write(second, cos, sin, layer->head_norm, layer->head_eps, slots, rows,
                                  layer->heads, layer->kv_heads, layer->size, keys, values,
                                  num_slots);
    if (!failed)
        failed = paged_attention(second, qkv, keys, values, num_slots, pass->table,
                                 pass->table_rows, pass->table_stride, pass->req_indices,
                                 pass->starts, pass->first_rows, pass->bs, rows, pass->offset,
                                 window, pass->mask, pass->mask_batch, pass->mask_rows, pass->span,
                                 layer->heads, layer->kv_heads, layer->size, scale, first);
    if (!failed) {
        linear(first, mixed, layer->o, layer->o_half, layer->o_bias, residual, residual_stride,
               rows, mixed, hidden, sums);
        rms_norm(sums, hidden, layer->mlp_norm, layer->mlp_eps, rows, hidden, first, hidden);
        linear(first, hidden, layer->gate_up, layer->gate_up_half, layer->gate_up_bias, NULL, 0,
               rows, hidden, 2 * inner, second);
        silu_and_mul(second, rows, inner, gated);
        linear(gated, inner, layer->down, layer->down_half, layer->down_bias, sums, hidden, rows,
               inner, hidden, out);
    }
    free(first);
    return failed;
}

/* Find each row's greatest logit, the first of equal ones, and the logarithm of its probability;
   -INFINITY where there is none: of rows with NaN, infinity or no finite logit. A NaN is the
   greatest. ids: of the columns, NULL for themselves. logs: NULL if they are not wanted. */
void likeliest(const float *logits, int64_t stride, int64_t rows, int64_t size, const int64_t *ids,
               int64_t *tokens, float *logs)
{
    for (int64_t r = 0; r < rows; r++, logits += stride) {
        float top = -INFINITY, sum = 0.0f;
        int64_t best = 0, whole = size / LANES * LANES, undefined = 0;
        if (whole) {
            vec most = load(logits);
            ivec strange = most != most;
            for (int64_t j = LANES; j < whole; j += LANES) {
                vec x = load(logits + j);
                strange |= x != x;
                most = choose(x > most, x, most);
            }
            for (int i = 0; i < LANES; i++) undefined |= strange[i];
            top = max_of(most);
        }
        for (int64_t j = whole; j < size; j++) {
            undefined |= logits[j] != logits[j];
            top = logits[j] > top ? logits[j] : top;
        }
        if (undefined)
            while (logits[best] == logits[best]) best++;
        else
            while (logits[best] != top) best++;
        tokens[r] = ids ? ids[best] : best;
        if (!logs) continue;
        logs[r] = -INFINITY;
        if (undefined || top == INFINITY || top == -INFINITY) continue;
        vec total = all(0.0f);
        for (int64_t j = 0; j < whole; j += LANES) total += exp_of(load(logits + j) - all(top));
        for (int64_t j = whole; j < size; j++) sum += expf(logits[j] - top);
        logs[r] = -logf(sum_of(total) + sum);
    }
}

/* Look up how likely scored nodes are to be accepted; given what was accepted, count it.

   width: at most 64. mask, depths: NULL for chains. counts: NULL if all nodes count. first_cells: by
   request row. accept_lens: NULL if they are not known; then nothing is counted.
   Returns 0, or 2 if a request's row or its first cell stands outside: nothing was counted. */
int score_nodes(const float *scores, const uint8_t *mask, const int64_t *depths, int64_t bs,
                int64_t width, const int64_t *req_indices, const int64_t *first_cells,
                int64_t num_rows, const float *bounds, int64_t bins, int64_t num_depths,
                float least, const float *rates, int64_t num_cells, const int64_t *accept_index,
                int64_t columns, const int64_t *accept_lens, const int64_t *offsets,
                const int64_t *counts, int64_t *seen, int64_t *taken, float *out)
{
    if (width > 64 || !are_within(req_indices, bs, num_rows)) return 2;
    for (int64_t b = 0; b < bs; b++) {
        int64_t first = first_cells[req_indices[b]];
        if (first < 0 || first > num_cells - num_depths * bins) return 2;
    }
    for (int64_t b = 0; b < bs; b++, scores += width, out += width) {
        int64_t cells[64], first = first_cells[req_indices[b]];
        float own[64], rate[64], total = 0.0f;
        own[0] = 0.0f;
        out[0] = rate[0] = 1.0f;
        for (int64_t i = 1; i < width; i++) {
            float score = scores[i];
            own[i] = score > 0.0f ? 0.0f : score > least ? score : least; /* NaN's is the least */
            const uint8_t *sees = mask ? mask + (b * width + i) * width : NULL;
            total = sees ? 0.0f : total + own[i];
            for (int64_t j = 1; sees && j <= i; j++) total += sees[j] ? own[j] : 0.0f;
            int64_t depth = (depths ? depths[b * width + i] : i) - 1;
            depth = depth < 0 ? 0 : depth < num_depths ? depth : num_depths - 1;
            int32_t bin = 0;
            for (int64_t k = 0; k < bins - 1; k++) bin += bounds[k] <= total;
            cells[i] = first + depth * bins + bin;
            rate[i] = rates[cells[i]];
            out[i] = !sees && out[i - 1] < rate[i] ? out[i - 1] : rate[i];
            for (int64_t j = 1; sees && j < i; j++)
                if (sees[j] && rate[j] < out[i]) out[i] = rate[j];
        }
        if (!accept_lens) continue;
        uint8_t accepted[64] = {0};
        for (int64_t i = 0; !mask && i < width; i++) accepted[i] = i < accept_lens[b];
        for (int64_t c = 0; mask && c < columns; c++) {
            int64_t node = accept_index[b * columns + c];
            if (node >= 0 && (uint64_t)(node - offsets[b]) < (uint64_t)width)
                accepted[node - offsets[b]] = 1;
        }
        for (int64_t i = 1; i < width; i++) {
            if (counts && i >= counts[b]) out[i] = 0.0f;
            else if (req_indices[b]) {
                seen[cells[i]]++;
                taken[cells[i]] += accepted[i];
            }
            if (!accepted[i]) out[i] = -out[i];
        }
    }
    return 0;
}
