// AVX-512 leaf: one vector is 16 floats. Included inside namespace FLASHMLA_NS by simd-inl.h.

using VF = __m512;
constexpr int kLanes = 16;
constexpr int kGemmRows = 6;    // 6 x 4 accumulators of the 32 registers
constexpr int kGemmVecs = 4;
constexpr int kGemmTallRows = 8;  // 8 x 3 accumulators
constexpr int kQkVecs = 6;      // vectors of rows that QK holds at most
constexpr int kQkAccumulators = 24;

FM_INLINE VF load(const float *p) { return _mm512_loadu_ps(p); }
FM_INLINE void store(float *p, VF v) { _mm512_storeu_ps(p, v); }
FM_INLINE VF set1(float x) { return _mm512_set1_ps(x); }
FM_INLINE VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
FM_INLINE VF add(VF a, VF b) { return _mm512_add_ps(a, b); }
FM_INLINE VF sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
FM_INLINE VF mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
FM_INLINE VF max(VF a, VF b) { return _mm512_max_ps(a, b); }  // b where either is NaN
FM_INLINE VF select_less(VF a, VF b, VF yes, VF no) {         // a < b ? yes : no
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
FM_INLINE VF round_nearest(VF a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FM_INLINE VF scale_by_power_of_two(VF a, VF n) { return _mm512_scalef_ps(a, n); }  // a * 2^n, n a whole number
FM_INLINE float reduce_add(VF a) { return _mm512_reduce_add_ps(a); }

FM_INLINE VF load(const Half *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
FM_INLINE VF load(const BFloat *p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
FM_INLINE void store(Half *p, VF v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
FM_INLINE void store(BFloat *p, VF v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __m512i narrow = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), rounded, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(narrow));
}

// Four floats of memory in every quarter of the vector.
FM_INLINE VF load_quad(const float *p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
// Quarter i: the sums of the quarters i of a, b, c and d.
FM_INLINE VF sums_by_quarter(VF a, VF b, VF c, VF d) {
  const VF ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));  // a0+a2 b0+b2 a1+a3 b1+b3
  const VF cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}
// The sum of each quarter of a, b, c, d: lanes [4 v, 4 v + 4) hold those of vector v.
FM_INLINE VF sum_quads(VF a, VF b, VF c, VF d) {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums_by_quarter(a, b, c, d));
}
// The sums of a, b, c and d.
FM_INLINE void sum_each(VF a, VF b, VF c, VF d, float *to /* [4] */) {
  const VF quarters = sums_by_quarter(a, b, c, d);
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}
