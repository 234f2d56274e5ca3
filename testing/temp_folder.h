#pragma once
// A folder of a test's own.

#include <string>

namespace tessera::testing {

/// A new folder under TEST_TMPDIR, else TMPDIR, else /tmp; the destructor removes it with all that is in it.
/// Throws Error where none can be made.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  /// The path of `name` in it.
  std::string path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// The bytes of a file; "" if it cannot be read.
std::string read_file(const std::string& path);

}  // namespace tessera::testing
