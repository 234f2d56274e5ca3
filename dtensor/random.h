#pragma once
// The public name of dtensor/random/random.h.

#include "dtensor/random/random.h"  // IWYU pragma: export
