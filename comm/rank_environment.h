#pragma once
// The public name of comm/launch/rank_environment.h.

#include "comm/launch/rank_environment.h"  // IWYU pragma: export
