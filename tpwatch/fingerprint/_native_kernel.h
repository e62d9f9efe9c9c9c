/* One pass over the bytes of one tensor: hash, norm, absmax, zeros, sketch.
 *
 * Knows: the fingerprint of `reference.py`, in the vocabulary of the vector unit that includes it.
 * Must not know: Python, or which vector unit that is. Included once per unit by `_native_isa.h`,
 * which defines TARGET, NAME, VECTOR_BYTES, ROWS_AT_ONCE, HAS_FLOAT16 and the vector operations.
 *
 * Order of work: a chunk is read in rows of 4096 bytes, ROWS_AT_ONCE of them side by side, so that
 * the hash keys and the running sketch sums are loaded once for several rows. Fast sums are float32
 * for one row, then float64. A chunk whose fast sums cannot be trusted (a non-finite element, or
 * squares near the ends of the float32 range) is read again by `exact`, in float64.
 */

/* Running values of one chunk. The arrays hold one vector, or one value per vector lane. */
typedef struct {
    _Alignas(64) float sums[2 * SLOTS];       /* signed sums, by position modulo 1024 or 2048 */
    _Alignas(64) double l2[VECTOR_BYTES / 4];
    _Alignas(64) uint64_t hash[VECTOR_BYTES / 8];
    _Alignas(64) union NAME(lanes) {
        uint32_t words[VECTOR_BYTES / 4];
        uint16_t halves[VECTOR_BYTES / 2];
    } absmax, nonzero; /* bits of |x| and counts, in lanes as wide as an element */
} NAME(running);

/* Add `count` rows of 4096 bytes, rows `first` and on of their chunk. `kind` and `count` are
 * compile-time constants at every call: the branches on them vanish. */
static inline __attribute__((always_inline)) TARGET void NAME(rows)(
    NAME(running) *run, const tables_t *keys, const unsigned char *data, int first, int count,
    int kind) {
    const int values = kind != KIND_BYTES, half = kind == KIND_BFLOAT16 || kind == KIND_FLOAT16;
    const int sign_rows = half ? 16 : 32; /* rows whose signs share one table word */
    const int_vector magnitude = splat(half ? 0x7fff7fffu : 0x7fffffffu);
    const int_vector sign = splat(half ? 0x80008000u : 0x80000000u);
    const int_vector one = splat(half ? 0x00010001u : 1u), upper = splat(0xffff0000u);
    const uint32_t *signs = (half ? keys->signs16 : keys->signs32) + first / sign_rows * SLOTS;
    int_vector hash[ROWS_AT_ONCE], absmax = load(&run->absmax), nonzero = load(&run->nonzero);
    float_vector l2[ROWS_AT_ONCE], l2_high[ROWS_AT_ONCE];
    for (int r = 0; r < count; r++) {
        hash[r] = splat(0);
        l2[r] = l2_high[r] = as_float(splat(0));
    }
    for (int at = 0; at < ROW_BYTES; at += VECTOR_BYTES) {
        const int_vector v0 = load((const char *)keys->v0 + at);
        const int_vector v1 = load((const char *)keys->v1 + at);
        /* where the two halves of 16-bit data are summed: bfloat16 splits odd from even elements */
        const int low_at = kind == KIND_FLOAT16 ? at / 2 : at / 4;
        const int high_at = kind == KIND_FLOAT16 ? low_at + VECTOR_BYTES / 4 : low_at + SLOTS;
        int_vector flips = splat(0);
        float_vector low_sum = as_float(flips), high_sum = low_sum;
        if (values) {
            flips = shift_left(load((const char *)signs + at), first % sign_rows);
            low_sum = load_float(run->sums + low_at);
            if (half) high_sum = load_float(run->sums + high_at);
        }
        for (int r = 0; r < count; r++) {
            const int_vector x = keep(load(data + r * ROW_BYTES + at));
            prefetch(data + at * count + r * VECTOR_BYTES + PREFETCH_BYTES);
            hash[r] = add64(hash[r], add64(multiply_low(x, v0), multiply_high(x, v1)));
            if (!values) continue;
            absmax = half ? largest16(absmax, x, magnitude) : largest32(absmax, x, magnitude);
            nonzero = half ? count16(nonzero, x, magnitude, one) : count32(nonzero, x, magnitude, one);
            const int_vector y = xor(x, and(flips, sign));
            flips = add32(flips, flips);
            float_vector low = as_float(y), high = low;
            if (kind == KIND_BFLOAT16) low = as_float(shift_left(y, 16)), high = as_float(and(y, upper));
            if (kind == KIND_FLOAT16) low = float16_low(y), high = float16_high(y);
            l2[r] = multiply_add(low, low, l2[r]);
            low_sum = add_float(low_sum, low);
            if (half) {
                l2_high[r] = multiply_add(high, high, l2_high[r]);
                high_sum = add_float(high_sum, high);
            }
        }
        if (values) store_float(run->sums + low_at, low_sum);
        if (half) store_float(run->sums + high_at, high_sum);
    }
    store(&run->absmax, absmax);
    store(&run->nonzero, nonzero);
    for (int r = 0; r < count; r++) {
        _Alignas(64) uint64_t hashes[VECTOR_BYTES / 8];
        _Alignas(64) float squares[VECTOR_BYTES / 4];
        store(hashes, hash[r]);
        store_float(squares, add_float(l2[r], l2_high[r]));
        for (int i = 0; i < VECTOR_BYTES / 8; i++) run->hash[i] += keys->u[first + r] * hashes[i];
        for (int i = 0; i < VECTOR_BYTES / 4; i++) run->l2[i] += (double)squares[i];
    }
}

/* All rows of one chunk of one kind; the last partial row is padded with zeros. */
static inline __attribute__((always_inline)) TARGET void NAME(all_rows)(
    NAME(running) *run, const tables_t *keys, const unsigned char *data, int64_t bytes, int kind) {
    const int whole = (int)(bytes / ROW_BYTES), rest = (int)(bytes % ROW_BYTES);
    int row = 0;
    for (; row + ROWS_AT_ONCE <= whole; row += ROWS_AT_ONCE)
        NAME(rows)(run, keys, data + (int64_t)row * ROW_BYTES, row, ROWS_AT_ONCE, kind);
    for (; row < whole; row++)
        NAME(rows)(run, keys, data + (int64_t)row * ROW_BYTES, row, 1, kind);
    if (rest) {
        _Alignas(64) unsigned char padded[ROW_BYTES] = {0};
        memcpy(padded, data + (int64_t)row * ROW_BYTES, (size_t)rest);
        NAME(rows)(run, keys, padded, row, 1, kind);
    }
}

/* Add neighbouring runs of `width` values; `width` is a compile-time constant at every call. */
static inline __attribute__((always_inline)) TARGET void NAME(halve)(
    float *restrict to, const float *restrict from, int width) {
    for (int m = 0; m < FINE; m++)
        for (int i = 0; i < width; i++)
            to[m * width + i] = from[2 * m * width + i] + from[(2 * m + 1) * width + i];
}

/* Fold signed sums by position modulo 1024 into the sketch of chunk `chunk`. Coordinates lie side by
 * side in one vector, the two sets in turn, so that no sum runs across a vector. */
static TARGET void NAME(fold)(double *restrict sketch, const float *restrict sums, uint64_t chunk) {
    _Alignas(64) float first[FINE], second[FINE], eight[8 * FINE], four[4 * FINE], two[2 * FINE];
    _Alignas(64) float pairs[2 * FINE], coordinates[2][SKETCH];
    _Alignas(64) uint32_t negative[2][SKETCH];
    for (int m = 0; m < FINE; m++) first[m] = sums[m];
    for (int a = FINE; a < SLOTS; a += FINE)
        for (int m = 0; m < FINE; m++) first[m] += sums[a + m];
    NAME(halve)(eight, sums, 8);
    NAME(halve)(four, eight, 4);
    NAME(halve)(two, four, 2);
    NAME(halve)(second, two, 1);
    for (int m = 0; m < FINE; m++) pairs[2 * m] = first[m], pairs[2 * m + 1] = second[m];
    for (int i = 0; i < SKETCH; i++) {
        const uint64_t word = splitmix64(chunk ^ (uint64_t)coordinate_of_lane(i) * GAMMA);
        negative[0][i] = (uint32_t)word;
        negative[1][i] = (uint32_t)(word >> 32);
    }
    enum { LANES = VECTOR_BYTES / 4, VECTORS = SKETCH / LANES };
    const int_vector sign = splat(0x80000000u);
    int_vector flips[2][VECTORS];
    float_vector total[2][VECTORS];
    for (int half = 0; half < 2; half++)
        for (int v = 0; v < VECTORS; v++) {
            flips[half][v] = load(negative[half] + v * LANES);
            total[half][v] = as_float(splat(0));
        }
    for (int m = FINE / 2 - 1; m >= 0; m--)
        for (int half = 0; half < 2; half++) {
            const int_vector pair = splat64(pairs + 2 * (m + half * FINE / 2));
            for (int v = 0; v < VECTORS; v++) {
                const int_vector flip = and(flips[half][v], sign);
                total[half][v] = add_float(total[half][v], as_float(xor(pair, flip)));
                flips[half][v] = add32(flips[half][v], flips[half][v]);
            }
        }
    for (int half = 0; half < 2; half++)
        for (int v = 0; v < VECTORS; v++) store_float(coordinates[half] + v * LANES, total[half][v]);
    for (int i = 0; i < SKETCH; i++)
        sketch[coordinate_of_lane(i)] += (double)coordinates[0][i] + (double)coordinates[1][i];
}

/* Add one chunk's statistics from the fast sums; return 0, adding nothing, if they are not to be
 * trusted. */
static TARGET int NAME(fast)(
    totals_t *total, const NAME(running) *run, uint64_t chunk, int64_t count, int kind) {
    const int half = kind != KIND_FLOAT32;
    uint32_t absmax = 0;
    int64_t nonzero = 0;
    for (int i = 0; i < VECTOR_BYTES / (half ? 2 : 4); i++) {
        const uint32_t size = half ? run->absmax.halves[i] : run->absmax.words[i];
        absmax = size > absmax ? size : absmax;
        nonzero += half ? run->nonzero.halves[i] : run->nonzero.words[i];
    }
    double l2 = 0;
    for (int i = 0; i < VECTOR_BYTES / 4; i++) l2 += run->l2[i];
    if (absmax >= infinity_bits(kind) || !(l2 <= FAST_L2_MAX)) return 0; /* a NaN may show in l2 only */
    if (absmax && l2 < FAST_L2_MIN) return 0;
    _Alignas(64) float folded[SLOTS];
    const float *sums = run->sums;
    if (half) sums = folded;
    if (kind == KIND_FLOAT16)
        for (int i = 0; i < SLOTS; i++) folded[i] = run->sums[i] + run->sums[SLOTS + i];
    if (kind == KIND_BFLOAT16)
        for (int i = 0; i < SLOTS / 2; i++) {
            folded[2 * i] = run->sums[i] + run->sums[SLOTS / 2 + i];
            folded[2 * i + 1] = run->sums[SLOTS + i] + run->sums[SLOTS + SLOTS / 2 + i];
        }
    NAME(fold)(total->sketch, sums, chunk);
    total->l2 += l2;
    total->absmax = fmax_(total->absmax, magnitude_of(absmax, kind));
    total->zeros += count - nonzero;
    return 1;
}

/* Add one chunk's statistics in float64, with non-finite elements counted and left out. */
static TARGET void NAME(exact)(
    totals_t *total, const tables_t *keys, const unsigned char *data, uint64_t chunk, int64_t count,
    int kind) {
    _Alignas(64) double x[SLOTS], sums[SLOTS] = {0}, squares[SLOTS] = {0}, largest[SLOTS] = {0};
    int64_t nonfinite = 0, zeros = 0;
    for (int64_t start = 0; start < count; start += SLOTS) {
        const int n = (int)(count - start < SLOTS ? count - start : SLOTS);
        widen(x, data, start, n, kind);
        for (int i = 0; i < n; i++) {
            const double size = flip_sign(x[i], x[i] < 0);
            const int finite = size <= DBL_MAX;
            const double value = finite ? x[i] : 0.0;
            nonfinite += !finite;
            zeros += size == 0;
            squares[i] += value * value;
            largest[i] = finite && size > largest[i] ? size : largest[i];
            sums[i] += flip_sign(value, keys->sign_bits[(start + i) / 64] >> ((start + i) % 64));
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        total->l2 += squares[i];
        total->absmax = fmax_(total->absmax, largest[i]);
    }
    fold_exact(total->sketch, sums, chunk);
    total->nonfinite += nonfinite;
    total->zeros += zeros;
}

/* Add one chunk of `count` elements to `total`. */
static TARGET void NAME(chunk)(
    totals_t *total, const tables_t *keys, const tensor_t *tensor, int64_t index) {
    const int64_t begin = index * CHUNK;
    const int64_t count = tensor->numel - begin < CHUNK ? tensor->numel - begin : CHUNK;
    const unsigned char *data = (const unsigned char *)(uintptr_t)tensor->address;
    data += begin * tensor->itemsize;
    const uint64_t word = splitmix64(keys->chunk_base + (uint64_t)index);
    const int64_t bytes = count * tensor->itemsize;
    NAME(running) run;
    memset(&run.l2, 0, sizeof run - offsetof(NAME(running), l2));
    if (tensor->kind != KIND_BYTES) memset(run.sums, 0, sizeof run.sums / (tensor->itemsize == 4 ? 2 : 1));
    int settled = 1;
    switch (tensor->kind) {
    case KIND_FLOAT32:
        NAME(all_rows)(&run, keys, data, bytes, KIND_FLOAT32);
        settled = NAME(fast)(total, &run, word, count, KIND_FLOAT32);
        break;
    case KIND_BFLOAT16:
        NAME(all_rows)(&run, keys, data, bytes, KIND_BFLOAT16);
        settled = NAME(fast)(total, &run, word, count, KIND_BFLOAT16);
        break;
#if HAS_FLOAT16
    case KIND_FLOAT16:
        NAME(all_rows)(&run, keys, data, bytes, KIND_FLOAT16);
        settled = NAME(fast)(total, &run, word, count, KIND_FLOAT16);
        break;
#endif
    default:
        NAME(all_rows)(&run, keys, data, bytes, KIND_BYTES);
        settled = tensor->kind == KIND_BYTES;
    }
    if (!settled) NAME(exact)(total, keys, data, word, count, (int)tensor->kind);
    uint64_t hash = 0;
    for (int i = 0; i < VECTOR_BYTES / 8; i++) hash += run.hash[i];
    const int64_t row_count = (bytes + ROW_BYTES - 1) / ROW_BYTES;
    total->hash += (word | 1) * (hash + keys->row_bias[row_count]);
}
