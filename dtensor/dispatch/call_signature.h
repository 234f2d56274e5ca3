#pragma once
// A call of an op, reduced to the properties that determine its plan: the op, the operands' specs and the scalars. It
// is the key of the plan cache (plan_cache.h).

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <vector>

#include "dtensor/local/dtensor_impl.h"
#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// Properties of an op from its schema, looked up once per thread.
struct OpInfo {
  enum class ArgKind : uint8_t { Scalar, Tensor, TensorList };
  struct Return {
    int64_t written_arg = -1;  // argument that this result is, for in-place and out= ops
    bool is_view = false;
  };
  const OpRule* rule = nullptr;
  std::optional<c10::OperatorHandle> functional;  // of an in-place or out= op without a rule
  bool writes = false;
  /// True if dispatch() must count versions of written DTensors, since libtorch does not. This holds for ops that write
  /// lists and a program's own ops. (For plain tensors, ops called by their kernels may count.) False if ATen's op also
  /// returns a new tensor: autograd saves the written tensor before the call, and would report it as modified.
  bool counts_versions = false;
  bool reads_float_scalars = true;  // see OpRule
  bool takes_lists = false;         // of tensors
  /// True for a view op whose results have the viewed tensor's elements as stored in memory.
  bool views_same_elements = false;
  std::vector<ArgKind> kinds;  // by schema argument; optional tensors are tensors
  std::vector<char> written_args;
  std::vector<Return> returns;

  bool is_written(size_t arg) const { return written_args[arg] != 0; }
  /// Returns the properties from the calling thread's cache.
  static const OpInfo& of(const c10::OperatorHandle& op);
};

/// A defined tensor argument; lists are expanded.
struct CallOperand {
  size_t arg;
  size_t index;  // in a list argument, otherwise 0
  const at::Tensor* tensor;
  const DTensorMeta* dtensor;  // null for a plain tensor
};

/// Refers to `args`, which must outlive it.
struct CallSignature {
  CallSignature(const OpInfo& info, at::ArrayRef<c10::IValue> args);
  CallSignature(const CallSignature&) = delete;
  CallSignature& operator=(const CallSignature&) = delete;

  /// Returns whether this call writes the argument; OpInfo says so of the op.
  bool is_written(size_t arg) const {
    return info->is_written(arg) && (!info->rule || !info->rule->writes || info->rule->writes(args, arg));
  }

  const OpInfo* info;
  at::ArrayRef<c10::IValue> args;
  c10::SmallVector<CallOperand, 8> operands;
  at::ScalarType default_dtype;  // for integers combined with floating numbers
  bool has_materialized_view = false;
  bool mixed = false;  // has a plain tensor that is not a scalar, or that is written
  uint64_t hash = 0;
  bool cacheable = true;

 private:
  void add(size_t arg, size_t index, const at::Tensor& tensor);
  void add_list(size_t arg, const c10::IValue& list);
  void add_scalar(const c10::IValue& value);

  std::vector<at::Tensor> list_tensors_;  // keeps tensors of lists alive
};

/// Returns the key of a plain 0-dim tensor: its dtype, and whether it wraps a number, which affect type promotion.
int64_t scalar_tensor_key(const at::Tensor& tensor);

/// Returns whether argument `arg` has no tensors. An absent optional tensor counts, so its presence is part of the key.
bool is_scalar_argument(const CallSignature& call, size_t arg);

/// Returns whether scalars are equal in a key. Without `float_values`, floating numbers are only zero, finite, or
/// neither.
bool same_scalar(const c10::IValue& a, const c10::IValue& b, bool float_values);

}  // namespace tessera
