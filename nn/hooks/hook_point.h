#pragma once
// Code that runs before and after a module's forward, and state attached to a module, both of which libtorch lacks.
//
// A HookPoint is a base class of `Hooked<Impl>` (nn/hooks/hooked.h), found from any torch::nn::Module& at run time:
//
//   HookPoint& point = hook_point(module, "fully_shard");     // StateError if the module's type has none
//   HookHandle handle = point.register_forward_pre_hook([](HookPoint&, TensorRefs inputs) {
//     for (at::Tensor* input : inputs) *input = input->to(at::kBFloat16);    // the caller's tensors are unchanged
//   });
//   handle.remove();
//
// Order of a call: pre-hooks in order, forward, post-hooks in order. If one throws, all exception hooks run in reverse
// order, and the exception propagates. Hooks also run for recursive calls. Hooks may register and remove hooks: a
// removed one no longer runs, and a new one runs from the next call on. A wrapper (wrap_forward) is inside all hooks.
//
// Ownership: a module owns its hooks and state, so a hook that owns its module is a reference cycle. Copies of a module
// (clone, hooked) have neither.
// Thread safety: several threads may run forward. Registering, removing and attaching need exclusive access to the
// module.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <typeindex>
#include <utility>
#include <vector>

namespace tessera {

class HookPoint;

/// Defined tensors of a module's inputs or outputs, in order, including nested ones. Assign to replace one.
using TensorRefs = std::span<at::Tensor* const>;

using ForwardHook = std::function<void(HookPoint&, TensorRefs)>;
using ExceptionHook = std::function<void(HookPoint&)>;

class RecomputableCall;

/// Runs one forward by calling `forward` once. It may keep `again`, which repeats the call on copies of the arguments
/// that the pre-hooks left.
using ForwardWrapper =
    std::function<void(HookPoint&, const std::function<void()>& forward, std::unique_ptr<RecomputableCall> again)>;

/// Thrown by a wrapper to end a forward whose remainder is not needed, which is not a failure. It is not a
/// std::exception, so that a forward that handles its own errors lets it pass.
struct StopForward {};

bool is_forward_stopped() noexcept;  // for exception hooks: whether StopForward ended forward

enum class HookOrder { Append, Prepend };  // place of a new hook in its list

namespace detail {

struct HookRecord {
  uint64_t id = 0;
  ForwardHook run;
  bool active = true;
};

// Lists are replaced rather than changed, so that a running call continues with the one it started with.
using HookList = std::vector<std::shared_ptr<HookRecord>>;

enum class HookKind { Pre, Post, Exception };

struct HookTable {
  std::shared_ptr<const HookList> lists[3];
  std::shared_ptr<const ForwardWrapper> wrapper;
  std::vector<std::pair<std::type_index, std::shared_ptr<void>>> attachments;
  size_t hooks = 0;
  uint64_t next_id = 0;

  void remove(uint64_t id);
};

}  // namespace detail

/// Handle of a registered hook. Its destruction does not remove the hook (see ScopedHook).
class HookHandle {
 public:
  HookHandle() = default;
  void remove();  // does nothing if the hook or its module is gone

 private:
  friend class HookPoint;
  HookHandle(std::weak_ptr<detail::HookTable> table, uint64_t id) : table_(std::move(table)), id_(id) {}

  std::weak_ptr<detail::HookTable> table_;
  uint64_t id_ = 0;
};

/// Removes its hook when it goes out of scope.
class ScopedHook {
 public:
  explicit ScopedHook(HookHandle handle) : handle_(std::move(handle)) {}
  ~ScopedHook() { handle_.remove(); }
  ScopedHook(ScopedHook&& other) noexcept : handle_(std::exchange(other.handle_, HookHandle())) {}
  ScopedHook& operator=(ScopedHook&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

 private:
  HookHandle handle_;
};

class HookPoint {
 public:
  /// Copies have no hooks and state, and assignment keeps the target's.
  HookPoint(const HookPoint&) noexcept {}
  HookPoint& operator=(const HookPoint&) noexcept { return *this; }  // NOLINT(bugprone-unhandled-self-assignment)
  virtual ~HookPoint() = default;

  virtual torch::nn::Module& module() noexcept = 0;
  virtual std::string type_name() const = 0;  // Impl of Hooked<Impl>, demangled: "torch::nn::LinearImpl"

  HookHandle register_forward_pre_hook(ForwardHook hook, HookOrder order = HookOrder::Append);
  HookHandle register_forward_hook(ForwardHook hook, HookOrder order = HookOrder::Append);
  /// Runs if a pre-hook, forward or post-hook throws, even if that was before this hook's own pre-hook. An exception of
  /// the hook itself is logged.
  HookHandle register_exception_hook(ExceptionHook hook, HookOrder order = HookOrder::Append);

  /// Lets `wrapper` run forward, until the module's end. Throws StateError if there is one already.
  void wrap_forward(ForwardWrapper wrapper);
  bool is_forward_wrapped() const noexcept { return table_ != nullptr && table_->wrapper != nullptr; }

  bool has_hooks() const noexcept { return table_ != nullptr && table_->hooks > 0; }  // or a wrapper

  /// Attaches `state`, one object per type. Throws StateError if an object of this type is attached.
  template <class T>
  void attach(std::shared_ptr<T> state) {
    attach(typeid(T), std::move(state));
  }
  /// Returns the attached object of the type, or null.
  template <class T>
  std::shared_ptr<T> find() const noexcept {
    return std::static_pointer_cast<T>(find(typeid(T)));
  }
  /// Detaches and returns the object of the type, or null.
  template <class T>
  std::shared_ptr<T> detach() noexcept {
    return std::static_pointer_cast<T>(detach(typeid(T)));
  }

  /// Throws NotImplementedError if a deep copy of this module alone would be wrong. That is so if it has hooks or
  /// state, if its type has no clone, or if a member is not its registered parameter.
  virtual void check_cloneable() const;
  /// Makes `tensor` the parameter `name` and the member of that name. Returns false if there is no such member. clone
  /// uses it to keep parameters tied.
  virtual bool rebind_parameter(std::string_view name, const at::Tensor& tensor) = 0;

 protected:
  HookPoint() noexcept = default;

 private:
  friend class HookedCall;

  HookHandle add_hook(detail::HookKind kind, ForwardHook hook, HookOrder order);
  detail::HookTable& hook_table();
  void attach(std::type_index type, std::shared_ptr<void> state);
  std::shared_ptr<void> find(std::type_index type) const noexcept;
  std::shared_ptr<void> detach(std::type_index type) noexcept;

  std::shared_ptr<detail::HookTable> table_;
};

/// One hooked call of a module's forward. For Hooked, and for layers with a second entry point.
class HookedCall {
 public:
  explicit HookedCall(HookPoint& point);
  void before(TensorRefs inputs) { run(detail::HookKind::Pre, inputs); }
  void after(TensorRefs outputs) { run(detail::HookKind::Post, outputs); }
  void failed() noexcept;
  bool is_wrapped() const noexcept { return wrapper_ != nullptr; }
  void run_wrapped(const std::function<void()>& forward, std::unique_ptr<RecomputableCall> again);
  HookPoint& point() const noexcept { return point_; }

 private:
  void run(detail::HookKind kind, TensorRefs tensors);

  HookPoint& point_;
  std::shared_ptr<const detail::HookList> lists_[3];
  std::shared_ptr<const ForwardWrapper> wrapper_;
};

/// Returns the module's hook point, or null if its type has none.
HookPoint* find_hook_point(torch::nn::Module& module) noexcept;
const HookPoint* find_hook_point(const torch::nn::Module& module) noexcept;

std::string module_type_name(const torch::nn::Module& module);  // "torch::nn::LinearImpl", hooked or not

/// Returns the module's hook point. Throws StateError that names `caller`, the module's type and remedies.
HookPoint& hook_point(torch::nn::Module& module, std::string_view caller);

}  // namespace tessera
