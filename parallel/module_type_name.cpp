#include "parallel/module_type_name.h"

#include <c10/util/Type.h>

#include "nn/hook_point.h"

namespace tessera {

std::string module_type_name(const torch::nn::Module& module) {
  const auto* point = find_hook_point(module);
  return point ? point->type_name() : c10::demangle(typeid(module).name());
}

}  // namespace tessera
