#pragma once
// A corpus of recorded ATen calls with their results on plain tensors, as torch.save wrote it: a list of dicts with
//
//   id "aten::add.Tensor#3", op, overload, args (tuple), kwargs (dict in schema order), out (flat list),
//   mutated (numbers of the tensor arguments that the call writes), mutated_out (what they hold after it),
//   check "value" or "meta" (contents are undefined: sizes and dtype count)
//
// record_opdb.py makes one.
//
// Tensor arguments are numbered flat: args from left to right, lists opened, then kwargs.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

struct OpdbCase {
  std::string id;
  c10::OperatorName op;
  c10::IValue content;  // the dict

  /// Every tensor argument in its number's place.
  std::vector<at::Tensor> tensors() const;
  std::string overload() const { return c10::toString(op); }
};

/// Throws ValueError if `file` is not such a corpus.
std::vector<OpdbCase> read_opdb(const std::string& file);

std::map<std::string, std::vector<OpdbCase>> by_overload(std::vector<OpdbCase> cases);

/// The arguments of a case as its op's schema wants them. `place(number, tensor)` makes each tensor argument; `placed`
/// gets them by number.
torch::jit::Stack make_stack(const OpdbCase& test, const c10::FunctionSchema& schema,
                             const std::function<at::Tensor(size_t, const at::Tensor&)>& place,
                             std::vector<at::Tensor>& placed);

/// A result with tuples and lists opened; undefined tensors become None.
void flatten(const c10::IValue& value, std::vector<c10::IValue>& flat);

}  // namespace tessera
