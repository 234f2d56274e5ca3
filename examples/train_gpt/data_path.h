#pragma once
// Files of an example: those that come with it, and those that the user names.

#include <string>

namespace tessera::examples {

/// `path` as the user meant it: `bazel run` starts programs elsewhere and gives the user's directory in
/// $BUILD_WORKING_DIRECTORY. Absolute.
std::string path_from_caller(const std::string& path);

/// The text that the build makes for train_gpt. Throws ValueError if it is not beside the program.
std::string default_data_path();

/// Throws ValueError that names `option` and the path unless a file can be written there; makes an empty one. To be
/// called before the work whose result goes there.
void check_writable(const std::string& option, const std::string& path);

/// The same for a folder, which is made.
void check_writable_folder(const std::string& option, const std::string& path);

}  // namespace tessera::examples
