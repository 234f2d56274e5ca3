#pragma once
// Public name of nn/hooks/hooked.h.

#include "nn/hooks/hooked.h"  // IWYU pragma: export
