#pragma once
// The public name of comm/shm/shared_gradients.h.

#include "comm/shm/shared_gradients.h"  // IWYU pragma: export
