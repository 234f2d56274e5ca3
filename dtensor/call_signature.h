#pragma once
// One call of an op as the dispatcher sees it, reduced to what decides its plan: the op, the operands' specs
// and the scalars. Plans are cached under it.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "dtensor/dtensor_impl.h"
#include "dtensor/sharding_rule.h"

namespace tessera {

/// What is known of an op from its schema, looked up once a thread.
struct OpInfo {
  enum class ArgKind : uint8_t { Scalar, Tensor, TensorList };
  struct Return {
    int64_t written_arg = -1;  // the argument that this result is, for in-place and out= ops
    bool is_view = false;
  };
  const OpRule* rule = nullptr;
  std::optional<c10::OperatorHandle> functional;  // of an in-place or out= op without rule
  bool writes = false;
  bool reads_float_scalars = true;  // as its rule says
  std::vector<ArgKind> kinds;       // by schema argument; optional tensors count as tensors
  std::vector<char> written_args;
  std::vector<Return> returns;

  bool is_written(size_t arg) const { return written_args[arg] != 0; }
  /// Thread safety: from a cache of the calling thread.
  static const OpInfo& of(const c10::OperatorHandle& op);
};

/// A defined tensor argument; list arguments are opened.
struct CallOperand {
  size_t arg;
  size_t index;  // in a list argument, else 0
  const at::Tensor* tensor;
  const DTensorMeta* dtensor;  // null: a plain tensor
};

/// Refers to the stack's arguments: valid until they are replaced, except `args`' number.
struct CallSignature {
  CallSignature(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  CallSignature(const CallSignature&) = delete;
  CallSignature& operator=(const CallSignature&) = delete;

  const OpInfo* info;
  at::ArrayRef<c10::IValue> args;
  c10::SmallVector<CallOperand, 8> operands;
  bool mixed = false;  // a plain tensor that is not a scalar, or a plain one that is written
  uint64_t hash = 0;
  bool cacheable = true;

 private:
  void add(size_t arg, size_t index, const at::Tensor& tensor);
  void add_list(size_t arg, const c10::IValue& list);
  void add_scalar(const c10::IValue& value);

  std::vector<at::Tensor> list_tensors_;  // keeps tensors of list arguments alive
};

/// Plans by call. Not thread-safe: one a thread.
class PlanCache {
 public:
  template <class Make>
  std::shared_ptr<const OpPlan> find_or_make(const CallSignature& call, Make&& make) {
    if (const auto* found = find(call)) {
      ++hits_;
      return *found;
    }
    ++misses_;
    auto plan = make();
    if (call.cacheable) {
      insert(call, plan);
    }
    return plan;
  }

  size_t hits() const { return hits_; }
  size_t misses() const { return misses_; }

 private:
  /// The key in owned form, so that equal hashes are told apart.
  struct Entry {
    const OpInfo* info;
    struct Operand {
      size_t arg;
      size_t index;
      SpecPtr spec;  // null: a plain scalar, whose key is in `scalars`
    };
    std::vector<Operand> operands;
    std::vector<c10::IValue> scalars;  // keys of plain scalars, then all arguments without tensors
    std::shared_ptr<const OpPlan> plan;
  };

  const std::shared_ptr<const OpPlan>* find(const CallSignature& call) const;
  void insert(const CallSignature& call, std::shared_ptr<const OpPlan> plan);
  static bool matches(const Entry& entry, const CallSignature& call);

  std::unordered_map<uint64_t, std::vector<Entry>> entries_;
  size_t hits_ = 0;
  size_t misses_ = 0;
};

}  // namespace tessera
