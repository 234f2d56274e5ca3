#pragma once
// Lists of ops as text: aten_ops("abs abs_ add.Scalar") is {"aten::abs", "aten::abs_", "aten::add.Scalar"}.

#include <sstream>
#include <string>
#include <vector>

namespace tessera {

inline std::vector<std::string> aten_ops(const char* names) {
  std::vector<std::string> ops;
  std::istringstream stream(names);
  for (std::string name; stream >> name;) {
    ops.push_back("aten::" + name);
  }
  return ops;
}

}  // namespace tessera
