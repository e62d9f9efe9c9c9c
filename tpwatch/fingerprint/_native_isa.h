/* The vector operations of `_native_kernel.h` for each vector unit, and one kernel for each.
 *
 * Knows: intrinsics. Must not know: what is computed with them. A unit compiles on its own through
 * function target attributes, so one binary holds all and needs no compiler flag.
 */

/* Portable: 16-byte vectors in the compilers' own vector notation (baseline x86-64, NEON, ...). */
typedef uint32_t u32x4 __attribute__((vector_size(16), may_alias));
typedef uint16_t u16x8 __attribute__((vector_size(16), may_alias));
typedef uint64_t u64x2 __attribute__((vector_size(16), may_alias));
typedef int64_t i64x2 __attribute__((vector_size(16), may_alias));
typedef float f32x4 __attribute__((vector_size(16), may_alias));
typedef uint32_t u32x4_any __attribute__((vector_size(16), may_alias, aligned(1)));
typedef float f32x4_any __attribute__((vector_size(16), may_alias, aligned(1)));

static inline u32x4 portable_max32(u32x4 a, u32x4 b) {
    const u32x4 more = (u32x4)(a > b);
    return (a & more) | (b & ~more);
}
static inline u32x4 portable_max16(u32x4 a, u32x4 b) {
    const u32x4 more = (u32x4)((u16x8)a > (u16x8)b);
    return (a & more) | (b & ~more);
}
static inline u32x4 portable_min32(u32x4 a, u32x4 b) { return a ^ b ^ portable_max32(a, b); }
static inline u32x4 portable_min16(u32x4 a, u32x4 b) { return a ^ b ^ portable_max16(a, b); }
static inline u32x4 portable_splat64(uint64_t x) { return (u32x4)((u64x2){x, x}); }
static inline u32x4 portable_multiply_low(u32x4 a, u32x4 b) {
    const u64x2 half = {0xffffffffu, 0xffffffffu};
    return (u32x4)(((u64x2)a & half) * ((u64x2)b & half));
}
static inline u32x4 portable_multiply_high(u32x4 a, u32x4 b) {
    return (u32x4)(((i64x2)a >> 32) * (i64x2)b);
}

#define NAME(x) x##_portable
#define TARGET
#define VECTOR_BYTES 16
#define ROWS_AT_ONCE 1
#define HAS_FLOAT16 0
#define int_vector u32x4
#define float_vector f32x4
#define keep(v) (v)
#define load(p) ((u32x4) * (const u32x4_any *)(p))
#define store(p, v) (*(u32x4_any *)(p) = (v))
#define load_float(p) ((f32x4) * (const f32x4_any *)(p))
#define store_float(p, v) (*(f32x4_any *)(p) = (v))
#define as_float(v) ((f32x4)(v))
#define splat(c) ((u32x4){(c), (c), (c), (c)})
#define splat64(p) portable_splat64(bytes8(p))
#define and(a, b) ((a) & (b))
#define xor(a, b) ((a) ^ (b))
#define shift_left(v, n) ((v) << (uint32_t)(n))
#define add64(a, b) ((u32x4)((u64x2)(a) + (u64x2)(b)))
#define add32(a, b) ((u32x4)((a) + (b)))
#define add16(a, b) ((u32x4)((u16x8)(a) + (u16x8)(b)))
#define largest32(most, x, magnitude) portable_max32((most), and((x), (magnitude)))
#define largest16(most, x, magnitude) portable_max16((most), and((x), (magnitude)))
#define count32(n, x, magnitude, one) add32((n), portable_min32(and((x), (magnitude)), (one)))
#define count16(n, x, magnitude, one) add16((n), portable_min16(and((x), (magnitude)), (one)))
#define multiply_low portable_multiply_low
#define multiply_high portable_multiply_high
#define multiply_add(a, b, c) ((a) * (b) + (c))
#define add_float(a, b) ((a) + (b))
#define float16_low(v) ((f32x4)(v))
#define float16_high(v) ((f32x4)(v))
#include "_native_kernel.h"
#include "_native_undef.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* A loaded vector, kept in a register: compilers would rather load it anew for each use. */
static inline __attribute__((always_inline, target("avx2"))) __m256i keep256(__m256i v) {
    __asm__("" : "+x"(v));
    return v;
}
static inline __attribute__((always_inline, target("avx512f"))) __m512i keep512(__m512i v) {
    __asm__("" : "+v"(v));
    return v;
}
enum { LARGER_MAGNITUDE = 11 }; /* of vrangeps: the larger absolute value, sign cleared */

#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VECTOR_BYTES 32
#define ROWS_AT_ONCE 2
#define HAS_FLOAT16 1
#define int_vector __m256i
#define float_vector __m256
#define keep keep256
#define load(p) _mm256_loadu_si256((const __m256i *)(p))
#define store(p, v) _mm256_storeu_si256((__m256i *)(p), (v))
#define load_float(p) _mm256_loadu_ps(p)
#define store_float(p, v) _mm256_storeu_ps((p), (v))
#define as_float(v) _mm256_castsi256_ps(v)
#define splat(c) _mm256_set1_epi32((int)(c))
#define splat64(p) _mm256_set1_epi64x((long long)bytes8(p))
#define and(a, b) _mm256_and_si256((a), (b))
#define xor(a, b) _mm256_xor_si256((a), (b))
#define shift_left(v, n) _mm256_sll_epi32((v), _mm_cvtsi32_si128(n))
#define add64(a, b) _mm256_add_epi64((a), (b))
#define add32(a, b) _mm256_add_epi32((a), (b))
#define add16(a, b) _mm256_add_epi16((a), (b))
#define largest32(most, x, magnitude) _mm256_max_epu32((most), and((x), (magnitude)))
#define largest16(most, x, magnitude) _mm256_max_epu16((most), and((x), (magnitude)))
#define count32(n, x, magnitude, one) add32((n), _mm256_min_epu32(and((x), (magnitude)), (one)))
#define count16(n, x, magnitude, one) add16((n), _mm256_min_epu16(and((x), (magnitude)), (one)))
#define multiply_low(a, b) _mm256_mul_epu32((a), (b))
#define multiply_high(a, b) _mm256_mul_epi32(_mm256_srli_epi64((a), 32), (b))
#define multiply_add(a, b, c) _mm256_fmadd_ps((a), (b), (c))
#define add_float(a, b) _mm256_add_ps((a), (b))
#define float16_low(v) _mm256_cvtph_ps(_mm256_castsi256_si128(v))
#define float16_high(v) _mm256_cvtph_ps(_mm256_extracti128_si256((v), 1))
#include "_native_kernel.h"
#include "_native_undef.h"

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define VECTOR_BYTES 64
#define ROWS_AT_ONCE 4
#define HAS_FLOAT16 1
#define int_vector __m512i
#define float_vector __m512
#define keep keep512
#define load(p) _mm512_loadu_si512(p)
#define store(p, v) _mm512_storeu_si512((p), (v))
#define load_float(p) _mm512_loadu_ps(p)
#define store_float(p, v) _mm512_storeu_ps((p), (v))
#define as_float(v) _mm512_castsi512_ps(v)
#define splat(c) _mm512_set1_epi32((int)(c))
#define splat64(p) _mm512_set1_epi64((long long)bytes8(p))
#define and(a, b) _mm512_and_si512((a), (b))
#define xor(a, b) _mm512_xor_si512((a), (b))
#define shift_left(v, n) _mm512_sll_epi32((v), _mm_cvtsi32_si128(n))
#define add64(a, b) _mm512_add_epi64((a), (b))
#define add32(a, b) _mm512_add_epi32((a), (b))
#define add16(a, b) _mm512_add_epi16((a), (b))
/* One instruction, that of the larger magnitude. It leaves NaN out, which then shows in the norm. */
#define largest32(most, x, magnitude) \
    _mm512_castps_si512(_mm512_range_ps(as_float(most), as_float(x), LARGER_MAGNITUDE))
#define largest16(most, x, magnitude) _mm512_max_epu16((most), and((x), (magnitude)))
#define count32(n, x, magnitude, one) \
    _mm512_mask_add_epi32((n), _mm512_test_epi32_mask((x), (magnitude)), (n), (one))
#define count16(n, x, magnitude, one) add16((n), _mm512_min_epu16(and((x), (magnitude)), (one)))
#define multiply_low(a, b) _mm512_mul_epu32((a), (b))
#define multiply_high(a, b) _mm512_mul_epi32(_mm512_srli_epi64((a), 32), (b))
#define multiply_add(a, b, c) _mm512_fmadd_ps((a), (b), (c))
#define add_float(a, b) _mm512_add_ps((a), (b))
#define float16_low(v) _mm512_cvtph_ps(_mm512_castsi512_si256(v))
#define float16_high(v) _mm512_cvtph_ps(_mm512_extracti64x4_epi64((v), 1))
#include "_native_kernel.h"
#include "_native_undef.h"
#endif
