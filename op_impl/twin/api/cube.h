// Matrix products: L0A x L0B -> L0C.
#pragma once

#include "op_impl/twin/api/copies.h"

namespace AscendC {

void twin_mmad(const TwinLocal& dst, const TwinLocal& a, const TwinLocal& b, const MmadParams& params, const Site& site);

template <typename T, typename U, typename S>
void Mmad(const LocalTensor<T>& dst, const LocalTensor<U>& fm, const LocalTensor<S>& filter, const MmadParams& params, const Site& site = Site::here()) {
  twin_mmad(twin_local(dst), twin_local(fm), twin_local(filter), params, site.named("Mmad"));
}

}  // namespace AscendC
