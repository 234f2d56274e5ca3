#pragma once
// The public name of comm/launcher/local_launcher.h.

#include "comm/launcher/local_launcher.h"  // IWYU pragma: export
