#pragma once
// What libtorch's modules lack: code that runs before and after a module's forward, and state attached to a module.
//
// A HookPoint is one half of `Hooked<Impl>` (nn/hooks/hooked.h), found from any torch::nn::Module& at run time:
//
//   HookPoint& point = hook_point(module, "fully_shard");     // StateError if the module's type has none
//   HookHandle handle = point.register_forward_pre_hook([](HookPoint&, TensorRefs inputs) {
//     for (at::Tensor* input : inputs) *input = input->to(at::kBFloat16);    // the caller's tensors stay as they are
//   });
//   handle.remove();
//
// Order of a call: pre-hooks in order, forward, post-hooks in order. If any of them throws, every exception hook
// runs in reverse order and the exception goes on. A module may be called recursively; hooks then run at each level.
// Hooks may register and remove hooks: a removed one does not run any more, a new one runs from the next call on.
// One wrapper may stand around forward itself, inside of all hooks (see wrap_forward).
//
// Ownership: the module owns its hooks and its state. A hook that owns its module is a cycle and never freed.
// Copies of a module (clone, hooked) start without hooks and state.
// Thread safety: forward may run in several threads at once; registering, removing and attaching may not run
// beside anything else on the same module.

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

/// The defined tensors of a module's inputs or outputs, nested ones too, in order. Assign to replace one.
using TensorRefs = std::span<at::Tensor* const>;

using ForwardHook = std::function<void(HookPoint&, TensorRefs)>;
using ExceptionHook = std::function<void(HookPoint&)>;

class RecomputableCall;

/// Runs one forward in a way of its own: calls `forward`, once, and may keep `again`, the same call on copies of its
/// arguments as the pre-hooks left them, for later.
using ForwardWrapper =
    std::function<void(HookPoint&, const std::function<void()>& forward, std::unique_ptr<RecomputableCall> again)>;

/// What a wrapper throws to end a forward whose rest nobody needs. Not a failure: see is_forward_stopped(). No
/// std::exception, so that a forward that handles its own errors lets it pass.
struct StopForward {};

/// For exception hooks: whether forward was ended by StopForward.
bool is_forward_stopped() noexcept;

/// Where a new hook goes in its list.
enum class HookOrder { Append, Prepend };

namespace detail {

struct HookRecord {
  uint64_t id = 0;
  ForwardHook run;
  bool active = true;
};

// A list is replaced and never changed, so that a running call can go on with the one it started with.
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

/// Names a registered hook. Destroying it leaves the hook in place (compare ScopedHook).
class HookHandle {
 public:
  HookHandle() = default;
  /// Removes the hook; does nothing if it or its module is gone.
  void remove();

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
  /// A copy is another module: it starts without hooks and state, and assignment keeps the target's own.
  HookPoint(const HookPoint&) noexcept {}
  HookPoint& operator=(const HookPoint&) noexcept { return *this; }  // NOLINT(bugprone-unhandled-self-assignment)
  virtual ~HookPoint() = default;

  virtual torch::nn::Module& module() noexcept = 0;
  /// The user's type, demangled: "torch::nn::LinearImpl" for a Hooked<torch::nn::LinearImpl>.
  virtual std::string type_name() const = 0;

  HookHandle register_forward_pre_hook(ForwardHook hook, HookOrder order = HookOrder::Append);
  HookHandle register_forward_hook(ForwardHook hook, HookOrder order = HookOrder::Append);
  /// Runs when a pre-hook, forward or a post-hook throws, also for hooks whose own pre-hook was not reached.
  /// What it throws itself becomes a warning.
  HookHandle register_exception_hook(ExceptionHook hook, HookOrder order = HookOrder::Append);

  /// Lets `wrapper` run forward; a module has at most one. Stays until the module's end.
  /// Errors: StateError if there is one.
  void wrap_forward(ForwardWrapper wrapper);
  bool is_forward_wrapped() const noexcept { return table_ != nullptr && table_->wrapper != nullptr; }

  /// Whether a call has more to do than forward itself.
  bool has_hooks() const noexcept { return table_ != nullptr && table_->hooks > 0; }

  /// Keeps `state` with the module, one object a type. Errors: StateError if the type is attached already.
  template <class T>
  void attach(std::shared_ptr<T> state) {
    attach(typeid(T), std::move(state));
  }
  /// The attached object of the type, or null.
  template <class T>
  std::shared_ptr<T> find() const noexcept {
    return std::static_pointer_cast<T>(find(typeid(T)));
  }
  /// Takes the attached object of the type away and returns it, or null.
  template <class T>
  std::shared_ptr<T> detach() noexcept {
    return std::static_pointer_cast<T>(detach(typeid(T)));
  }

  /// Throws NotImplementedError if a deep copy of this module alone would not be right: hooks or state are
  /// attached, its type has no clone, or a member is tied past the registry.
  virtual void check_cloneable() const;
  /// Lets the parameter `name` of this module and the member of that name be `tensor`; false if the type has no
  /// such member. Used by clone to keep tied parameters tied.
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

/// One run of a module's forward under its hooks; used by Hooked and by layers with a second entry point.
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

/// The module's hook point, or null if its type has none.
HookPoint* find_hook_point(torch::nn::Module& module) noexcept;
const HookPoint* find_hook_point(const torch::nn::Module& module) noexcept;

/// "torch::nn::LinearImpl", also for a hooked one.
std::string module_type_name(const torch::nn::Module& module);

/// The module's hook point. Errors: StateError that names `caller`, the module's type and the remedies.
HookPoint& hook_point(torch::nn::Module& module, std::string_view caller);

}  // namespace tessera
