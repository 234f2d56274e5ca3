#pragma once
// The public name of comm/backend/reduce_op.h.

#include "comm/backend/reduce_op.h"  // IWYU pragma: export
