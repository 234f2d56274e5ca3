#pragma once
// Temporary folders for tests.

#include <string>

namespace tessera::testing {

/// Folder in TEST_TMPDIR, TMPDIR or /tmp, removed with its contents on destruction. Throws Error if it cannot be made.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::string read_file(const std::string& path);  // "" if it cannot be read

}  // namespace tessera::testing
