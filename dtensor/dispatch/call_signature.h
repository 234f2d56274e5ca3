#pragma once
// One call of an op as the dispatcher sees it, reduced to what decides its plan: the op, the operands' specs
// and the scalars. Plans are cached under it (plan_cache.h).

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <vector>

#include "dtensor/local/dtensor_impl.h"
#include "dtensor/propagation/sharding_rule.h"

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
  /// Whether dispatch() counts the versions of written DTensors, since nothing on the way to it does: ops that write
  /// lists, and a program's own. (On plain tensors the ops that their kernels call may count them.) Not where ATen's op
  /// returns a new tensor too: autograd saves what such an op writes before the call, and would take it for changed.
  bool counts_versions = false;
  bool reads_float_scalars = true;  // as its rule says
  bool takes_lists = false;         // of tensors
  /// A view op whose results' elements are those of the viewed tensor, as they lie in memory.
  bool views_same_elements = false;
  std::vector<ArgKind> kinds;  // by schema argument; optional tensors count as tensors
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

/// Refers to `args`, which must outlive it.
struct CallSignature {
  CallSignature(const OpInfo& info, at::ArrayRef<c10::IValue> args);
  CallSignature(const CallSignature&) = delete;
  CallSignature& operator=(const CallSignature&) = delete;

  /// Whether this call writes the argument, which OpInfo says of the op.
  bool is_written(size_t arg) const {
    return info->is_written(arg) && (!info->rule || !info->rule->writes || info->rule->writes(args, arg));
  }

  const OpInfo* info;
  at::ArrayRef<c10::IValue> args;
  c10::SmallVector<CallOperand, 8> operands;
  at::ScalarType default_dtype;  // that of integers with floating numbers
  bool has_materialized_view = false;
  bool mixed = false;  // a plain tensor that is not a scalar, or a plain one that is written
  uint64_t hash = 0;
  bool cacheable = true;

 private:
  void add(size_t arg, size_t index, const at::Tensor& tensor);
  void add_list(size_t arg, const c10::IValue& list);
  void add_scalar(const c10::IValue& value);

  std::vector<at::Tensor> list_tensors_;  // keeps tensors of list arguments alive
};

/// A plain 0-dim tensor decides type promotion, so its dtype and whether it wraps a number are part of the key.
int64_t scalar_tensor_key(const at::Tensor& tensor);

/// Whether argument `arg` holds no tensors. None in the place of an optional tensor counts too, so that presence is
/// part of the key.
bool is_scalar_argument(const CallSignature& call, size_t arg);

/// Whether two scalar arguments are one in a key; without `float_values`, floating numbers are by what they are: zero,
/// finite, or neither.
bool same_scalar(const c10::IValue& a, const c10::IValue& b, bool float_values);

}  // namespace tessera
