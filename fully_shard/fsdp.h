#pragma once
// The public name of fsdp1/fsdp.h.

#include "fsdp1/fsdp.h"  // IWYU pragma: export
