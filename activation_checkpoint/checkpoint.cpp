#include "activation_checkpoint/checkpoint.h"

#include <set>
#include <vector>

#include "activation_checkpoint/checkpoint_region.h"
#include "base/error.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

/// Keeps the module of a call alive until the call is no longer needed.
class ModuleCall final : public RecomputableCall {
 public:
  ModuleCall(std::shared_ptr<torch::nn::Module> module, std::unique_ptr<RecomputableCall> call)
      : module_(std::move(module)), call_(std::move(call)) {}

  void run() override { call_->run(); }
  void visit_inputs(const std::function<void(at::Tensor&)>& visit) override { call_->visit_inputs(visit); }
  bool shares_tensors() override { return call_->shares_tensors(); }
  void visit_generators(const std::function<void(const at::Generator&)>& visit) const override {
    call_->visit_generators(visit);
  }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::unique_ptr<RecomputableCall> call_;
};

HookPoint& checked_point(torch::nn::Module& module, const char* caller) {
  auto& point = hook_point(module, caller);
  TESSERA_CHECK(StateError, !point.is_forward_wrapped(),
                "{}: {} is checkpointed already, or is a layer of a tensor-parallel plan with overlap; checkpoint the "
                "module around such a layer",
                caller, point.type_name());
  return point;
}

void wrap(HookPoint& point, const CheckpointOptions& options) {
  point.wrap_forward(
      [options](HookPoint& at, const std::function<void()>& forward, std::unique_ptr<RecomputableCall> again) {
        auto call = std::make_unique<ModuleCall>(at.module().weak_from_this().lock(), std::move(again));
        CheckpointRegion::run(forward, std::move(call), options, "checkpoint of " + at.type_name());
      });
}

}  // namespace

const char* to_string(Recompute recompute) {
  return recompute == Recompute::Full ? "full" : recompute == Recompute::Selective ? "selective" : "none";
}

CheckpointOptions checkpoint_options(Recompute recompute) {
  // The ops that cost the most to recompute. Excludes aten::bmm, which computes attention's scores without a fused
  // kernel: they would fill the memory that is saved.
  static const OpList costly({"aten::mm", "aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu",
                              "aten::_scaled_dot_product_flash_attention",
                              "aten::_scaled_dot_product_efficient_attention",
                              "aten::_scaled_dot_product_cudnn_attention"});
  return {.ops_to_save = recompute == Recompute::Selective ? costly : OpList()};
}

void detail::run_checkpointed(const std::function<void()>& forward, std::unique_ptr<RecomputableCall> again,
                              const CheckpointOptions& options) {
  CheckpointRegion::run(forward, std::move(again), options, "checkpoint");
}

void checkpoint_module(ModuleRef module, const CheckpointOptions& options) {
  wrap(checked_point(*module, "checkpoint_module"), options);
}

int64_t apply_activation_checkpointing(ModuleRef module, const CheckpointPolicy& policy,
                                       const CheckpointOptions& options) {
  std::vector<HookPoint*> points;
  std::set<const torch::nn::Module*> seen;
  const auto consider = [&](const std::string& name, torch::nn::Module& candidate) {
    if (seen.insert(&candidate).second && policy(name, candidate)) {
      points.push_back(&checked_point(candidate, "apply_activation_checkpointing"));
    }
  };
  consider("", *module);
  for (const auto& item : module->named_modules("", /*include_self=*/false)) {
    consider(item.key(), *item.value());
  }
  TESSERA_CHECK(ValueError, !points.empty(),
                "apply_activation_checkpointing: the policy chooses no module of {}; it is asked with names such as "
                "\"layers.0\"",
                module_type_name(*module));
  for (auto* point : points) {
    wrap(*point, options);
  }
  return static_cast<int64_t>(points.size());
}

}  // namespace tessera
