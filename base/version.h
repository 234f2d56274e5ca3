#pragma once
// The version of Tessera. CMake's package and the programs' --version read it from this file.

#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 1
#define TESSERA_VERSION_PATCH 0

namespace tessera {

#define TESSERA_TEXT_OF(number) #number
#define TESSERA_VERSION_TEXT(major, minor, patch) \
  TESSERA_TEXT_OF(major) "." TESSERA_TEXT_OF(minor) "." TESSERA_TEXT_OF(patch)

/// Version as "major.minor.patch".
inline constexpr const char* kVersion =
    TESSERA_VERSION_TEXT(TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR, TESSERA_VERSION_PATCH);

#undef TESSERA_VERSION_TEXT
#undef TESSERA_TEXT_OF

}  // namespace tessera
