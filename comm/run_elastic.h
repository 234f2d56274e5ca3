#pragma once
// The public name of comm/launch/run_elastic.h.

#include "comm/launch/run_elastic.h"  // IWYU pragma: export
