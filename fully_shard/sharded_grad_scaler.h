#pragma once
// The public name of optim/sharded_grad_scaler.h.

#include "optim/sharded_grad_scaler.h"  // IWYU pragma: export
