#include "tests/dtensor/opdb/opdb_corpus.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "base/error.h"

namespace tessera {

namespace {

void collect_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) {
      collect_tensors(element, tensors);
    }
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) {
      collect_tensors(element, tensors);
    }
  }
}

/// A number where a tensor is expected: a wrapped number, else type promotion would change.
at::Tensor wrapped_number(const c10::IValue& value) {
  const auto dtype = value.isDouble() ? at::kDouble : value.isBool() ? at::kBool : at::kLong;
  auto tensor = at::scalar_tensor(value.toScalar(), at::TensorOptions().dtype(dtype));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

class ArgumentMaker {
 public:
  ArgumentMaker(const std::function<at::Tensor(size_t, const at::Tensor&)>& place, std::vector<at::Tensor>& placed)
      : place_(place), placed_(placed) {}

  /// `value` as stored, where the schema wants `type`. Lists are stored untyped and rebuilt.
  c10::IValue make(const c10::IValue& value, const c10::TypePtr& type) {
    if (const auto optional = type->cast<c10::OptionalType>()) {
      return value.isNone() ? c10::IValue() : make(value, optional->getElementType());
    }
    if (value.isTensor()) {
      placed_.push_back(place_(placed_.size(), value.toTensor()));
      return placed_.back();
    }
    if (const auto list = type->cast<c10::ListType>()) {
      c10::impl::GenericList result(list->getElementType());
      for (const auto& element : value.toListRef()) {
        result.push_back(make(element, list->getElementType()));
      }
      return result;
    }
    if (type->kind() == c10::TypeKind::TensorType) {
      return value.isNone() ? at::Tensor() : wrapped_number(value);
    }
    return type->kind() == c10::TypeKind::FloatType && value.isInt() ? c10::IValue(double(value.toInt())) : value;
  }

 private:
  const std::function<at::Tensor(size_t, const at::Tensor&)>& place_;
  std::vector<at::Tensor>& placed_;
};

}  // namespace

std::vector<at::Tensor> OpdbCase::tensors() const {
  const auto dict = content.toGenericDict();
  std::vector<at::Tensor> result;
  collect_tensors(dict.at("args"), result);
  for (const auto& entry : dict.at("kwargs").toGenericDict()) {
    collect_tensors(entry.value(), result);
  }
  return result;
}

std::vector<OpdbCase> read_opdb(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  TESSERA_CHECK(ValueError, stream.good(), "read_opdb: {} cannot be read", file);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(stream), {});
  const auto corpus = torch::jit::pickle_load(bytes);
  TESSERA_CHECK(ValueError, corpus.isList(), "read_opdb: {} holds no list of cases", file);
  std::vector<OpdbCase> cases;
  for (const auto& value : corpus.toListRef()) {
    const auto dict = value.toGenericDict();
    cases.push_back({.id = dict.at("id").toStringRef(),
                     .op = {dict.at("op").toStringRef(), dict.at("overload").toStringRef()},
                     .content = value});
  }
  return cases;
}

std::map<std::string, std::vector<OpdbCase>> by_overload(std::vector<OpdbCase> cases) {
  std::map<std::string, std::vector<OpdbCase>> result;
  for (auto& test : cases) {
    result[test.overload()].push_back(std::move(test));
  }
  return result;
}

torch::jit::Stack make_stack(const OpdbCase& test, const c10::FunctionSchema& schema,
                             const std::function<at::Tensor(size_t, const at::Tensor&)>& place,
                             std::vector<at::Tensor>& placed) {
  const auto dict = test.content.toGenericDict();
  const auto args_value = dict.at("args");
  const auto& args = args_value.toTupleRef().elements();
  const auto kwargs = dict.at("kwargs").toGenericDict();
  ArgumentMaker maker(place, placed);
  torch::jit::Stack stack;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (i < args.size()) {
      stack.push_back(maker.make(args[i], argument.real_type()));
    } else if (kwargs.contains(argument.name())) {
      stack.push_back(maker.make(kwargs.at(argument.name()), argument.real_type()));
    } else {
      stack.push_back(argument.default_value().value_or(c10::IValue()));
    }
  }
  return stack;
}

void flatten(const c10::IValue& value, std::vector<c10::IValue>& flat) {
  if (value.isList()) {
    for (const auto& element : value.toListRef()) {
      flatten(element, flat);
    }
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) {
      flatten(element, flat);
    }
  } else if (value.isTensor() && !value.toTensor().defined()) {
    flat.emplace_back();
  } else {
    flat.push_back(value);
  }
}

}  // namespace tessera
