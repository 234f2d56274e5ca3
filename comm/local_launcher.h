#pragma once
// The public name of comm/launch/local_launcher.h.

#include "comm/launch/local_launcher.h"  // IWYU pragma: export
