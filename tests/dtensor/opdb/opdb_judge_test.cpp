// What passes and what does not when recorded calls are replayed.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <thread>

#include "comm/collectives.h"
#include "comm/process_group.h"
#include "dtensor/propagation/sharding_rule.h"
#include "testing/run_ranks.h"
#include "tests/dtensor/opdb/opdb_runner.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// An op whose local call, on the whole operand, is `local`, which gives a tensor like it.
void register_test_op(torch::Library& library, const std::string& name,
                      const std::function<at::Tensor(const at::Tensor&)>& local) {
  library.def((name + "(Tensor self) -> Tensor").c_str());
  register_op_rule({"opdb_test::" + name},
                   {.strategies = [](const OpCall&) { return Strategies(); },
                    .local_call = [local](const c10::OperatorHandle&, torch::jit::Stack* stack,
                                          const OpPlan&) { stack->back() = local(stack->back().toTensor()); },
                    .output_metas = [](const OpCall& call) { return std::vector{call.operands[0].meta}; }});
}

/// An op whose local call does `action` and then returns its operand.
void register_test_op(torch::Library& library, const std::string& name, void (*action)()) {
  register_test_op(library, name, [action](const at::Tensor& self) {
    action();
    return self.clone();
  });
}

void raise_on_last_rank() {
  TORCH_CHECK(get_rank() == 0, "no");
}

void wait_on_first_rank() {
  if (get_rank() == 0) {
    barrier(default_group());
  }
}

void die() {
  std::_Exit(1);
}

void raise_everywhere() {
  TORCH_CHECK(false, "never");
}

constexpr double kEps = std::numeric_limits<float>::epsilon();

/// Each row is the sum of all rows, added one after the other.
at::Tensor sum_one_by_one(const at::Tensor& self) {
  auto sum = at::zeros_like(self[0]);
  for (const auto& row : self.unbind()) {
    sum = sum + row;
  }
  return sum.expand_as(self).clone();
}

/// The same, as two ranks add it up that have half of the rows each. The second one's part counts where `takes_part`.
at::Tensor sum_of_halves(const at::Tensor& self, const std::function<at::Tensor(const at::Tensor&)>& takes_part) {
  const auto halves = self.chunk(2);
  const auto second = sum_one_by_one(halves[1])[0];
  return (sum_one_by_one(halves[0])[0] + second * takes_part(second)).expand_as(self).clone();
}

TORCH_LIBRARY(opdb_test, library) {
  register_test_op(library, "same", [] {});
  register_test_op(library, "raise_on_last_rank", raise_on_last_rank);
  register_test_op(library, "wait_on_first_rank", wait_on_first_rank);
  register_test_op(library, "die", die);
  register_test_op(library, "raise_everywhere", raise_everywhere);
  register_test_op(library, "other_on_ranks", [] {});
  register_test_op(library, "off_by_4_roundings", [](const at::Tensor& self) {
    const bool is_double = self.scalar_type() == at::kDouble;
    return self * (1 + 4 * (is_double ? std::numeric_limits<double>::epsilon() : kEps));
  });
  register_test_op(library, "off_by_a_bit", [](const at::Tensor& self) { return self * (1 + 1e-5); });
  register_test_op(library, "loses_small", [](const at::Tensor& self) { return self * (self.abs() > 0.01); });
  register_test_op(library, "sum", [](const at::Tensor& self) {
    return sum_of_halves(self, [](const at::Tensor& part) { return at::ones_like(part); });
  });
  register_test_op(library, "sum_loses_small", [](const at::Tensor& self) {
    return sum_of_halves(self, [](const at::Tensor& part) { return part.abs() > 0.01; });
  });
}

at::Tensor same(const at::Tensor& self) {
  return self.clone();
}

at::Tensor one_more(const at::Tensor& self) {
  return self + 1;
}

/// Of plain tensors; "raise_everywhere" has none.
TORCH_LIBRARY_IMPL(opdb_test, CPU, library) {
  library.impl("same", same);
  for (const char* name :
       {"raise_on_last_rank", "wait_on_first_rank", "die", "off_by_4_roundings", "off_by_a_bit", "loses_small"}) {
    library.impl(name, same);
  }
  library.impl("sum", sum_one_by_one);
  library.impl("sum_loses_small", sum_one_by_one);
  library.impl("other_on_ranks", one_more);
}

/// A recorded call of `op` that should return `result`.
OpdbCase record(const char* op, const at::Tensor& result, const at::Tensor& self = at::ones({2, 2})) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  const auto list = [](std::vector<c10::IValue> values) {
    c10::impl::GenericList result(c10::AnyType::get());
    for (auto& value : values) {
      result.push_back(std::move(value));
    }
    return result;
  };
  dict.insert("args", c10::ivalue::Tuple::create({self}));
  dict.insert("kwargs", c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get()));
  dict.insert("out", list({result}));
  dict.insert("mutated", list({}));
  dict.insert("mutated_out", list({}));
  dict.insert("check", "value");
  return {.id = std::string(op) + "#0", .op = {std::string("opdb_test::") + op, ""}, .content = dict};
}

std::vector<std::string> outcomes(const OpdbCase& test, bool expects_recorded = true) {
  std::vector<std::string> result;
  for (const auto& run : run_cases({test}, {.mesh = {2}, .expects_recorded = expects_recorded})) {
    result.emplace_back(name_of(run.judgement.outcome));
    UNSCOPED_INFO(run.label << ": " << run.judgement.reason);
  }
  return result;
}

std::vector<std::string> three(const char* outcome) {
  return std::vector<std::string>(3, outcome);
}

}  // namespace

TEST_CASE("each of a call's runs is judged", "[opdb]") {
  CHECK(outcomes(record("same", at::ones({2, 2}))) == three("ok"));
  CHECK(outcomes(record("same", at::full({2, 2}, 1.01f))) == three("wrong"));
  CHECK(outcomes(record("same", at::ones({2, 2}, at::kLong))) == three("wrong"));
  CHECK(outcomes(record("same", at::ones({2, 1}))) == three("wrong"));
  CHECK(outcomes(record("raise_everywhere", at::ones({2, 2}))) == three("unsupported"));
}

TEST_CASE("an element may be off by some of its own roundings, whatever the size of others", "[opdb]") {
  for (const auto dtype : {at::kFloat, at::kComplexFloat, at::kDouble}) {
    const auto numbers = at::tensor({1000.0, 0.001, -3.0, 7.0}).to(dtype).reshape({2, 2});
    CHECK(outcomes(record("same", numbers, numbers)) == three("ok"));
    CHECK(outcomes(record("off_by_4_roundings", numbers, numbers)) == three("ok"));
    CHECK(outcomes(record("off_by_a_bit", numbers, numbers)) == three("wrong"));
    CHECK(outcomes(record("loses_small", numbers, numbers)) == three("wrong"));
  }
}

TEST_CASE("an element of a sum that cancels may be off by roundings of what was added", "[opdb]") {
  // The first column's sum is thousands of its roundings off; the second one's terms are all small.
  auto numbers = at::rand({64, 2}, make_generator(3)) - 0.5;
  numbers.select(1, 0).mul_(100);
  numbers.index({-1, 0}).sub_(numbers.select(1, 0).sum() - 0.1);
  numbers.select(1, 1).mul_(1e-5);
  const auto sum = sum_one_by_one(numbers),
             other_sum = sum_of_halves(numbers, [](const at::Tensor&part) { return at::ones_like(part); });
  CHECK(((sum - other_sum) / sum).abs().max().item<double>() > kRoundingErrors * kEps);
  CHECK(outcomes(record("sum", sum, numbers)) == three("ok"));
  CHECK(outcomes(record("sum_loses_small", sum, numbers)) == three("wrong"));
}

TEST_CASE(
    "how far an element is from what it should be is told as a part of its bound, and so is where bounds come from",
    "[opdb]") {
  const auto numbers = at::tensor({1000.0, 0.001, -3.0, 7.0}).to(at::kFloat).reshape({2, 2});
  const auto runs = run_cases({record("off_by_4_roundings", numbers, numbers)}, {.mesh = {2}});
  const auto part = runs.at(0).judgement.worst_part;
  CHECK((part > 2 / kRoundingErrors && part <= 5 / kRoundingErrors));
  // A moved number is up to two roundings away, and none is bounded by the largest one.
  const auto& elements = runs.at(0).elements;
  CHECK(elements[0] + elements[1] == 4);
  CHECK(elements[2] == 0);
}

TEST_CASE("runs are judged by a plain call where the recorded results are another device's", "[opdb]") {
  const auto recorded_elsewhere = at::full({2, 2}, 7.f);
  CHECK(outcomes(record("same", recorded_elsewhere), false) == three("ok"));
  CHECK(outcomes(record("other_on_ranks", recorded_elsewhere), false) == three("wrong"));
  CHECK(outcomes(record("other_on_ranks", at::ones({2, 2})), false) == three("ok"));
  CHECK(outcomes(record("raise_everywhere", recorded_elsewhere), false) == three("ok"));
  CHECK(outcomes(record("raise_on_last_rank", recorded_elsewhere), false) == three("diverge"));
}

TEST_CASE("what would hang or end a program does not pass", "[opdb]") {
  CHECK(outcomes(record("raise_on_last_rank", at::ones({2, 2}))) == three("diverge"));
  CHECK(outcomes(record("wait_on_first_rank", at::ones({2, 2}))) == three("diverge"));
  CHECK(outcomes(record("die", at::ones({2, 2}))) == three("crash"));
}

TEST_CASE("assignments: all replicated, each tensor cut alone, all cut alike", "[opdb]") {
  std::vector<std::string> labels;
  for (const auto& assignment : assignments(record("same", at::ones({2, 2})))) {
    labels.push_back(assignment.label);
  }
  CHECK(labels == std::vector<std::string>{"R", "0S0", "0S1"});
}

}  // namespace tessera
