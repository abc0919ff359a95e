/* Gradients to integers and back, each in one pass over memory, all tensors in one call.

   The same operations as the plain torch code in exact.py, so the same bits: multiply by a power of two, round half to
   even, add with wrap-around; and back: convert to float, multiply. The largest magnitude is found on the way.

   A call takes a table of 64-bit numbers, column by column, with an entry for each tensor. */

#include <math.h>
#include <stdint.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* out = total + round(gradient * scale); total may be null (then it counts as 0), out may be either of the two arrays.
   Returns the largest bits of |gradient|: for finite numbers their order is that of the numbers, and infinities
   and NaN come out above all others. */
static int32_t to_integers(const float *gradient, const int32_t *total, int32_t *out, int64_t count, float scale) {
  int64_t i = 0;
  int32_t largest = 0;
#ifdef __SSE2__
  const __m128 factor = _mm_set1_ps(scale);
  const __m128i magnitude = _mm_set1_epi32(0x7fffffff);
  __m128i most = _mm_setzero_si128();
  for (; i + 4 <= count; i += 4) {
    __m128 value = _mm_loadu_ps(gradient + i);
    __m128i bits = _mm_and_si128(_mm_castps_si128(value), magnitude);
    __m128i larger = _mm_cmpgt_epi32(bits, most);
    most = _mm_or_si128(_mm_and_si128(larger, bits), _mm_andnot_si128(larger, most));
    __m128i rounded = _mm_cvtps_epi32(_mm_mul_ps(value, factor));
    if (total)
      rounded = _mm_add_epi32(rounded, _mm_loadu_si128((const __m128i *)(total + i)));
    _mm_storeu_si128((__m128i *)(out + i), rounded);
  }
  int32_t four[4];
  _mm_storeu_si128((__m128i *)four, most);
  for (int lane = 0; lane < 4; lane++)
    largest = four[lane] > largest ? four[lane] : largest;
#endif
  for (; i < count; i++) {
    union { float value; int32_t bits; } element = {gradient[i]};
    int32_t bits = element.bits & 0x7fffffff;
    largest = bits > largest ? bits : largest;
    /* What does not fit is computed again with a smaller scale; here it must only be no undefined behaviour. */
    float scaled = element.value * scale;
    uint32_t rounded = fabsf(scaled) < 2147483648.0f ? (uint32_t)(int32_t)lrintf(scaled) : 0x80000000u;
    out[i] = (int32_t)(rounded + (total ? (uint32_t)total[i] : 0u));
  }
  return largest;
}

/* Columns: gradient, total, out (addresses), elements, shift (the scale is 2^shift), place of the tensor in `largest`. */
void megabatch_to_integers(const int64_t *table, int64_t num_tensors, int32_t *largest) {
  const int64_t *gradients = table, *totals = table + num_tensors, *outs = table + 2 * num_tensors;
  const int64_t *counts = table + 3 * num_tensors, *shifts = table + 4 * num_tensors, *places = table + 5 * num_tensors;
  for (int64_t i = 0; i < num_tensors; i++) {
    int32_t found = to_integers((const float *)(intptr_t)gradients[i], (const int32_t *)(intptr_t)totals[i],
                                (int32_t *)(intptr_t)outs[i], counts[i], ldexpf(1.0f, (int)shifts[i]));
    if (found > largest[places[i]])
      largest[places[i]] = found;
  }
}

/* Integers become floats in the same memory: data = data * 2^-shift / num_ghosts. Columns: address, elements, shift. */
void megabatch_to_floats(const int64_t *table, int64_t num_tensors, int64_t num_ghosts) {
  for (int64_t i = 0; i < num_tensors; i++) {
    int32_t *data = (int32_t *)(intptr_t)table[i];
    const int64_t count = table[num_tensors + i];
    const float factor = (float)(ldexp(1.0, -(int)table[2 * num_tensors + i]) / (double)num_ghosts);
    for (int64_t j = 0; j < count; j++) {
      union { float value; int32_t bits; } element = {(float)data[j] * factor};
      data[j] = element.bits;
    }
  }
}
