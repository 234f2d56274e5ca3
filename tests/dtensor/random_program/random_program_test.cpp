// Random programs on random meshes and placements give what plain tensors give, gradients included.
//
//   TESSERA_DRAWS=100000 bazel-bin/tests/dtensor/random_program_test     more draws
//   TESSERA_SEED=4711 TESSERA_DRAWS=1 ...                                one draw again

#include <fmt/ranges.h>

#include <map>

#include "dtensor/dtensor.h"
#include "testing/draws.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "tests/dtensor/random_program/random_program.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

constexpr uint64_t kDefaultDraws = 20000;
constexpr uint64_t kDrawsARun = 50;  // of one mesh: starting ranks costs more than a draw

const std::vector<std::vector<int64_t>> kProgramMeshes = {{2}, {3}, {2, 2}, {4}, {1}, {3, 2}, {2, 1, 2}};

Placement draw_placement(Draws& draws, int64_t ndim, ReduceOp pending) {
  const int64_t kind = draws.below(ndim > 0 ? 5 : 3);
  if (kind == 0) {
    return Replicate();
  }
  return kind == 1 && draws.one_in(2) ? Placement(Partial(pending))
         : ndim > 0                   ? Placement(Shard(draws.below(ndim), static_cast<int>(draws.below(2))))
                                      : Placement(Replicate());
}

Placements draw_placements(Draws& draws, int64_t ndim, size_t mesh_ndim) {
  static const std::vector<ReduceOp> reductions = {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min,
                                                   ReduceOp::Product};
  const ReduceOp pending = draws.one_in(2) ? ReduceOp::Sum : draws.of(reductions);
  Placements placements;
  for (size_t axis = 0; axis < mesh_ndim; ++axis) {
    placements.push_back(draw_placement(draws, ndim, pending));
  }
  return normalized(placements, ndim, static_cast<int64_t>(mesh_ndim), "draw");
}

/// A program and how its inputs are placed.
struct Draw {
  RandomProgram program;
  std::vector<Placements> placements;

  Draw(uint64_t seed, size_t mesh_ndim) : program(RandomProgram::draw(seed)) {
    Draws draws(~seed);
    for (const auto& sizes : program.input_sizes) {
      placements.push_back(draw_placements(draws, static_cast<int64_t>(sizes.size()), mesh_ndim));
    }
  }

  std::string describe(const std::vector<int64_t>& mesh, size_t last = SIZE_MAX) const {
    std::string text = fmt::format("seed {} on a mesh [{}], inputs", program.seed, fmt::join(mesh, ", "));
    for (const auto& placement : placements) {
      text += " " + to_string(placement);
    }
    return text + program.describe(last);
  }
};

/// Second gradients are sums of large terms of either sign.
std::string tensor_difference(const at::Tensor& actual, const at::Tensor& expected, double rtol = 1e-7) {
  if (!actual.defined() || !expected.defined()) {
    return actual.defined() == expected.defined() ? "" : "one is undefined";
  }
  if (!is_dtensor(actual)) {
    return "a plain tensor";
  }
  if (actual.sizes() != expected.sizes() || actual.dtype() != expected.dtype()) {
    return to_string(TensorMeta::of(actual)) + " instead of " + to_string(TensorMeta::of(expected));
  }
  return shard_difference(actual.detach(), expected.detach(), {.rtol = rtol, .atol = 1e-8});
}

void check_values(const Draw& draw, const Tensors& values, const std::vector<int64_t>& shape) {
  for (size_t i = draw.placements.size(); i < values.size(); ++i) {
    const auto text = tensor_difference(values[i], draw.program.values[i]);
    TESSERA_CHECK(ExpectationError, text.empty(), "{}\n{}", draw.describe(shape, i), text);
  }
}

void check_gradients(const Draw& draw, const Tensors& inputs, Tensors of, const std::vector<int64_t>& shape) {
  const auto& expected = draw.program.gradients;
  for (size_t times = 0; times < expected.size(); ++times) {
    of = gradients_of(inputs, of, /*create_graph=*/times + 1 < expected.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto text = tensor_difference(of[i], expected[times][i], times == 0 ? 1e-7 : 1e-5);
      TESSERA_CHECK(ExpectationError, text.empty(), "{}\n{} gradient of v{}: {}", draw.describe(shape),
                    times == 0 ? "first" : "second", i, text);
    }
  }
}

/// Why the op was refused, without the operands; empty if all is the same. Throws ExpectationError with a reproducer.
/// An op may be refused, by all ranks alike: others would wait for this one.
std::string check_draw(const Draw& draw, const DeviceMesh& mesh, const std::vector<int64_t>& shape) {
  Tensors inputs;
  for (size_t i = 0; i < draw.placements.size(); ++i) {
    inputs.push_back(place(draw.program.values[i].detach(), mesh, draw.placements[i]).detach().requires_grad_());
  }
  try {
    const auto values = draw.program.run(inputs);
    check_values(draw, values, shape);
    check_gradients(draw, inputs, values, shape);
  } catch (const NotImplementedError& refusal) {
    const std::string text = refusal.what();
    return text.substr(0, text.find(": "));
  } catch (const ExpectationError&) {
    throw;
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    throw ExpectationError(draw.describe(shape) + "\n" + error.what());
  }
  return "";
}

/// Which ops the draws ran without a refusal, by their text without numbers.
class OpsSeen {
 public:
  void add(const RandomProgram& program, bool was_refused) {
    for (const auto& step : program.steps) {
      auto& count = counts_[without_numbers(step.text)];
      ++count.runs;
      count.refusals += was_refused;
    }
  }
  /// Those that were refused whenever they were drawn, and that often enough: what was never right is not tested.
  std::string always_refused() const {
    std::string list;
    for (const auto& [op, count] : counts_) {
      list += count.runs >= 5 && count.runs == count.refusals ? fmt::format("\n{:5} {}", count.runs, op) : "";
    }
    return list;
  }
  size_t size() const { return counts_.size(); }

 private:
  struct Count {
    int runs = 0;
    int refusals = 0;
  };

  static std::string without_numbers(std::string text) {
    std::erase_if(text, [](char c) { return std::string_view("0123456789.,-{} ").find(c) != std::string_view::npos; });
    return text;
  }

  std::map<std::string, Count> counts_;
};

}  // namespace

TEST_CASE("random programs give what plain tensors give", "[dtensor]") {
  const uint64_t first = number_from_environment("TESSERA_SEED", 1);
  const uint64_t draws = number_from_environment("TESSERA_DRAWS", kDefaultDraws);
  uint64_t refused = 0;
  std::map<std::string, int> reasons;
  OpsSeen ops;
  std::string failures;
  uint64_t failed_runs = 0;
  for (uint64_t begin = first; begin < first + draws; begin += kDrawsARun) {
    const auto& shape = kProgramMeshes[(begin - 1) / kDrawsARun % kProgramMeshes.size()];
    std::vector<Draw> batch;
    for (uint64_t seed = begin; seed < std::min(begin + kDrawsARun, first + draws); ++seed) {
      batch.emplace_back(seed, shape.size());
    }
    try {
      run_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](int rank) {
        const auto mesh = init_device_mesh(at::kCPU, shape);
        for (const auto& draw : batch) {
          const auto refusal = check_draw(draw, mesh, shape);
          if (rank != 0) {
            continue;
          }
          ops.add(draw.program, !refusal.empty());
          if (!refusal.empty()) {
            ++refused;
            ++reasons[refusal];
          }
        }
      });
    } catch (const std::exception& failure) {
      failures += std::string(failure.what()) + "\n";
      if (++failed_runs == 5) {
        break;
      }
    }
  }
  INFO(failures);
  CHECK(failed_runs == 0);
  std::string list;
  for (const auto& [reason, count] : reasons) {
    list += fmt::format("\n{:5} {}", count, reason);
  }
  WARN(fmt::format("{} draws of {} ops, {} refused{}", draws, ops.size(), refused, list));
  CHECK(refused * 20 < draws);
  if (draws >= kDefaultDraws) {
    CHECK(ops.always_refused() == "");
  }
}

}  // namespace tessera
