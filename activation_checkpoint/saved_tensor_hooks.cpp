#include "activation_checkpoint/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <utility>

#include "base/error.h"

namespace tessera {

namespace {

thread_local SavedTensorHooks* current_hooks = nullptr;

class EngineWithHooks final : public torch::autograd::Engine {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return current_hooks ? current_hooks->make() : nullptr;
  }
};

torch::autograd::Engine& engine_with_hooks() {
  static auto* const engine = new EngineWithHooks();  // never destroyed, because its threads may outlive main()
  return *engine;
}

void install_engine() {
  static std::once_flag installed;
  std::call_once(installed, [] {
    using torch::autograd::Engine;
    TESSERA_CHECK(StateError, &Engine::get_default_engine() == &Engine::get_base_engine(),
                  "SavedTensorHooksScope: libtorch's autograd engine was replaced already, as PyTorch's Python module "
                  "does, so activation checkpointing from C++ cannot be used in this process");
    torch::autograd::set_default_engine_stub(&engine_with_hooks);
  });
}

}  // namespace

SavedTensorHooksScope::SavedTensorHooksScope(SavedTensorHooks* hooks) : previous_(current_hooks) {
  install_engine();
  current_hooks = hooks;
}

SavedTensorHooksScope::~SavedTensorHooksScope() {
  current_hooks = previous_;
}

bool SavedTensorHooksScope::is_open() {
  return current_hooks != nullptr;
}

}  // namespace tessera
