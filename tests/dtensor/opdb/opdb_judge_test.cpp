// What passes and what does not when recorded calls are replayed.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "comm/collectives.h"
#include "comm/process_group.h"
#include "dtensor/propagation/sharding_rule.h"
#include "tests/dtensor/opdb/opdb_runner.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// An op whose local call does `action` and then returns its operand.
void register_test_op(torch::Library& library, const std::string& name, void (*action)()) {
  library.def((name + "(Tensor self) -> Tensor").c_str());
  register_op_rule({"opdb_test::" + name},
                   {.strategies = [](const OpCall&) { return Strategies(); },
                    .local_call =
                        [action](const c10::OperatorHandle&, torch::jit::Stack* stack, const OpPlan&) {
                          action();
                          stack->back() = stack->back().toTensor().clone();
                        },
                    .output_metas = [](const OpCall& call) { return std::vector{call.operands[0].meta}; }});
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

TORCH_LIBRARY(opdb_test, library) {
  register_test_op(library, "same", [] {});
  register_test_op(library, "raise_on_last_rank", raise_on_last_rank);
  register_test_op(library, "wait_on_first_rank", wait_on_first_rank);
  register_test_op(library, "die", die);
  register_test_op(library, "raise_everywhere", raise_everywhere);
  register_test_op(library, "other_on_ranks", [] {});
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
  for (const char* name : {"raise_on_last_rank", "wait_on_first_rank", "die"}) {
    library.impl(name, same);
  }
  library.impl("other_on_ranks", one_more);
}

/// A recorded call of `op` on ones [2, 2] that should return `result`.
OpdbCase record(const char* op, const at::Tensor& result) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  const auto list = [](std::vector<c10::IValue> values) {
    c10::impl::GenericList result(c10::AnyType::get());
    for (auto& value : values) {
      result.push_back(std::move(value));
    }
    return result;
  };
  dict.insert("args", c10::ivalue::Tuple::create({at::ones({2, 2})}));
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
