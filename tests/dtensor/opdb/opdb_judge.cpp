#include "tests/dtensor/opdb/opdb_judge.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
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
  double worst_part = 0;
};

/// The largest distance of an element from what it should be, as a part of its bound, and where. Elements that are
/// equal, NaN or not, have none.
struct WorstElement {
  double part = 0;
  std::string text;
};

WorstElement worst_element(const at::Tensor& got, const at::Tensor& want, const at::Tensor& bound) {
  if (want.numel() == 0) {
    return {};
  }
  const auto is_equal = (got == want).logical_or(got.isnan().logical_and(want.isnan()));
  const auto part = at::where(is_equal, 0, (got - want).abs() / bound).nan_to_num(INFINITY, INFINITY).flatten();
  const auto place = part.argmax().item<int64_t>();
  const auto at_place = [&](const at::Tensor& tensor) { return tensor.flatten()[place].item<double>(); };
  return {at_place(part), fmt::format("element {} is {:.9g} for {:.9g}, and may be {:.2g} off", place, at_place(got),
                                      at_place(want), at_place(bound))};
}

/// Compares the results of a call on one rank with what they should be.
class Comparison {
 public:
  explicit Comparison(bool meta_only) : meta_only_(meta_only) {}

  /// Empty if `got` matches: equal shape, dtype and integers, and floats within their bounds.
  std::string difference(const c10::IValue& got, const ExpectedValue& want, bool has_dtensors) {
    if (want.value.isTensor() != got.isTensor() || want.value.isDouble() != got.isDouble()) {
      return "a result of another kind";
    }
    if (!want.value.isTensor()) {
      if (want.bound.defined()) {
        return value_difference(comparable(got), comparable(want.value), want.bound);
      }
      const bool is_same = want.value.isNone() ? got.isNone() : got == want.value;
      return is_same ? "" : "another number";
    }
    auto actual = got.toTensor();
    const auto& expected = want.value.toTensor();
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
    if (meta_only_) {
      return "";
    }
    if (!want.bound.defined()) {
      return actual.cpu().equal(expected.cpu()) ? "" : "values differ";
    }
    return value_difference(comparable(actual), comparable(expected), want.bound);
  }

  /// Of all values so far that matched, the largest distance of an element, as a part of its bound.
  double worst_part() const { return worst_part_; }

 private:
  std::string value_difference(const at::Tensor& got, const at::Tensor& want, const at::Tensor& bound) {
    const auto worst = worst_element(got, want, bound);
    if (worst.part > 1) {
      return worst.text;
    }
    worst_part_ = std::max(worst_part_, worst.part);
    return "";
  }

  bool meta_only_;
  double worst_part_ = 0;
};

/// What differs of all results and written arguments. Every rank compares all of them: comparing gathers.
RankResult compare(const OpdbCase& test, const ExpectedCall& expected, const torch::jit::Stack& stack,
                   const std::vector<at::Tensor>& placed) {
  using Kind = RankResult::Kind;
  const auto results = results_on(stack);
  const auto& wanted = expected.results;
  if (wanted.size() != results.size()) {
    return {Kind::Wrong, fmt::format("{} results for {}", results.size(), wanted.size())};
  }
  const bool meta_only = test.content.toGenericDict().at("check").toStringRef() == "meta";
  Comparison comparison(meta_only);
  std::string text;
  const auto add = [&](const std::string& what, size_t number, const std::string& why) {
    text += why.empty() ? "" : fmt::format("{}{} {}: {}", text.empty() ? "" : ", ", what, number, why);
  };
  for (size_t i = 0; i < results.size(); ++i) {
    auto why = comparison.difference(results[i], wanted[i], !placed.empty());
    if (i < expected.otherwise.size()) {
      const ExpectedValue otherwise{expected.otherwise[i], wanted[i].bound};
      const auto other_why = Comparison(meta_only).difference(results[i], otherwise, !placed.empty());
      why = other_why.empty() ? "" : why;
    }
    add("result", i, why);
  }
  const auto written = written_arguments(test);
  for (size_t i = 0; i < written.size(); ++i) {
    add("written argument", written[i], comparison.difference(placed[written[i]], expected.written[i], true));
  }
  return {text.empty() ? Kind::Ok : Kind::Wrong, text, comparison.worst_part()};
}

RankResult run_on_rank(const OpdbCase& test, const c10::OperatorHandle& op, const ExpectedCall& expected,
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
    return compare(test, expected, stack, placed);
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
    return {.worst_part = ranks[0].worst_part};
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

Judgement judge(const OpdbCase& test, const c10::OperatorHandle& op, const ExpectedCall& expected,
                const Assignment& assignment, const OpdbRanks& ranks) {
  const auto count = std::accumulate(ranks.mesh.begin(), ranks.mesh.end(), int64_t{1}, std::multiplies<>());
  std::vector<RankResult> results(static_cast<size_t>(count));
  try {
    run_ranks(
        static_cast<int>(count),
        [&](int rank) { results[static_cast<size_t>(rank)] = run_on_rank(test, op, expected, assignment, ranks); },
        {.timeout = std::chrono::seconds(10)});
  } catch (const std::exception& error) {
    return {Outcome::Diverge, error.what()};
  }
  auto judgement = judge_ranks(results);
  return expected.raises && judgement.outcome == Outcome::Unsupported ? Judgement() : judgement;
}

}  // namespace tessera
