#include "testing/temp_folder.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.h"

namespace tessera::testing {

TempFolder::TempFolder() {
  const char* base = std::getenv("TEST_TMPDIR");
  path_ = (base ? std::string(base) : std::filesystem::temp_directory_path().string()) + "/tessera_XXXXXX";
  TESSERA_CHECK(Error, mkdtemp(path_.data()) != nullptr, "TempFolder: {} cannot be made", path_);
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

}  // namespace tessera::testing
