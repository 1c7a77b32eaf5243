// Portable leaf: one vector is 4 floats in the compiler's own vector type. Included inside namespace FLASHMLA_NS.

typedef float VF __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kGemmRows = 6;    // 6 x 2 accumulators of 16 registers
constexpr int kGemmVecs = 2;
constexpr int kQkVecs = 2;      // 2 x 6 or 1 x 12 accumulators
constexpr int kQkKeysWide = 6;
constexpr int kQkKeysNarrow = 12;

FM_INLINE VF load(const float *p) { VF v; __builtin_memcpy(&v, p, sizeof(v)); return v; }
FM_INLINE void store(float *p, VF v) { __builtin_memcpy(p, &v, sizeof(v)); }
FM_INLINE VF set1(float x) { return VF{x, x, x, x}; }
FM_INLINE VF fma(VF a, VF b, VF c) { return a * b + c; }
FM_INLINE VF add(VF a, VF b) { return a + b; }
FM_INLINE VF sub(VF a, VF b) { return a - b; }
FM_INLINE VF mul(VF a, VF b) { return a * b; }
FM_INLINE VF select_less(VF a, VF b, VF yes, VF no) {  // a < b ? yes : no
  const VI m = a < b;
  return (VF)((m & (VI)yes) | (~m & (VI)no));
}
FM_INLINE VF max(VF a, VF b) { return select_less(b, a, a, b); }  // b where either is NaN
FM_INLINE VF round_nearest(VF a) {  // for |a| < 2^22: adding 1.5 * 2^23 pushes the fraction out
  const VF shift = set1(12582912.0f);
  return (a + shift) - shift;
}
FM_INLINE VF scale_by_power_of_two(VF a, VF n) {  // a * 2^n, n a whole number of -126..127
  const VI power = (__builtin_convertvector(n, VI) + 127) << 23;
  return a * (VF)power;
}
FM_INLINE float reduce_add(VF a) { return (a[0] + a[2]) + (a[1] + a[3]); }

FM_INLINE VF load(const Half *p) { return VF{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
FM_INLINE VF load(const BFloat *p) { return VF{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
FM_INLINE void store(Half *p, VF v) { for (int i = 0; i < kLanes; ++i) p[i] = to_half(v[i]); }
FM_INLINE void store(BFloat *p, VF v) { for (int i = 0; i < kLanes; ++i) p[i] = to_bfloat(v[i]); }
