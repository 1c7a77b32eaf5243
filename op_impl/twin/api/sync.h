// Events, cross-core flags and barriers.
#pragma once

#include "op_impl/twin/api/tensors.h"

namespace AscendC {

void twin_set_flag(HardEvent event, int id, const Site& site);
void twin_wait_flag(HardEvent event, int id, const Site& site);
void twin_cross_set(int mode, pipe_t pipe, int id, const Site& site);
void twin_cross_wait(int mode, pipe_t pipe, int id, const Site& site);
void twin_pipe_barrier(pipe_t pipe, const Site& site);

template <HardEvent event>
void SetFlag(int32_t id, const Site& site = Site::here()) { twin_set_flag(event, id, site.named("SetFlag")); }
template <HardEvent event>
void WaitFlag(int32_t id, const Site& site = Site::here()) { twin_wait_flag(event, id, site.named("WaitFlag")); }
template <uint8_t mode, pipe_t pipe>
void CrossCoreSetFlag(uint16_t id, const Site& site = Site::here()) { twin_cross_set(mode, pipe, id, site.named("CrossCoreSetFlag")); }
template <uint8_t mode = 0, pipe_t pipe = PIPE_S>
void CrossCoreWaitFlag(uint16_t id, const Site& site = Site::here()) { twin_cross_wait(mode, pipe, id, site.named("CrossCoreWaitFlag")); }
template <pipe_t pipe>
void PipeBarrier(const Site& site = Site::here()) { twin_pipe_barrier(pipe, site.named("PipeBarrier")); }
template <bool isAIVOnly = true>
void SyncAll(const Site& site = Site::here()) { twin::Engine::current().sync_all(isAIVOnly, site.named("SyncAll")); }

}  // namespace AscendC
