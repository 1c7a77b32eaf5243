// Stands for CANN's header of this name: the AscendC calls that the kernel uses, run by the twin.
#pragma once

#include "op_impl/twin/api/copies.h"
#include "op_impl/twin/api/cube.h"
#include "op_impl/twin/api/sync.h"
#include "op_impl/twin/api/tensors.h"
#include "op_impl/twin/api/types.h"
#include "op_impl/twin/api/vector.h"
