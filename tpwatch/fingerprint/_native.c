/* tpwatch.fingerprint._native: every fingerprint column of many CPU tensors in one call.
 *
 * Knows: the row of `layout.py`, the formulas of `reference.py`, addresses handed in by `native.py`.
 * Must not know: torch. Nothing is allocated, no Python object is touched while the GIL is released,
 * and the result does not depend on alignment or on which tensors share a call.
 *
 * Integer columns equal the reference bit for bit. float32 sums take at most 256 squares or 64
 * elements each: |l2 - exact| <= 2**-15 exact, and a sketch coordinate is off by at most 2**-17
 * times the sum of |x|; measured errors are a hundred times smaller.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the hash reads little-endian words; use the torch implementation on this machine"
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

enum { CHUNK = 65536, ROW_BYTES = 4096, ROW_WORDS = 512, MAX_ROWS = 128, FINE = 64, GROUP = 16 };
enum { SKETCH = 16, HEAD = 5, ROW = 22, SLOTS = FINE * GROUP };
enum { KIND_NONE, KIND_BYTES, KIND_FLOAT32, KIND_BFLOAT16, KIND_FLOAT16, KIND_FLOAT64 };

/* Far enough ahead that the second-level cache has the next rows when they are summed. */
#define PREFETCH_BYTES 24576
#define prefetch(p) __builtin_prefetch((p), 0, 2)
#define GAMMA 0x9e3779b97f4a7c15u
#define L2_MAX 1e300
/* Between these, the squares of float32 elements neither overflow nor lose digits that matter. */
#define FAST_L2_MIN 0x1p-90
#define FAST_L2_MAX 0x1p126

/* Keys, as `native.py` lays them out. */
typedef struct {
    uint64_t v0[ROW_WORDS], v1[ROW_WORDS], u[MAX_ROWS];
    uint64_t row_bias[MAX_ROWS + 1]; /* what reading the high half as signed takes from n rows */
    uint64_t sign_bits[CHUNK / 64];  /* bit e % 64 of word e / 64: element e is negated */
    uint32_t signs32[2 * SLOTS];     /* the same bits, by column: bit 31 - r is row r of 1024 */
    uint32_t signs16[2 * SLOTS];     /* the same for pairs of 16-bit elements: bits 31 - r, 15 - r */
    uint64_t chunk_base, seed;
} tables_t;

typedef struct {
    int64_t address, numel, kind, itemsize;
} tensor_t;

typedef struct {
    uint64_t hash;
    double l2, absmax, sketch[SKETCH];
    int64_t nonfinite, zeros;
} totals_t;

typedef void chunk_function(totals_t *, const tables_t *, const tensor_t *, int64_t);

static inline uint64_t splitmix64(uint64_t state) {
    uint64_t z = state + GAMMA;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The eight bytes at `p`. */
static inline uint64_t bytes8(const void *p) {
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

static inline double fmax_(double a, double b) { return a > b ? a : b; }

/* Negate `x` if the lowest bit of `bits` is set. */
static inline double flip_sign(double x, uint64_t bits) {
    uint64_t word;
    memcpy(&word, &x, sizeof word);
    word ^= bits << 63;
    memcpy(&x, &word, sizeof x);
    return x;
}

static inline double from_bits64(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline double from_float32(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return (double)x;
}

static inline double from_float16(uint32_t bits) {
    const uint64_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const uint64_t wide = exponent == 31 ? 2047 : exponent + 1023 - 15;
    const double size = exponent ? from_bits64(wide << 52 | mantissa << 42) : (double)mantissa * 0x1p-24;
    return flip_sign(size, bits >> 15);
}

/* Bits of positive infinity. */
static inline uint32_t infinity_bits(int kind) {
    return kind == KIND_FLOAT32 ? 0x7f800000u : kind == KIND_BFLOAT16 ? 0x7f80u : 0x7c00u;
}

static inline double magnitude_of(uint32_t bits, int kind) {
    if (kind == KIND_FLOAT32) return from_float32(bits);
    return kind == KIND_BFLOAT16 ? from_float32(bits << 16) : from_float16(bits);
}

/* Elements start ... start + n - 1 as float64; the data may be unaligned. */
static void widen(double *x, const unsigned char *data, int64_t start, int n, int kind) {
    const int size = kind == KIND_FLOAT64 ? 8 : kind == KIND_FLOAT32 ? 4 : 2;
    const unsigned char *at = data + start * size;
    for (int i = 0; i < n; i++, at += size) {
        uint32_t word = 0;
        if (kind == KIND_FLOAT64) {
            memcpy(&x[i], at, sizeof x[i]);
            continue;
        }
        memcpy(&word, at, kind == KIND_FLOAT32 ? 4 : 2);
        x[i] = magnitude_of(word, kind);
    }
}

/* Which sketch coordinate lane i of the fast fold holds: even lanes the first set, odd the second. */
static inline int coordinate_of_lane(int i) { return i % 2 * (SKETCH / 2) + i / 2; }

/* Fold float64 sums by position modulo 1024 into the sketch of chunk `chunk`. */
static void fold_exact(double *sketch, const double *sums, uint64_t chunk) {
    double fine[2][FINE] = {{0}};
    for (int i = 0; i < SLOTS; i++) {
        fine[0][i % FINE] += sums[i];
        fine[1][i / GROUP] += sums[i];
    }
    for (int b = 0; b < SKETCH; b++) {
        const uint64_t negative = splitmix64(chunk ^ (uint64_t)b * GAMMA);
        for (int m = 0; m < FINE; m++) sketch[b] += flip_sign(fine[b / (SKETCH / 2)][m], negative >> m);
    }
}

#include "_native_isa.h"

static chunk_function *const units[] = {
#if defined(__x86_64__)
    chunk_avx512, chunk_avx2,
#endif
    chunk_portable};
static const char *const unit_names[] = {
#if defined(__x86_64__)
    "avx512", "avx2",
#endif
    "portable"};
enum { UNITS = sizeof units / sizeof *units };

/* Asked once, at import: the question costs microseconds on a virtual machine. */
static int usable[UNITS];

static int runs_here(int unit) {
    if (unit == UNITS - 1) return 1;
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    const int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    if (unit == 1) return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return 0;
#endif
}

/* Switch the caller's flush-to-zero and rounding modes off: they would change the columns. */
static uint64_t plain_arithmetic(void) {
#if defined(__x86_64__)
    const uint64_t mode = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return mode;
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return mode;
#else
    return 0;
#endif
}

static void restore_arithmetic(uint64_t mode) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
    (void)mode;
#endif
}

/* A finite number whatever float64 overflow made of the sum. */
static double bounded(double x) {
    if (x != x) return 0;
    return x > L2_MAX ? L2_MAX : x < -L2_MAX ? -L2_MAX : x;
}

static void write_row(double *row, chunk_function *chunk, const tables_t *keys, const tensor_t *tensor) {
    totals_t total = {0};
    memset(row, 0, ROW * sizeof *row);
    if (tensor->kind == KIND_NONE) return;
    for (int64_t index = 0; index * CHUNK < tensor->numel; index++) chunk(&total, keys, tensor, index);
    total.hash += splitmix64((uint64_t)(tensor->numel * tensor->itemsize) ^ keys->seed);
    row[0] = (double)(total.hash & 0xffffffffu);
    row[1] = (double)(total.hash >> 32);
    row[2] = bounded(total.l2);
    row[3] = total.absmax;
    row[4] = (double)total.nonfinite;
    row[5] = (double)total.zeros;
    for (int b = 0; b < SKETCH; b++) row[6 + b] = bounded(total.sketch[b]);
}

/* Ask for the first row of the next tensor while this one is summed: small tensors lie apart, and
 * the hardware cannot guess where the next begins. */
static void fetch_start(const tensor_t *tensor) {
    const int64_t bytes = tensor->numel * tensor->itemsize;
    const char *data = (const char *)(uintptr_t)tensor->address;
    for (int64_t at = 0; at < bytes && at < ROW_BYTES; at += 64) prefetch(data + at);
}

PyDoc_STRVAR(rows_doc, "rows(unit, tables, plan, count, out, head, head_stride)\n\n"
                       "Write `count` rows. All but `unit` (an index into `units()`), `count` and\n"
                       "`head_stride` (in float64) are addresses; `head` may be 0.");

static PyObject *rows(PyObject *self, PyObject *args) {
    (void)self;
    int unit;
    unsigned long long tables, plan, out, head;
    Py_ssize_t count, stride;
    if (!PyArg_ParseTuple(args, "iKKnKKn", &unit, &tables, &plan, &count, &out, &head, &stride))
        return NULL;
    if (unit < 0 || unit >= UNITS || !usable[unit]) {
        PyErr_SetString(PyExc_ValueError, "unit: not usable on this processor, see units()");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    const uint64_t mode = plain_arithmetic();
    const tensor_t *tensors = (const tensor_t *)(uintptr_t)plan;
    for (Py_ssize_t i = 0; i < count; i++) {
        double *row = (double *)(uintptr_t)out + i * ROW;
        if (i + 1 < count) fetch_start(tensors + i + 1);
        write_row(row, units[unit], (const tables_t *)(uintptr_t)tables, tensors + i);
        if (head) memcpy((double *)(uintptr_t)head + i * stride, row, HEAD * sizeof *row);
    }
    restore_arithmetic(mode);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(units_doc, "units() -> list of (index, name) of the vector units usable here, widest first.");

static PyObject *usable_units(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < UNITS; i++) {
        if (!usable[i]) continue;
        PyObject *entry = Py_BuildValue("(is)", i, unit_names[i]);
        if (!entry || PyList_Append(list, entry) < 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

static PyMethodDef methods[] = {
    {"rows", rows, METH_VARARGS, rows_doc},
    {"units", usable_units, METH_NOARGS, units_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Fingerprint rows of CPU tensors, one call for all.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) {
    for (int unit = 0; unit < UNITS; unit++) usable[unit] = runs_here(unit);
    return PyModuleDef_Init(&module);
}
