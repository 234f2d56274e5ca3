#include "nn/hooks/tensor_visitor.h"

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>

#include <array>
#include <catch2/catch.hpp>
#include <map>
#include <unordered_map>

namespace {

struct Config {
  int64_t heads = 1;
  std::vector<int64_t> sizes;
};
std::tuple<> tensor_fields(Config&) {
  return {};
}

struct Batch {
  at::Tensor tokens;
  std::optional<at::Tensor> mask;
  Config config;
};
auto tensor_fields(Batch& batch) {
  return std::tie(batch.tokens, batch.mask, batch.config);
}

// A type that only a specialisation can open.
class Sealed {
 public:
  explicit Sealed(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  at::Tensor& get() { return tensor_; }

 private:
  at::Tensor tensor_;
};

enum class Mode { Train };

}  // namespace

template <>
struct tessera::TensorVisitor<Sealed> {
  template <class F>
  static void visit(Sealed& sealed, F&& fn) {
    visit_tensors(sealed.get(), fn);
  }
};

namespace {

using tessera::holds_tensors;

static_assert(!holds_tensors<int> && !holds_tensors<bool> && !holds_tensors<Mode> && !holds_tensors<std::nullptr_t>);
static_assert(!holds_tensors<std::string> && !holds_tensors<const char*> && !holds_tensors<at::Device>);
static_assert(!holds_tensors<std::vector<int64_t>> && !holds_tensors<std::vector<bool>>);
static_assert(!holds_tensors<std::optional<at::IntArrayRef>> && !holds_tensors<std::monostate> &&
              !holds_tensors<void*>);
static_assert(!holds_tensors<Config> && !holds_tensors<std::map<std::string, Config>>);
static_assert(holds_tensors<at::Tensor> && holds_tensors<const at::Tensor> && holds_tensors<Batch>);
static_assert(holds_tensors<Sealed> && holds_tensors<std::vector<std::optional<Batch>>> && holds_tensors<at::Tensor*>);
static_assert(holds_tensors<std::variant<int, at::Tensor>> && holds_tensors<std::array<at::Tensor, 2>>);

at::Tensor scalar(double value) {
  return at::full({}, value);
}

template <class T>
std::vector<double> seen(T& value) {
  std::vector<double> values;
  tessera::visit_tensors(value, [&](at::Tensor& tensor) { values.push_back(tensor.item<double>()); });
  return values;
}

using Values = std::vector<double>;

TEST_CASE("visit_tensors finds the tensors of nested values in order", "[nn]") {
  std::tuple<at::Tensor, std::vector<at::Tensor>, std::pair<int, std::optional<at::Tensor>>, std::string> nested{
      scalar(1), {scalar(2), scalar(3)}, {7, scalar(4)}, "text"};
  CHECK(seen(nested) == Values{1, 2, 3, 4});

  std::array<std::variant<int, at::Tensor>, 2> variants{5, scalar(6)};
  CHECK(seen(variants) == Values{6});

  std::map<std::string, at::Tensor> sorted{{"b", scalar(2)}, {"a", scalar(1)}};
  CHECK(seen(sorted) == Values{1, 2});
  std::unordered_map<int, std::vector<at::Tensor>> hashed{{3, {scalar(8), scalar(9)}}};
  CHECK(seen(hashed) == Values{8, 9});

  torch::OrderedDict<std::string, at::Tensor> ordered;
  ordered.insert("z", scalar(3));
  ordered.insert("a", scalar(4));
  CHECK(seen(ordered) == Values{3, 4});

  at::Tensor pointee = scalar(5);
  at::Tensor* pointer = &pointee;
  CHECK(seen(pointer) == Values{5});
  pointer = nullptr;
  CHECK(seen(pointer).empty());
}

TEST_CASE("visit_tensors skips undefined tensors and empty optionals", "[nn]") {
  std::vector<at::Tensor> some{at::Tensor(), scalar(1), at::Tensor()};
  CHECK(seen(some) == Values{1});
  Batch batch{scalar(2), std::nullopt, {}};
  CHECK(seen(batch) == Values{2});
  batch.mask = scalar(3);
  CHECK(seen(batch) == Values{2, 3});
}

TEST_CASE("visit_tensors can replace tensors, in types with a specialisation too", "[nn]") {
  std::vector<std::pair<Sealed, Batch>> values;
  values.emplace_back(Sealed(scalar(1)), Batch{scalar(2), scalar(3), {}});
  tessera::visit_tensors(values, [](at::Tensor& tensor) { tensor = at::mul(tensor, 10); });
  CHECK(seen(values) == Values{10, 20, 30});
}

}  // namespace
