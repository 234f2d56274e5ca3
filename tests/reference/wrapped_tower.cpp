#include "tests/reference/wrapped_tower.h"

#include "comm/process_group.h"
#include "testing/parity.h"

namespace tessera::testing {

Tower make_tower() {
  Tower tower(8, 6, 2);
  fill_parameters(*tower, 7);
  return tower;
}

WrapPolicy block_policy() {
  return module_wrap_policy<BlockImpl>();
}

TowerModel make_model(FSDPOptions options) {
  options.auto_wrap_policy = block_policy();
  return TowerModel(make_tower(), std::move(options));
}

std::vector<std::string> unit_names(torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& unit : FSDP::fsdp_modules(module)) {
    for (const auto& item : module.named_modules()) {
      if (item.value().get() == &unit.module()) {
        names.push_back(item.key());
      }
    }
  }
  return names;
}

at::Tensor batch_of(int rank) {
  return make_batch(static_cast<uint64_t>(20 + rank), 3, 5);
}

void run_backward(const TowerModel& model) {
  weighted_loss(model(batch_of(get_rank()))).backward();
}

Tower reference_after_backward() {
  auto reference = make_tower();
  average_reference(*reference, get_world_size(),
                    [&](int rank) { weighted_loss(reference(batch_of(rank))).backward(); });
  return reference;
}

void expect_gradients_of_average(const TowerModel& model) {
  run_backward(model);
  check_sharded_parity(*reference_after_backward(), *model);
}

}  // namespace tessera::testing
