#include "examples/training/data_path.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace tessera::examples {

namespace fs = std::filesystem;

std::string path_from_caller(const std::string& path) {
  const char* caller = std::getenv("BUILD_WORKING_DIRECTORY");
  return (caller != nullptr ? fs::path(caller) / path : fs::absolute(path)).lexically_normal().string();
}

// The text is in the program's own folder; /proc/self/exe follows the links through which Bazel reaches the program.
std::string default_data_path() {
  std::error_code failure;
  const fs::path program = fs::read_symlink("/proc/self/exe", failure);
  const fs::path text = program.parent_path() / "libtorch_headers.txt";
  TESSERA_CHECK(ValueError, fs::exists(text, failure),
                "the default data {} is not there; build it with //examples:train_gpt, or give --data FILE",
                text.string());
  return text.string();
}

void check_writable(const std::string& option, const std::string& path) {
  const std::ofstream file(path, std::ios::app);
  TESSERA_CHECK(ValueError, file.is_open(), "{} {}: cannot be written: {}", option, path, std::strerror(errno));
}

void check_writable_folder(const std::string& option, const std::string& path) {
  std::error_code failure;
  fs::create_directories(path, failure);
  if (!failure && access(path.c_str(), W_OK | X_OK) != 0) {
    failure = std::error_code(errno, std::generic_category());
  }
  TESSERA_CHECK(ValueError, !failure, "{} {}: cannot be written to: {}", option, path, failure.message());
}

}  // namespace tessera::examples
