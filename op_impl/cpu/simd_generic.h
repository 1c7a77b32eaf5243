// Portable leaf: one vector is 4 floats in the compiler's own vector type. Included inside namespace FLASHMLA_NS.

typedef float VF __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kGemmRows = 6;    // 6 x 2 accumulators of 16 registers
constexpr int kGemmVecs = 2;
constexpr int kGemmTallRows = 6;  // a taller block would hold a single vector
constexpr int kQkVecs = 3;      // vectors of rows that QK holds at most
constexpr int kQkAccumulators = 12;

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

FM_INLINE VF load_quad(const float *p) { return load(p); }
// Lane v: the sum of vector v.
FM_INLINE VF sum_quads(VF a, VF b, VF c, VF d) {
  return VF{a[0], b[0], c[0], d[0]} + VF{a[2], b[2], c[2], d[2]} + (VF{a[1], b[1], c[1], d[1]} + VF{a[3], b[3], c[3], d[3]});
}
