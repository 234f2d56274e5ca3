#pragma once
// The public name of comm/context/comm_stats.h.

#include "comm/context/comm_stats.h"  // IWYU pragma: export
