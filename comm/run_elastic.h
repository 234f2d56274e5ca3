#pragma once
// The public name of comm/launcher/run_elastic.h.

#include "comm/launcher/run_elastic.h"  // IWYU pragma: export
