#pragma once
// FullyShardedDataParallel: the interface of PyTorch's first FSDP, over the engine of fully_shard.
//
//   // Gpt and Block are declared with TESSERA_MODULE (nn/hooks/hooked.h); every rank builds the same model.
//   FullyShardedDataParallel model(Gpt(config), {.auto_wrap_policy = module_wrap_policy<BlockImpl>(),
//                                                .mixed_precision = {.param_dtype = at::kBFloat16}});
//   torch::optim::AdamW optimizer(model->parameters());
//   model.no_sync([&] { loss(model(first_half)).backward(); });      // gradients add up, nothing is sent
//   loss(model(second_half)).backward();
//   model.clip_grad_norm_(1.0);
//   optimizer.step();
//   FSDP::summon_full_params(*model, {}, [&] { inspect(model->head->weight); });
//
// A wrapper holds the module, is called like it and gives its members by ->. It puts no module of its own between
// parent and child: what a policy chooses stays where it is, names do not change, and every parameter is sharded by
// itself and stays the same tensor (PyTorch's use_orig_params=True, the only mode). So the optimizer may be built
// before or after, units may mix frozen and trained parameters, and dtypes of gradients may differ.
//
// The wrapped module itself becomes a unit too, the root, with all parameters that no unit below has. Without a policy
// it is the only one, and its full parameters are in memory at one time: give a policy, or wrap bottom-up by hand.
//
// `FSDP` is the handle to what a wrapper did to a module; its static functions take any module with units below it.
// Scopes are functions that take a body: they end as they should when it throws. docs/generated/fsdp_surface.md lists
// what is covered, and what is not applicable.
//
// Not supported, and refused: double backward through a unit (a backward with create_graph throws NotImplementedError);
// forward of a plain part of a unit outside of the unit's forward; conversions after wrapping to another device or
// dtype (to() says so at once, module.to() of libtorch at the next forward); parameters that two units share. Not
// noticed: a parameter that is registered after wrapping is in no unit, so it is not sharded, and its gradient is not
// reduced; check_replicas (fully_shard/replica_check.h) finds it.
//
// Errors: a call at the wrong time (not the root, a scope inside another) is a StateError, also where PyTorch asserts;
// a method that needs the state IDLE throws ValueError in another one, as assert_state there.
// Thread safety: one thread a rank; ranks may be threads of one process. All calls are collective unless said.
// Names and meaning follow torch/distributed/fsdp/fully_sharded_data_parallel.py.

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
  bool recurse = true;  // the units below too
  /// Changes to this rank's rows stay; each rank makes the same ones. Where nothing is sharded they stay anyway.
  bool writeback = true;
  bool rank0_only = false;      // ranks but the first of the mesh keep their shards; needs writeback = false
  bool offload_to_cpu = false;  // full parameters in the memory of the CPU
  bool with_grads = false;      // `grad` is the full gradient; without, it is undefined inside
};

/// A handle to a module that FullyShardedDataParallel wrapped. Cheap to copy; the module must outlive it.
class FSDP {
 public:
  FSDP(torch::nn::Module& module, std::shared_ptr<WrapperState> unit) : module_(&module), unit_(std::move(unit)) {}

  torch::nn::Module& module() const { return *module_; }
  /// As they hold for this unit; FULL_SHARD among one rank is NO_SHARD.
  const FSDPOptions& options() const;
  ShardingStrategy sharding_strategy() const;
  const DeviceMesh& device_mesh() const;
  /// Whether the unit has parameters of its own: those below inner units are theirs.
  bool has_params() const;
  /// Whether no other unit runs over this one. If no forward ran yet it becomes the root of those below it, until a
  /// larger one runs. No communication, but where one of those ran without this one: then all ranks call it.
  bool check_is_root() const;
  TrainingState training_state() const;
  /// Throws ValueError, on every rank, unless the state is one of `allowed`. No communication.
  void assert_state(const std::vector<TrainingState>& allowed) const;
  bool mixed_precision_enabled_for_buffers() const;
  /// Whether a hook is registered that sends a lower precision than it is given.
  bool low_precision_hook_enabled() const;

  /// Calls `fn` on every module below, children first, then on this one, while all parameters are full; what it
  /// writes to them stays. Throws ValueError unless IDLE.
  void apply(const std::function<void(torch::nn::Module&)>& fn) const;
  /// Moves what is not sharded, buffers and ignored parameters, to `device`. The shards have a device of their own from
  /// the mesh, or the CPU with offload_params: any other is refused. Gradients of what moves stay where they are.
  /// Throws ValueError for another device, or unless IDLE: nothing has changed then. No communication.
  void to(at::Device device) const;
  /// Casts buffers, and ignored parameters, of floating dtypes to `dtype`. The shards keep the dtype in which they were
  /// wrapped: any other is refused. Throws NotImplementedError for another one, ValueError for a dtype that is not
  /// floating, or unless IDLE: nothing has changed then. No communication.
  void to(at::ScalarType dtype) const;
  /// to() of the GPU that this rank computes on, and of the CPU.
  void cuda() const;
  void cpu() const;

  /// Runs `body` without reducing gradients: they add up unsharded, until the first backward after it. Scopes nest.
  /// Throws StateError unless on the root, or if reduction was switched on inside; ValueError unless IDLE.
  void no_sync(const std::function<void()>& body) const;
  /// Clips the gradients of all parameters, sharded or not, as if the model was whole; returns the norm before, in the
  /// widest dtype of the gradients, float32 if there are none (with a warning). norm_type: above 0, or infinity.
  /// Throws StateError unless on the root, ValueError unless IDLE or for another norm_type.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0) const;
  /// Gathers this unit's parameters ahead of its next forward, which then does not gather.
  UnshardHandle unshard(bool async_op = false) const;
  /// From now on `hook` reduces the gradients of this unit and all below it, in place of the engine
  /// (fsdp1/comm_hooks.h). Inside of no_sync it is not called. Each unit's backward waits for it.
  /// Throws StateError unless on the root, or if there is a hook already; NotImplementedError if a unit has a hybrid
  /// strategy; ValueError unless IDLE, or for an empty hook. Nothing has changed then. No communication.
  void register_comm_hook(CommHook hook) const;

  /// The wrapped modules at and below `module`, depth-first; with root_only those that no other is above of. No
  /// communication.
  static std::vector<FSDP> fsdp_modules(torch::nn::Module& module, bool root_only = false);

  /// Runs `body` while the parameters of all units at and below `module`, also those of fully_shard and replicate, are
  /// full, plain tensors in the dtype of the shards. Throws StateError inside of forward, backward or another such
  /// scope, if they have no memory yet, or, on all ranks, if one changed full ones before (FSDPModule::reshard);
  /// NotImplementedError for rank0_only with writeback, offload_to_cpu with a unit that is not sharded, with_grads with
  /// offload_to_cpu; ValueError for a parameter that got another dtype or other sizes and is to be written back: the
  /// shards are as they were then.
  static void summon_full_params(torch::nn::Module& module, const SummonFullParamsOptions& options,
                                 const std::function<void()>& body);

  /// Sets the form of state dicts for all units at and below `module`, and returns the one before; nothing if there are
  /// no units. Throws StateError for a config of another type, or if the units differ; nothing has changed then. No
  /// communication.
  static std::optional<StateDictSettings> set_state_dict_type(torch::nn::Module& module,
                                                              const StateDictSettings& settings);
  /// Nothing if there are no units. Throws StateError if they differ. No communication.
  static std::optional<StateDictSettings> get_state_dict_type(torch::nn::Module& module);
  /// Runs `body` with these settings. Without units it only runs it.
  static void state_dict_type(torch::nn::Module& module, const StateDictSettings& settings,
                              const std::function<void()>& body);
  /// Parameters and buffers at and below `module` in the form that is set. Entries of FULL are copies; those of SHARDED
  /// and LOCAL are this rank's memory. Parameters that are unsharded, as after a forward without backward, are sharded
  /// again, here and in load_state_dict. Throws StateError for LOCAL where a mesh was given, inside of a forward or
  /// backward, and where that would lose changes to full ones (FSDPModule::reshard). Collective for FULL, whose errors
  /// of this kind on one rank are errors on all.
  static FSDPStateDict state_dict(torch::nn::Module& module);
  /// Copies entries into the module; each may be of any form, whatever is set. Throws KeyError for a name that the
  /// module lacks or that is missing, ValueError for sizes that do not fit, StateError inside of a forward or backward.
  /// Where that is so on one rank, all of the unit's ranks throw, and nothing is loaded. Collective.
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

/// Holds a module and wraps it. Impl is a Hooked type: what TESSERA_MODULE declares. Collective.
/// Throws StateError if it is not; ValueError if group and mesh are both given, or both of the ignored lists; for a
/// hybrid strategy without group, mesh and policy; for a mesh of the wrong number of axes; if an ignored module is
/// wrapped itself, or the policy chooses one that is; if the module is on another device than device_id; if parameters
/// are on the meta device and there is no param_init_fn. As fully_shard otherwise.
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
  /// An element of a wrapped container.
  decltype(auto) operator[](size_t index) const { return (*impl_)[index]; }

 private:
  std::shared_ptr<Impl> impl_;
};

template <class Holder>
FullyShardedDataParallel(const Holder&, FSDPOptions) -> FullyShardedDataParallel<typename Holder::ContainedType>;
template <class Holder>
FullyShardedDataParallel(const Holder&) -> FullyShardedDataParallel<typename Holder::ContainedType>;

/// Wraps `module` in place; for modules that are not held by a holder at hand.
FSDP wrap_module(torch::nn::Module& module, FSDPOptions options = {});

/// While it lives, wrap() wraps with its options; outside of any it leaves modules as they are. Scopes nest; for the
/// calling thread.
class EnableWrap {
 public:
  explicit EnableWrap(FSDPOptions options);
  ~EnableWrap();
  EnableWrap(const EnableWrap&) = delete;
  EnableWrap& operator=(const EnableWrap&) = delete;

  /// The options of the innermost scope, or null.
  static const FSDPOptions* current();

 private:
  FSDPOptions options_;
  const EnableWrap* outer_;
};

/// `module` itself, wrapped if inside an EnableWrap: with its options, of which `overrides` may change some.
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
