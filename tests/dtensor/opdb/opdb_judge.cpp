#include "tests/dtensor/opdb/opdb_judge.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/view_as_real.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "testing/run_ranks.h"

namespace tessera {

namespace {

struct RankResult {
  enum class Kind { NotRun, Ok, Wrong, Raised, Broken, Stuck };
  Kind kind = Kind::NotRun;
  std::string text;
};

struct Expected {
  std::vector<c10::IValue> results;
  std::vector<c10::IValue> written;  // what the call leaves in the arguments that it writes
};

/// The numbers of the tensor arguments that the call writes.
std::vector<size_t> written_arguments(const OpdbCase& test) {
  std::vector<size_t> numbers;
  for (const auto& number : test.content.toGenericDict().at("mutated").toListRef()) {
    numbers.push_back(static_cast<size_t>(number.toInt()));
  }
  return numbers;
}

Expected recorded(const OpdbCase& test) {
  const auto dict = test.content.toGenericDict();
  return {dict.at("out").toListRef().vec(), dict.at("mutated_out").toListRef().vec()};
}

bool same_scalar(const c10::IValue& got, const c10::IValue& want) {
  if (!want.isDouble()) {
    return want.isNone() ? got.isNone() : got == want;
  }
  if (!got.isDouble()) {
    return false;
  }
  const double a = got.toDouble(), b = want.toDouble();
  return a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= 1e-4 * std::max(1.0, std::abs(b));
}

/// In a dtype in which differences can be told.
at::Tensor comparable(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()).to(at::kDouble) : tensor.to(at::kDouble);
}

bool has_16_bits(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

/// To rtol 1e-3 and atol 1e-4 of the largest finite value; 2e-2 and 4e-2 where each partial result was rounded to 16
/// bits.
bool is_close(const at::Tensor& actual, const at::Tensor& expected) {
  const auto want = comparable(expected);
  const auto finite = want.masked_select(want.isfinite());
  const double scale = finite.numel() > 0 ? std::max(1.0, finite.abs().max().item().toDouble()) : 1.0;
  const bool is_coarse = has_16_bits(expected);
  return at::allclose(comparable(actual), want, is_coarse ? 2e-2 : 1e-3, (is_coarse ? 4e-2 : 1e-4) * scale,
                      /*equal_nan=*/true);
}

/// Empty if `got` matches: equal shape, dtype and integers, and floats that are close.
std::string value_difference(const c10::IValue& got, const c10::IValue& want, bool meta_only, bool has_dtensors) {
  if (want.isTensor() != got.isTensor()) {
    return "a result of another kind";
  }
  if (!want.isTensor()) {
    return same_scalar(got, want) ? "" : "another number";
  }
  auto actual = got.toTensor();
  const auto& expected = want.toTensor();
  const auto shape_of = [](const at::Tensor& t) { return to_string(TensorMeta::of(t)); };
  for (const bool gathered : {false, true}) {
    if (gathered && is_dtensor(actual)) {
      actual = full_tensor(actual);
    } else if (!gathered && has_dtensors && !is_dtensor(actual)) {
      return "a plain tensor";
    }
    if (actual.sizes() != expected.sizes() || actual.scalar_type() != expected.scalar_type()) {
      return fmt::format("{} for {}", shape_of(actual), shape_of(expected));
    }
  }
  if (meta_only) {
    return "";
  }
  const auto ours = actual.cpu(), theirs = expected.cpu();
  const bool is_exact = !expected.is_floating_point() && !expected.is_complex();
  return (is_exact ? ours.equal(theirs) : is_close(ours, theirs)) ? "" : "values differ";
}

std::vector<c10::IValue> results_on(const torch::jit::Stack& stack) {
  std::vector<c10::IValue> results;
  for (const auto& value : stack) {
    flatten(value, results);
  }
  if (stack.empty()) {
    results.emplace_back();
  }
  return results;
}

/// What differs of all results and written arguments. Every rank compares all of them: comparing gathers. `otherwise`
/// is right as well: kernels of another device leave some memory unwritten (nll_loss2d_forward's total weight without a
/// reduction).
std::string differences(const OpdbCase& test, const Expected& expected, const std::vector<c10::IValue>& otherwise,
                        const torch::jit::Stack& stack, const std::vector<at::Tensor>& placed) {
  const bool meta_only = test.content.toGenericDict().at("check").toStringRef() == "meta";
  const auto results = results_on(stack);
  const auto& wanted = expected.results;
  if (wanted.size() != results.size()) {
    return fmt::format("{} results for {}", results.size(), wanted.size());
  }
  std::string text;
  const auto add = [&](const std::string& what, size_t number, const std::string& why) {
    text += why.empty() ? "" : fmt::format("{}{} {}: {}", text.empty() ? "" : ", ", what, number, why);
  };
  for (size_t i = 0; i < results.size(); ++i) {
    const auto differs_from = [&](const c10::IValue& want) {
      return value_difference(results[i], want, meta_only, !placed.empty());
    };
    const auto why = differs_from(wanted[i]);
    add("result", i, i < otherwise.size() && differs_from(otherwise[i]).empty() ? "" : why);
  }
  const auto written = written_arguments(test);
  for (size_t i = 0; i < written.size(); ++i) {
    add("written argument", written[i], value_difference(placed[written[i]], expected.written[i], meta_only, true));
  }
  return text;
}

/// The same arguments with `device` in place of the CPU.
void move_device_arguments(torch::jit::Stack& stack, c10::DeviceType device) {
  for (auto& value : stack) {
    if (value.isDevice() && value.toDevice().is_cpu()) {
      value = c10::Device(device);
    }
  }
}

Expected of_plain_call(const OpdbCase& test, const c10::OperatorHandle& op, c10::DeviceType device) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> placed;
  auto stack = make_stack(
      test, op.schema(), [&](size_t, const at::Tensor& tensor) { return tensor.to(device).clone(); }, placed);
  move_device_arguments(stack, device);
  op.callBoxed(stack);
  Expected expected{.results = results_on(stack), .written = {}};
  for (const auto number : written_arguments(test)) {
    expected.written.emplace_back(placed[number]);
  }
  return expected;
}

RankResult run_on_rank(const OpdbCase& test, const c10::OperatorHandle& op, const Expected& expected,
                       const Assignment& assignment, const OpdbRanks& ranks) {
  using Kind = RankResult::Kind;
  const at::NoGradGuard no_grad;
  const auto mesh = init_device_mesh(ranks.device, ranks.mesh);
  const auto place = [&](size_t number, const at::Tensor& tensor) {
    const auto placements = assignment.placements.find(number);
    const bool is_named = placements != assignment.placements.end();
    return place_tensor(tensor.to(ranks.device), mesh,
                        is_named ? placements->second : Placements(ranks.mesh.size(), Replicate()));
  };
  std::vector<at::Tensor> placed;
  auto stack = make_stack(test, op.schema(), place, placed);
  move_device_arguments(stack, ranks.device);
  try {
    op.callBoxed(stack);
    const auto otherwise = ranks.expects_recorded ? std::vector<c10::IValue>() : recorded(test).results;
    const auto text = differences(test, expected, otherwise, stack, placed);
    return {text.empty() ? Kind::Ok : Kind::Wrong, text};
  } catch (const CommError& error) {
    return {Kind::Stuck, error.what()};
  } catch (const AssertionError& error) {
    return {Kind::Broken, error.what()};
  } catch (const std::exception& error) {
    return {Kind::Raised, error.what()};
  }
}

Judgement judge_ranks(const std::vector<RankResult>& ranks) {
  using Kind = RankResult::Kind;
  const auto count = [&](Kind kind) {
    return std::count_if(ranks.begin(), ranks.end(), [&](const auto& rank) { return rank.kind == kind; });
  };
  const auto first = [&](Kind kind) {
    const auto found = std::find_if(ranks.begin(), ranks.end(), [&](const auto& rank) { return rank.kind == kind; });
    return fmt::format("rank {}: {}", found - ranks.begin(), found->text);
  };
  const auto all = static_cast<std::ptrdiff_t>(ranks.size());
  if (count(Kind::Ok) == all) {
    return {};
  }
  if (count(Kind::Raised) == all) {
    return {Outcome::Unsupported, ranks[0].text};
  }
  if (count(Kind::Broken) > 0) {
    return {Outcome::Wrong, first(Kind::Broken)};
  }
  if (count(Kind::Raised) > 0) {
    return {Outcome::Diverge, first(Kind::Raised)};
  }
  if (count(Kind::Stuck) > 0) {
    return {Outcome::Diverge, first(Kind::Stuck)};
  }
  return {Outcome::Wrong, first(count(Kind::Wrong) > 0 ? Kind::Wrong : Kind::NotRun)};
}

}  // namespace

const char* name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::Ok:
      return "ok";
    case Outcome::Unsupported:
      return "unsupported";
    case Outcome::Wrong:
      return "wrong";
    case Outcome::Diverge:
      return "diverge";
    case Outcome::Crash:
      return "crash";
  }
  return "?";
}

Judgement judge(const OpdbCase& test, const c10::OperatorHandle& op, const Assignment& assignment,
                const OpdbRanks& ranks) {
  const auto count = std::accumulate(ranks.mesh.begin(), ranks.mesh.end(), int64_t{1}, std::multiplies<>());
  std::vector<RankResult> results(static_cast<size_t>(count));
  Expected expected;
  bool should_raise = false;
  try {
    expected = ranks.expects_recorded ? recorded(test) : of_plain_call(test, op, ranks.device);
  } catch (const c10::Error&) {
    should_raise = true;
  }
  try {
    run_ranks(
        static_cast<int>(count),
        [&](int rank) { results[static_cast<size_t>(rank)] = run_on_rank(test, op, expected, assignment, ranks); },
        {.timeout = std::chrono::seconds(10)});
  } catch (const std::exception& error) {
    return {Outcome::Diverge, error.what()};
  }
  auto judgement = judge_ranks(results);
  return should_raise && judgement.outcome == Outcome::Unsupported ? Judgement() : judgement;
}

}  // namespace tessera
