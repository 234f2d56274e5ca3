#include "fully_shard/managed_params.h"

#include <unordered_set>

#include "fully_shard/fsdp_state.h"

namespace tessera {

namespace {

class Collector {
 public:
  void visit(torch::nn::Module& module, const std::string& prefix) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (item.value().defined() && seen_.insert(item.value().unsafeGetTensorImpl()).second) {
        params.push_back({.name = prefix + item.key(), .tensor = item.value()});
      }
    }
    for (const auto& child : module.named_children()) {
      if (!find_fsdp_state(*child.value())) {
        visit(*child.value(), prefix + child.key() + ".");
      }
    }
  }

  std::vector<ManagedParam> params;

 private:
  std::unordered_set<c10::TensorImpl*> seen_;
};

}  // namespace

std::vector<ManagedParam> collect_managed_params(torch::nn::Module& module) {
  Collector collector;
  collector.visit(module, "");
  return std::move(collector.params);
}

}  // namespace tessera
