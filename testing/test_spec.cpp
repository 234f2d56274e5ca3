#include "testing/test_spec.h"

namespace tessera::testing {

std::string exact_test_spec(const std::string& test_name) {
  std::string result;
  for (const char c : test_name) {
    // Characters with a special meaning in Catch2.
    if (c == '\\' || c == ',' || c == '[' || c == '"' || c == '*') {
      result += '\\';
    }
    result += c;
  }
  return result;
}

}  // namespace tessera::testing
