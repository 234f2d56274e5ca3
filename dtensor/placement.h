#pragma once
// The public name of dtensor/spec/placement.h.

#include "dtensor/spec/placement.h"  // IWYU pragma: export
