#include "testing/fsdp_models/test_model.h"

#include <ATen/Context.h>

#include <unordered_set>

#include "base/error.h"
#include "fsdp1/fsdp.h"

namespace tessera::testing {

namespace {

std::mutex& build_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

std::string to_string(FSDPInitMode mode) {
  switch (mode) {
    case FSDPInitMode::NO_FSDP:
      return "NO_FSDP";
    case FSDPInitMode::RECURSIVE:
      return "RECURSIVE";
  }
  return fmt::format("FSDPInitMode({})", static_cast<int>(mode));
}

std::string to_string(DEVICEInitMode mode) {
  switch (mode) {
    case DEVICEInitMode::DEVICE_BEFORE:
      return "DEVICE_BEFORE";
    case DEVICEInitMode::DEVICE_AFTER:
      return "DEVICE_AFTER";
    case DEVICEInitMode::DEVICE_NEVER:
      return "DEVICE_NEVER";
  }
  return fmt::format("DEVICEInitMode({})", static_cast<int>(mode));
}

namespace {

void check_modes(const InitOptions& options) {
  const bool fsdp_known =
      options.fsdp_init_mode == FSDPInitMode::NO_FSDP || options.fsdp_init_mode == FSDPInitMode::RECURSIVE;
  TESSERA_CHECK(ValueError, fsdp_known, "init: fsdp_init_mode is {}; NO_FSDP and RECURSIVE are known",
                to_string(options.fsdp_init_mode));
  const bool device_known = options.device_init_mode == DEVICEInitMode::DEVICE_BEFORE ||
                            options.device_init_mode == DEVICEInitMode::DEVICE_AFTER ||
                            options.device_init_mode == DEVICEInitMode::DEVICE_NEVER;
  TESSERA_CHECK(ValueError, device_known,
                "init: device_init_mode is {}; DEVICE_BEFORE, DEVICE_AFTER and DEVICE_NEVER are known",
                to_string(options.device_init_mode));
}

}  // namespace

std::shared_ptr<FSDPTestModel> finish_init(std::shared_ptr<FSDPTestModel> model, const InitOptions& options,
                                           const std::function<void()>& wrap) {
  check_modes(options);
  if (options.dtype) {
    model->to(*options.dtype);
  }
  if (options.device_init_mode == DEVICEInitMode::DEVICE_BEFORE) {
    model->to(options.device);
  }
  if (options.fsdp_init_mode == FSDPInitMode::RECURSIVE) {
    wrap();
  }
  if (options.device_init_mode == DEVICEInitMode::DEVICE_AFTER) {
    model->to(options.device);
  }
  return model;
}

namespace {

FSDPOptions wrapper_options_on(const DeviceMesh& mesh, FSDPOptions options) {
  options.device_mesh = mesh;
  if (mesh.ndim() == 1 && options.sharding_strategy == ShardingStrategy::HYBRID_SHARD) {
    options.sharding_strategy = ShardingStrategy::FULL_SHARD;
  } else if (mesh.ndim() == 1 && options.sharding_strategy == ShardingStrategy::_HYBRID_SHARD_ZERO2) {
    options.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP;
  }
  return options;
}

}  // namespace

void wrap_unit(torch::nn::Module& module, const InitOptions& options, std::optional<DeviceMesh> mesh) {
  if (options.wrapper_options) {
    wrap_module(module, wrapper_options_on(mesh.value_or(options.mesh), *options.wrapper_options));
    return;
  }
  FullyShardOptions unit = options.fsdp_options;
  if (mesh) {
    unit.mesh = std::move(mesh);
  } else if (!unit.mesh) {
    unit.mesh = options.mesh;
  }
  options.shard ? options.shard(module, unit) : fully_shard(module, unit);
}

BuildScope::BuildScope(std::optional<uint64_t> seed) : lock_(build_mutex()) {
  if (seed) {
    at::manual_seed(*seed);
  }
}

std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::unordered_set<c10::TensorImpl*> seen;
  std::vector<at::Tensor> unique;
  for (const auto& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
      unique.push_back(parameter);
    }
  }
  return unique;
}

DummyDDP::DummyDDP(std::shared_ptr<FSDPTestModel> inner) : module(register_module("module", std::move(inner))) {}

}  // namespace tessera::testing
