#pragma once
// Files of an example: its own, and those that the user names.

#include <string>

namespace tessera::examples {

/// Returns an absolute path relative to the user's directory, which `bazel run` gives in $BUILD_WORKING_DIRECTORY.
std::string path_from_caller(const std::string& path);

/// Returns the text that the build makes for train_gpt. Throws ValueError if it is not next to the program.
std::string default_data_path();

/// Makes an empty file, and throws ValueError, naming `option` and the path, if that fails. Call it before computing
/// the file's contents.
void check_writable(const std::string& option, const std::string& path);

/// Like check_writable, for a folder.
void check_writable_folder(const std::string& option, const std::string& path);

}  // namespace tessera::examples
