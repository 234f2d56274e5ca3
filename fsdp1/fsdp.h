#pragma once
// FullyShardedDataParallel: the interface of PyTorch's first FSDP, on the engine of fully_shard.
//
//   FullyShardedDataParallel model(Gpt(config), {.auto_wrap_policy = module_wrap_policy<BlockImpl>()});
//   torch::optim::AdamW optimizer(model->parameters());
//   loss(model(batch)).backward();
//   model.clip_grad_norm_(1.0);
//   optimizer.step();
//
// Wrapping keeps the module tree, names and parameter tensors (PyTorch's use_orig_params=True, the only mode). The
// wrapped module becomes the root unit, with all parameters that no inner unit has; without a policy it is the only
// one. docs/semantics.md and docs/generated/fsdp_surface.md list what is not supported.
// Throws StateError for calls at the wrong time, such as outside the root or inside another scope, and ValueError if a
// method needs the state IDLE. All ranks must make all calls; docs/semantics.md lists those that do not communicate.
// Thread safety: one thread per rank. Source: torch/distributed/fsdp/fully_sharded_data_parallel.py.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp1/comm_hooks.h"
#include "fsdp1/fsdp_options.h"
#include "fsdp1/fsdp_state_dict.h"
#include "fsdp1/training_state.h"
#include "fully_shard/fsdp_module.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

struct WrapperState;

struct SummonFullParamsOptions {
  bool recurse = true;          // include inner units
  bool writeback = true;        // keep changes to this rank's rows; NO_SHARD keeps them anyway
  bool rank0_only = false;      // other ranks than the mesh's first keep their shards; needs writeback = false
  bool offload_to_cpu = false;  // put full parameters in CPU memory
  bool with_grads = false;      // `grad` is the full gradient; otherwise it is undefined inside
};

/// Handle to a module that FullyShardedDataParallel wrapped. Cheap to copy; the module must outlive it.
class FSDP {
 public:
  FSDP(torch::nn::Module& module, std::shared_ptr<WrapperState> unit) : module_(&module), unit_(std::move(unit)) {}

  torch::nn::Module& module() const { return *module_; }
  const FSDPOptions& options() const;
  ShardingStrategy sharding_strategy() const;  // on one rank, FULL_SHARD becomes NO_SHARD
  const DeviceMesh& device_mesh() const;
  bool has_params() const;  // without those of inner units
  /// Returns whether this is an outermost unit; before the first forward, makes it the root of the units below.
  bool check_is_root() const;
  TrainingState training_state() const;
  /// Throws ValueError, on every rank, unless the state is in `allowed`.
  void assert_state(const std::vector<TrainingState>& allowed) const;
  bool mixed_precision_enabled_for_buffers() const;
  bool low_precision_hook_enabled() const;  // a hook that sends a lower precision is registered

  /// Calls `fn` on all modules, children first, with full parameters. Writes persist. Throws ValueError unless IDLE.
  void apply(const std::function<void(torch::nn::Module&)>& fn) const;
  /// Moves parameters, gradients and buffers of this unit and all below it. Their meshes move too, and keep their ranks
  /// and groups. Parameters stay the same tensors; optimizer state stays on its device. Shards with offload_params stay
  /// on the CPU. Collective. Throws on every rank, before any change: ValueError unless IDLE, or if groups cannot
  /// communicate on `device`; StateError if a backward or reduction is pending; NotImplementedError for another GPU, or
  /// under tensor parallelism.
  void to(at::Device device) const;
  /// Casts floating-point parameters, gradients and buffers. Units then compute in `dtype` unless mixed_precision sets
  /// another; optimizer state keeps its dtype. Throws as above, and ValueError if `dtype` is not floating-point.
  void to(at::ScalarType dtype) const;
  void cuda() const;  // to this rank's GPU
  void cpu() const;

  /// Runs `body` without reducing gradients, which accumulate unsharded until the next backward outside. Scopes nest.
  /// Throws StateError outside the root or if `body` enables reduction, and ValueError unless IDLE.
  void no_sync(const std::function<void()>& body) const;
  /// Clips gradients by their norm over the whole model and returns it, in the widest dtype of the gradients. Throws
  /// StateError outside the root, and ValueError unless IDLE or if norm_type <= 0.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0) const;
  UnshardHandle unshard(bool async_op = false) const;  // gathers parameters before the next forward
  /// Lets `hook` reduce the gradients of this unit and all below, except in no_sync. Throws, before any change,
  /// StateError outside the root or if there is a hook, NotImplementedError for units with a hybrid strategy or of
  /// fully_shard or replicate, and ValueError unless IDLE or if `hook` is empty.
  void register_comm_hook(CommHook hook) const;

  /// Returns the wrapped modules at and below `module`, depth-first, or only the outermost.
  static std::vector<FSDP> fsdp_modules(torch::nn::Module& module, bool root_only = false);

  /// Runs `body` while the parameters of all units at and below `module` are full, plain tensors, also of fully_shard
  /// units. Throws StateError inside forward, backward or another such scope, without memory, or after a full parameter
  /// was written; NotImplementedError for options that exclude each other; and ValueError, with unchanged shards, if a
  /// parameter to write back has another dtype or size.
  static void summon_full_params(torch::nn::Module& module, const SummonFullParamsOptions& options,
                                 const std::function<void()>& body);

  /// Sets the state dict type of units at and below `module`. Returns the previous one, or nothing without units.
  /// Throws StateError, before any change, for a config of another type or if units differ.
  static std::optional<StateDictSettings> set_state_dict_type(torch::nn::Module& module,
                                                              const StateDictSettings& settings);
  /// Returns nothing without units. Throws StateError if units differ.
  static std::optional<StateDictSettings> get_state_dict_type(torch::nn::Module& module);
  /// Runs `body` with these settings.
  static void state_dict_type(torch::nn::Module& module, const StateDictSettings& settings,
                              const std::function<void()>& body);
  /// Returns parameters and buffers at and below `module`: copies for FULL, this rank's memory for SHARDED and LOCAL.
  /// Reshards units. Throws StateError for LOCAL with a given mesh, inside forward or backward, or if a full parameter
  /// was written; for FULL, on all ranks.
  static FSDPStateDict state_dict(torch::nn::Module& module);
  /// Copies entries of any type into the module. Throws on all ranks of a unit, before any change: KeyError for unknown
  /// or missing names, ValueError for sizes that do not fit, StateError inside forward or backward.
  static void load_state_dict(torch::nn::Module& module, const FSDPStateDict& state);

 protected:
  std::shared_ptr<WrapperState> unit() const { return unit_; }

 private:
  torch::nn::Module* module_;
  std::shared_ptr<WrapperState> unit_;
};

namespace detail {
FSDP make_fsdp(torch::nn::Module& module, FSDPOptions options);
}  // namespace detail

/// Holds and wraps a module whose Impl is a Hooked type, as TESSERA_MODULE declares. Throws StateError without a hook
/// point, ValueError for options that do not fit each other or the module, and like fully_shard.
template <class Impl>
class FullyShardedDataParallel : public FSDP {
  static_assert(
      std::is_base_of_v<torch::nn::Module, Impl>,
      "the argument is the module, FullyShardedDataParallel<NetImpl>, not its holder; or none, to be deduced");

 public:
  explicit FullyShardedDataParallel(const torch::nn::ModuleHolder<Impl>& module, FSDPOptions options = {})
      : FSDP(detail::make_fsdp(*module.ptr(), std::move(options))), impl_(module.ptr()) {}

  template <class... Args>
  auto operator()(Args&&... args) const {
    static_assert(std::is_base_of_v<HookPoint, Impl>, "declare the module with TESSERA_MODULE (nn/hooks/hooked.h)");
    return impl_->call(std::forward<Args>(args)...);
  }
  Impl* operator->() const { return impl_.get(); }
  Impl& operator*() const { return *impl_; }
  const std::shared_ptr<Impl>& ptr() const { return impl_; }
  decltype(auto) operator[](size_t index) const { return (*impl_)[index]; }

 private:
  std::shared_ptr<Impl> impl_;
};

template <class Holder>
FullyShardedDataParallel(const Holder&, FSDPOptions) -> FullyShardedDataParallel<typename Holder::ContainedType>;
template <class Holder>
FullyShardedDataParallel(const Holder&) -> FullyShardedDataParallel<typename Holder::ContainedType>;

/// Wraps `module` in place, for modules without a holder.
FSDP wrap_module(torch::nn::Module& module, FSDPOptions options = {});

/// Makes wrap() wrap with these options. Scopes nest and affect the calling thread.
class EnableWrap {
 public:
  explicit EnableWrap(FSDPOptions options);
  ~EnableWrap();
  EnableWrap(const EnableWrap&) = delete;
  EnableWrap& operator=(const EnableWrap&) = delete;

  static const FSDPOptions* current();  // of the innermost scope, or null

 private:
  FSDPOptions options_;
  const EnableWrap* outer_;
};

/// Wraps `module` if inside an EnableWrap, with its options as changed by `overrides`, and returns it.
template <class Holder>
Holder wrap(Holder module, const std::function<void(FSDPOptions&)>& overrides = nullptr) {
  if (const auto* scope = EnableWrap::current()) {
    FSDPOptions options = *scope;
    if (overrides) {
      overrides(options);
    }
    wrap_module(*module, std::move(options));
  }
  return module;
}

}  // namespace tessera
