#include "fully_shard/managed_params.h"

#include <unordered_set>

#include "fully_shard/fsdp_root.h"

namespace tessera {

namespace {

class Collector {
 public:
  explicit Collector(const std::vector<at::Tensor>& ignored) {
    for (const auto& param : ignored) {
      seen_.insert(param.unsafeGetTensorImpl());
    }
  }

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

std::vector<ManagedParam> collect_managed_params(const std::vector<torch::nn::Module*>& modules,
                                                 const std::vector<at::Tensor>& ignored) {
  Collector collector(ignored);
  for (size_t i = 0; i < modules.size(); ++i) {
    collector.visit(*modules[i], modules.size() == 1 ? "" : std::to_string(i) + ".");
  }
  return std::move(collector.params);
}

}  // namespace tessera
