/* Attention of few query rows over the keys of a paged cache, at the speed of reading them.
 *
 * The same work, and the same arguments, as the Triton kernel (cplayers/ops/kernels/attention.py).
 * Compiled at first use for one pair of dimensions and one storage type:
 *
 *     HEAD_DIM, VALUE_DIM   multiples of 16
 *     BF16                  storage is bfloat16 instead of float; all sums are in float
 *
 * A KV head's rows (query heads of its group, times new tokens) share its keys:
 *
 *     for each task: a request, a KV head and a part of the keys            -- spread over threads
 *         for CHUNK keys at a time, wherever their blocks lie:
 *             for 4 rows at a time:
 *                 scores [4 rows, CHUNK]  4 keys x 4 rows = 16 sums in registers
 *                 online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867)
 *                 out += weights v        4 rows x 64 columns in registers
 *     merge the parts of a request (flash-decoding)
 *
 * Every key of a chunk is seen by some row; what lies in other slots is never read. While one chunk
 * is worked on, the next is on its way to the cache: else a core waits for memory half the time.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define LINE 64 /* bytes of a cache line */
#ifndef CHUNK
#define CHUNK 16
#endif
#define ROWS 4
#define NOTHING -3e38f /* reference point of a row that has seen no key yet */
#define HEADROOM 16.0f /* e^16 times a weight and the sum of 2^40 of them are far from overflow */
#define TILE 4 /* vectors of a row of out that are held in registers */
#define MIN_PART 512 /* keys of a part, below which it does not pay to cut */
#define PARTS_PER_THREAD 4

/* scores[r][0..3] = q[r] . key[0..3]; meanwhile ahead[0..3] are on their way to the cache */
static inline __attribute__((always_inline)) void dots(
    const int rows, const int fetch, const float *q, const elem *const *key,
    const elem *const *ahead, float *scores) {
    vec sum[ROWS][4], four[ROWS];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 4; i++) sum[r][i] = (vec){0};
    const elem *const at0 = key[0], *const at1 = key[1], *const at2 = key[2], *const at3 = key[3];
    const elem *const far0 = ahead[0], *const far1 = ahead[1], *const far2 = ahead[2],
               *const far3 = ahead[3];
    for (int d = 0; d < HEAD_DIM; d += LANES) {
        if (fetch && d < VALUE_DIM && d * sizeof(elem) % LINE == 0) {
            __builtin_prefetch(far0 + d, 0, 2);
            __builtin_prefetch(far1 + d, 0, 2);
            __builtin_prefetch(far2 + d, 0, 2);
            __builtin_prefetch(far3 + d, 0, 2);
        }
        vec k0 = load(at0 + d), k1 = load(at1 + d), k2 = load(at2 + d), k3 = load(at3 + d);
        for (int r = 0; r < rows; r++) {
            vec row = load_floats(q + r * HEAD_DIM + d);
            HOLD(row);
            sum[r][0] += row * k0;
            sum[r][1] += row * k1;
            sum[r][2] += row * k2;
            sum[r][3] += row * k3;
        }
    }
    for (int r = 0; r < ROWS; r++)
        four[r] = r < rows ? fold4(fold8(sum[r][0], sum[r][1]), fold8(sum[r][2], sum[r][3]))
                           : (vec){0};
    vec all = fold1(fold2(four[0], four[1]), fold2(four[2], four[3]));
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++) scores[r * CHUNK + i] = all[r * 4 + i];
}

/* out[r][c..c + tile*16] += weights[r][i] * value[i][c..] over the keys of a chunk, likewise */
static inline __attribute__((always_inline)) void columns(
    const int rows, const int fetch, const int tile, float *out, const float *weights,
    const elem *const *value, const elem *const *ahead, const int keys, const int c) {
    vec sum[ROWS][TILE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < tile; j++) sum[r][j] = load_floats(out + r * VALUE_DIM + c + j * LANES);
    for (int i = 0; i < keys; i++) {
        const elem *at = value[i] + c;
        if (fetch && c < HEAD_DIM)
            for (unsigned byte = 0; byte < tile * LANES * sizeof(elem); byte += LINE)
                __builtin_prefetch((const char *)(ahead[i] + c) + byte, 0, 2);
        vec v[TILE];
        for (int j = 0; j < tile; j++) v[j] = load(at + j * LANES);
        for (int r = 0; r < rows; r++) {
            float w = weights[r * CHUNK + i];
            for (int j = 0; j < tile; j++) sum[r][j] += w * v[j];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < tile; j++) store_floats(out + r * VALUE_DIM + c + j * LANES, sum[r][j]);
}

/* Moves rows' reference points to their largest scores, with what was summed so far. */
static __attribute__((noinline)) void raise_tops(
    const int rows, float *out, float *top, vec *sum, const float *scores, const int padded) {
    for (int r = 0; r < rows; r++) {
        vec high = load_floats(scores + r * CHUNK);
        for (int i = LANES; i < padded; i += LANES)
            high = larger(high, load_floats(scores + r * CHUNK + i));
        const float now = largest(high);
        if (!(now > top[r])) continue;
        const float shrink = expf(top[r] - now);
        sum[r] *= shrink;
        for (int c = 0; c < VALUE_DIM; c += LANES)
            store_floats(out + r * VALUE_DIM + c, load_floats(out + r * VALUE_DIM + c) * shrink);
        top[r] = now;
    }
}

/* Up to 4 rows against one chunk. first..last of each row: what it sees, counted in the chunk. */
static inline __attribute__((always_inline)) void visit(
    const int rows, const int fetch, const float *q, float *out, float *top, vec *sum,
    const elem *const *key, const elem *const *value, const elem *const *next,
    const elem *const *then, const int keys, const int64_t *first, const int64_t *last) {
    float scores[ROWS * CHUNK] __attribute__((aligned(64)));
    const int padded = (keys + LANES - 1) / LANES * LANES;
    for (int i = 0; i < keys; i += 4) {
        const elem *four[4];
        for (int j = 0; j < 4; j++) four[j] = key[i + j < keys ? i + j : keys - 1];
        dots(rows, fetch, q, four, then + i, scores + i);
    }
    for (int r = 0; r < rows; r++) {
        float *row = scores + r * CHUNK;
        const int64_t begin = first[r] > 0 ? first[r] : 0, end = last[r] < keys ? last[r] : keys;
        for (int i = 0; i < begin && i < padded; i++) row[i] = -INFINITY;
        for (int64_t i = end > 0 ? end : 0; i < padded; i++) row[i] = -INFINITY;
    }
    /* A row's reference point is raised where a score is far above it, not at each new maximum. */
    vec over = load_floats(scores) - top[0];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < padded; i += LANES)
            over = larger(over, load_floats(scores + r * CHUNK + i) - top[r]);
    if (!(largest(over) <= HEADROOM)) raise_tops(rows, out, top, sum, scores, padded);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < padded; i += LANES) {
            vec weight = exponential(load_floats(scores + r * CHUNK + i) - top[r]);
            store_floats(scores + r * CHUNK + i, weight);
            sum[r] += weight;
        }
    int c = 0;
    for (; c + TILE * LANES <= VALUE_DIM; c += TILE * LANES)
        columns(rows, fetch, TILE, out, scores, value, next, keys, c);
    for (; c < VALUE_DIM; c += LANES) columns(rows, fetch, 1, out, scores, value, next, keys, c);
}

typedef struct {
    int64_t row0, row1;     /* query tokens of one request, one after another */
    int64_t first, last;    /* keys that any of them sees */
    int64_t parts, partial; /* into how many its keys are cut; where its partial results begin */
} Request;

typedef struct {
    int64_t num_rows, num_heads, num_kv_heads, block_size, table_row;
    int64_t q_row, q_head, k_head, k_slot, v_head, v_slot;
    const elem *q, *k, *v;
    const int32_t *table;
    const int64_t *request, *lo, *hi;
    float scale;
    elem *out;
    float *lse;
} Work;

/* Where CHUNK keys from start on are; beyond the last, the last one that is known. */
static void place(
    const elem *base, int64_t stride, const int32_t *table, int64_t size, int64_t start,
    int64_t last, const elem **rows) {
    const int64_t keys = last - start < CHUNK ? last - start : CHUNK;
    int64_t block = start / size, offset = start % size;
    for (int64_t i = 0; i < keys; block++, offset = 0) {
        const elem *at = base + (table[block] * size + offset) * stride;
        const int64_t stop = i + size - offset < keys ? i + size - offset : keys;
        for (; i < stop; i++, at += stride) rows[i] = at;
    }
    const elem *rest = keys > 0 ? rows[keys - 1] : base;
    for (int i = keys > 0 ? (int)keys : 0; i < CHUNK; i++) rows[i] = rest;
}

/* Rows of one KV head of a request against the keys first..last: out [M, V], top and sum [M]. */
static int attend(
    const Work *w, const Request *req, int64_t head, int64_t first, int64_t last, float *out,
    float *top, float *sum) {
    const int64_t group = w->num_heads / w->num_kv_heads;
    const int64_t num = (req->row1 - req->row0) * group;
    float *q = malloc(num * HEAD_DIM * sizeof(float));
    vec *sums = aligned_alloc(sizeof(vec), num * sizeof(vec));
    if (q == NULL || sums == NULL) {
        free(q);
        free(sums);
        return 1;
    }
    for (int64_t m = 0; m < num; m++) {
        const elem *from = w->q + (req->row0 + m / group) * w->q_row +
                           (head * group + m % group) * w->q_head;
        for (int d = 0; d < HEAD_DIM; d++) q[m * HEAD_DIM + d] = widen(from[d]) * w->scale;
        top[m] = NOTHING;
        sums[m] = (vec){0};
    }
    memset(out, 0, num * VALUE_DIM * sizeof(float));
    const elem *keys_at = w->k + head * w->k_head, *values_at = w->v + head * w->v_head;
    const int64_t size = w->block_size;
    const int32_t *table = w->table + w->request[req->row0] * w->table_row;
    const elem *rows_of[4][CHUNK]; /* keys and values of this chunk, and of the next */
    const elem **key = rows_of[0], **value = rows_of[1], **next = rows_of[2], **then = rows_of[3];
    place(keys_at, w->k_slot, table, size, first, last, key);
    place(values_at, w->v_slot, table, size, first, last, value);
#define VISITED \
    q + m * HEAD_DIM, out + m * VALUE_DIM, top + m, sums + m, key, value, next, then, keys, from, to
    for (int64_t start = first; start < last; start += CHUNK) {
        const int keys = last - start < CHUNK ? (int)(last - start) : CHUNK;
        place(keys_at, w->k_slot, table, size, start + CHUNK, last, next);
        place(values_at, w->v_slot, table, size, start + CHUNK, last, then);
        for (int64_t m = 0; m < num; m += ROWS) {
            int64_t from[ROWS], to[ROWS];
            const int rows = num - m < ROWS ? (int)(num - m) : ROWS;
            for (int r = 0; r < rows; r++) {
                const int64_t token = req->row0 + (m + r) / group;
                from[r] = w->lo[token] - start;
                to[r] = w->hi[token] - start;
            }
            /* the first rows bring in what comes next, for all */
            if (m == 0 && rows == ROWS)
                visit(ROWS, 1, VISITED);
            else
                switch (rows) {
                case 4: visit(4, 0, VISITED); break;
                case 3: visit(3, 1, VISITED); break;
                case 2: visit(2, 1, VISITED); break;
                case 1: visit(1, 1, VISITED); break;
                }
        }
        const elem **used = key, **read = value;
        key = next, next = used, value = then, then = read;
    }
    for (int64_t m = 0; m < num; m++) sum[m] = total(sums[m]);
    free(q);
    free(sums);
    return 0;
}

static void finish(
    const Work *w, int64_t token, int64_t n, const float *out, float top, float sum) {
    elem *to = w->out + (token * w->num_heads + n) * VALUE_DIM;
    const float share = sum == 0.0f ? 0.0f : 1.0f / sum; /* NaN stays one */
    for (int c = 0; c < VALUE_DIM; c++) to[c] = narrow(out[c] * share);
    w->lse[token * w->num_heads + n] = sum == 0.0f ? -INFINITY : top + logf(sum);
}

/* out [T, N, V] and lse [T, N], contiguous. Returns 0, or 1 where memory could not be had. */
int span_attention(
    const elem *q, const elem *k, const elem *v, const int32_t *table, const int64_t *request,
    const int64_t *lo, const int64_t *hi, elem *out, float *lse, int64_t num_rows,
    int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t table_row, int64_t q_row,
    int64_t q_head, int64_t k_head, int64_t k_slot, int64_t v_head, int64_t v_slot, float scale,
    int64_t threads) {
    const Work w = {
        num_rows, num_heads, num_kv_heads, block_size, table_row, q_row, q_head, k_head, k_slot,
        v_head, v_slot, q, k, v, table, request, lo, hi, scale, out, lse,
    };
    const int64_t group = num_heads / num_kv_heads;
    Request *requests = malloc((num_rows + 1) * sizeof(Request));
    if (requests == NULL) return 1;
    int64_t count = 0, work = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        Request *now = requests + count - 1;
        const int sees = hi[row] > lo[row];
        /* a span that leaves a gap begins anew: keys that no row sees are not read */
        if (count == 0 || request[row] != request[now->row0] ||
            (sees && now->last > now->first && (lo[row] > now->last || hi[row] < now->first))) {
            now = requests + count++;
            *now = (Request){row, row, INT64_MAX, 0, 1, 0};
        }
        now->row1 = row + 1;
        if (sees && lo[row] < now->first) now->first = lo[row];
        if (sees && hi[row] > now->last) now->last = hi[row];
    }
    for (int64_t i = 0; i < count; i++) {
        if (requests[i].first > requests[i].last) requests[i].first = requests[i].last;
        work += (requests[i].last - requests[i].first) * num_kv_heads;
    }
    int64_t part = threads == 1 ? INT64_MAX : work / (threads * PARTS_PER_THREAD) + 1;
    if (part < MIN_PART) part = MIN_PART;
    int64_t tasks = 0, partials = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t keys = requests[i].last - requests[i].first;
        requests[i].parts = keys > part ? (keys - 1) / part + 1 : 1;
        requests[i].partial = partials;
        const int64_t rows = (requests[i].row1 - requests[i].row0) * group;
        partials += requests[i].parts * rows * num_kv_heads;
        tasks += requests[i].parts * num_kv_heads;
    }
    /* per task, in order of request, head, part: out [M, V], then top and sum [M] */
    float *scratch = malloc((partials ? partials : 1) * (VALUE_DIM + 2) * sizeof(float));
    int64_t *owner = malloc((tasks ? tasks : 1) * 2 * sizeof(int64_t));
    int failed = scratch == NULL || owner == NULL;
    if (!failed) {
        int64_t at = 0;
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < requests[i].parts * num_kv_heads; j++, at++)
                owner[2 * at] = i, owner[2 * at + 1] = j;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads) if (threads > 1)
        for (int64_t task = 0; task < tasks; task++) {
            const Request *req = requests + owner[2 * task];
            const int64_t head = owner[2 * task + 1] / req->parts;
            const int64_t index = owner[2 * task + 1] % req->parts;
            const int64_t rows = (req->row1 - req->row0) * group;
            const int64_t keys = req->last - req->first;
            const int64_t each = ((keys + req->parts - 1) / req->parts + CHUNK - 1) / CHUNK * CHUNK;
            const int64_t first = req->first + index * each;
            const int64_t last = first + each < req->last ? first + each : req->last;
            float *mine = scratch + (req->partial + owner[2 * task + 1] * rows) * (VALUE_DIM + 2);
            float *top = mine + rows * VALUE_DIM;
            if (attend(&w, req, head, first, last, mine, top, top + rows)) {
#pragma omp atomic write
                failed = 1;
            }
        }
    }
    for (int64_t i = 0; i < count && !failed; i++) {
        const Request *req = requests + i;
        const int64_t rows = (req->row1 - req->row0) * group, stride = rows * (VALUE_DIM + 2);
        for (int64_t head = 0; head < num_kv_heads; head++) {
            float *base = scratch + (req->partial + head * req->parts * rows) * (VALUE_DIM + 2);
            for (int64_t m = 0; m < rows; m++) {
                float *sum_out = base + m * VALUE_DIM, *state = base + rows * VALUE_DIM + m;
                for (int64_t part_at = 1; part_at < req->parts; part_at++) {
                    const float *other = base + part_at * stride + m * VALUE_DIM;
                    const float *theirs = base + part_at * stride + rows * VALUE_DIM + m;
                    if (theirs[rows] == 0.0f) continue;
                    const float high = theirs[0] > state[0] ? theirs[0] : state[0];
                    const float a = expf(state[0] - high), b = expf(theirs[0] - high);
                    for (int c = 0; c < VALUE_DIM; c++) sum_out[c] = sum_out[c] * a + other[c] * b;
                    state[0] = high;
                    state[rows] = state[rows] * a + theirs[rows] * b;
                }
                finish(&w, req->row0 + m / group, head * group + m % group, sum_out, state[0],
                       state[rows]);
            }
        }
    }
    free(owner);
    free(scratch);
    free(requests);
    return failed;
}
