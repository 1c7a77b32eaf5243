// AVX2 leaf: one vector is 8 floats. Included inside namespace FLASHMLA_NS by simd-inl.h.

using VF = __m256;
constexpr int kLanes = 8;
constexpr int kGemmRows = 6;    // 6 x 2 accumulators of the 16 registers
constexpr int kGemmVecs = 2;
constexpr int kGemmTallRows = 6;  // a taller block would hold a single vector
constexpr int kQkVecs = 3;      // vectors of rows that QK holds at most
constexpr int kQkAccumulators = 12;

FM_INLINE VF load(const float *p) { return _mm256_loadu_ps(p); }
FM_INLINE void store(float *p, VF v) { _mm256_storeu_ps(p, v); }
FM_INLINE VF set1(float x) { return _mm256_set1_ps(x); }
FM_INLINE VF fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
FM_INLINE VF add(VF a, VF b) { return _mm256_add_ps(a, b); }
FM_INLINE VF sub(VF a, VF b) { return _mm256_sub_ps(a, b); }
FM_INLINE VF mul(VF a, VF b) { return _mm256_mul_ps(a, b); }
FM_INLINE VF max(VF a, VF b) { return _mm256_max_ps(a, b); }  // b where either is NaN
FM_INLINE VF select_less(VF a, VF b, VF yes, VF no) {         // a < b ? yes : no
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
FM_INLINE VF round_nearest(VF a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FM_INLINE VF scale_by_power_of_two(VF a, VF n) {  // a * 2^n, n a whole number of -126..127
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
}
FM_INLINE float reduce_add(VF a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

FM_INLINE VF load(const Half *p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
FM_INLINE VF load(const BFloat *p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
FM_INLINE void store(Half *p, VF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
FM_INLINE void store(BFloat *p, VF v) {
  alignas(32) float lanes[kLanes];
  _mm256_store_ps(lanes, v);
  for (int i = 0; i < kLanes; ++i) p[i] = to_bfloat(lanes[i]);
}

// Four floats of memory in both halves of the vector.
FM_INLINE VF load_quad(const float *p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128 *>(p)); }
// Half i: the sums of the halves i of a, b, c and d.
FM_INLINE VF sums_by_half(VF a, VF b, VF c, VF d) {
  const VF ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));  // a0+a2 b0+b2 a1+a3 b1+b3
  const VF cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}
// The sum of each half of a, b, c, d: lanes [2 v, 2 v + 2) hold those of vector v.
FM_INLINE VF sum_quads(VF a, VF b, VF c, VF d) {
  return _mm256_permutevar8x32_ps(sums_by_half(a, b, c, d), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
// The sums of a, b, c and d.
FM_INLINE void sum_each(VF a, VF b, VF c, VF d, float *to /* [4] */) {
  const VF halves = sums_by_half(a, b, c, d);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}
