// Random models, cut into random units and trained by random programs, give the gradients of one process.
//
//   TESSERA_DRAWS=100000 bazel-bin/tests/fully_shard/random_model_test     more draws
//   TESSERA_SEED=4711 TESSERA_DRAWS=1 ...                                  one draw again

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

#include "activation_checkpoint/checkpoint.h"
#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "testing/draws.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/random_model.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr uint64_t kDefaultDraws = 2000;
constexpr double kRate = 0.1;

enum class Order { Backward, OfTheSum, TwiceEach, Never };

/// What a step does once or several times before the optimizer's step.
struct MicroBatch {
  bool evaluates = false;  // a forward without grad mode first
  int forwards = 1;
  bool is_reversed = false;       // the backward of the last forward comes first
  Order order = Order::Backward;  // how backward is called
  bool inputs_have_grad = false;
  bool syncs = true;
  std::vector<int> uses = {};  // by rank, which outputs are in its loss: 1, 2, or 3 for both

  std::string to_string() const {
    static constexpr const char* kOrders[] = {"backward", "backward of the sum", "backward twice", "no backward"};
    return fmt::format("{}{} forward(s){}, {}{}, losses of outputs {}", evaluates ? "evaluation, " : "", forwards,
                       inputs_have_grad ? " of inputs with gradient" : "", is_reversed ? "reversed " : "",
                       kOrders[static_cast<int>(order)], fmt::join(uses, " ")) +
           (syncs ? "" : ", without sync");
  }
};

using TrainingStep = std::vector<MicroBatch>;

struct Case {
  std::vector<int64_t> mesh;
  bool keeps_after_backward = false;
  double bucket_cap_mb = 25;  // of replicated units
  ModelSpec model = {};
  std::vector<TrainingStep> steps = {};

  int ranks() const {
    return static_cast<int>(std::accumulate(mesh.begin(), mesh.end(), int64_t{1}, std::multiplies()));
  }
  std::string to_string() const {
    std::string text =
        fmt::format("on [{}]{}, buckets of {}: {}", fmt::join(mesh, ", "),
                    keeps_after_backward ? ", kept after backward" : "", bucket_cap_mb, model.to_string());
    for (const auto& step : steps) {
      text += "\n step";
      for (const auto& micro : step) {
        text += "\n  " + micro.to_string();
      }
    }
    return text;
  }
};

MicroBatch draw_micro_batch(Draws& draws, int ranks, bool may_differ, bool is_last) {
  MicroBatch micro{.evaluates = draws.one_in(6),
                   .forwards = draws.one_in(5) ? 2 : 1,
                   .is_reversed = draws.one_in(2),
                   .order = draws.one_in(2) ? Order::Backward : static_cast<Order>(draws.below(4)),
                   .inputs_have_grad = draws.one_in(3),
                   .syncs = is_last || draws.one_in(2)};
  if (is_last && micro.order == Order::Never) {
    micro.order = Order::Backward;  // gradients without sync wait for it
  }
  const auto all = static_cast<int>(draws.between(1, 3));
  const bool differ = draws.one_in(3) && may_differ;
  for (int rank = 0; rank < ranks; ++rank) {
    micro.uses.push_back(differ ? static_cast<int>(draws.between(1, 3)) : all);
  }
  return micro;
}

Case draw_case(uint64_t seed) {
  static const std::vector<std::vector<int64_t>> kMeshes = {{2}, {3}, {1}, {2, 2}, {4}};
  Draws draws(seed);
  Case drawn{.mesh = draws.of(kMeshes),
             .keeps_after_backward = draws.one_in(6),
             .bucket_cap_mb = draws.of(std::vector<double>{25, 0.0001, 0})};
  drawn.model = ModelSpec{.inner = {ModelSpec::draw(draws, 3), ModelSpec::draw(draws, 2)},
                          .is_unit = true,
                          .is_replicated = draws.one_in(5),
                          .cuts_columns = draws.one_in(4)};
  // Whether a unit is gathered again whose result is not in the graph depends on what a rank needs of the region.
  const bool may_differ =
      !drawn.model.has_any(&ModelSpec::is_checkpointed) || !drawn.model.has_any([](const ModelSpec& spec) {
        return spec.op == ModelOp::Discard || spec.op == ModelOp::WithoutGrad;
      });
  for (int64_t steps = draws.between(1, 3); steps > 0; --steps) {
    auto& step = drawn.steps.emplace_back();
    for (int64_t micros = draws.between(1, 3); micros > 0; --micros) {
      step.push_back(draw_micro_batch(draws, drawn.ranks(), may_differ, micros == 1));
    }
  }
  return drawn;
}

using Tensors = std::vector<at::Tensor>;

/// What one rank sees of a step: its losses, and the gradients of its inputs.
using Sight = Tensors;

at::Tensor input_of(int step, size_t micro, int forward, int which, int rank) {
  const auto seed =
      static_cast<uint64_t>((((step * 10 + static_cast<int>(micro)) * 10 + forward) * 2 + which) * 10 + rank);
  return make_batch(seed, 3, RandomModelImpl::kDim).to(at::kDouble);
}

std::optional<at::Tensor> loss_of(const RandomModelImpl::Pair& outputs, int uses) {
  const auto& [a, b] = outputs;
  const int can = (a.requires_grad() ? 1 : 0) + (b.requires_grad() ? 2 : 0);
  if (can == 0) {
    return {};
  }
  const int used = (uses & can) != 0 ? uses & can : can;
  return used == 3 ? weighted_loss(a) + weighted_loss(b) : weighted_loss(used == 1 ? a : b);
}

void call_backward(const MicroBatch& micro, Tensors losses) {
  if (micro.is_reversed) {
    std::ranges::reverse(losses);
  }
  if (micro.order == Order::OfTheSum && losses.size() == 2) {
    losses = {losses[0] + losses[1]};
  }
  for (const auto& loss : losses) {
    if (micro.order == Order::TwiceEach) {
      loss.backward({}, /*retain_graph=*/true);
    }
    if (micro.order != Order::Never) {
      loss.backward();
    }
  }
}

/// A rank's part of a micro-batch. What it sees is added to `sight`.
void run_micro_batch(RandomModel& model, const MicroBatch& micro, int step, size_t number, int rank, Sight& sight) {
  if (micro.evaluates) {
    const at::NoGradGuard no_grad;
    sight.push_back(std::get<0>(model(input_of(step, number, 9, 0, rank), input_of(step, number, 9, 1, rank))).clone());
  }
  Tensors leaves, losses;
  for (int forward = 0; forward < micro.forwards; ++forward) {
    Tensors inputs;
    for (int which = 0; which < 2; ++which) {
      inputs.push_back(input_of(step, number, forward, which, rank).requires_grad_(micro.inputs_have_grad));
      if (micro.inputs_have_grad) {
        leaves.push_back(inputs.back());
        inputs.back() = inputs.back() * 1;
      }
    }
    const auto outputs = model(inputs[0], inputs[1]);
    sight.push_back(std::get<1>(outputs).detach().clone());
    if (const auto loss = loss_of(outputs, micro.uses.at(static_cast<size_t>(rank)))) {
      losses.push_back(*loss);
      sight.push_back(loss->detach());
    }
  }
  call_backward(micro, losses);
  for (const auto& leaf : leaves) {
    sight.push_back(leaf.grad());
  }
}

RandomModel make_model(const ModelSpec& spec) {
  RandomModel model(spec);
  fill_parameters(*model, 1);
  return model;
}

void freeze(RandomModelImpl& model, const ModelSpec& spec) {
  for (size_t i = 0; i < spec.inner.size(); ++i) {
    freeze(dynamic_cast<RandomModelImpl&>(*model.children()[i]), spec.inner[i]);
  }
  if (spec.is_frozen) {
    for (const auto& param : model.parameters()) {
      param.set_requires_grad(false);
    }
  }
}

void step_and_clear(RandomModel& model) {
  for (auto& param : model->parameters()) {
    if (param.grad().defined()) {
      const at::NoGradGuard no_grad;
      param.sub_(param.grad() * kRate);
    }
  }
  model->zero_grad();
}

/// What one process has of a step.
struct Expected {
  std::vector<Sight> sights;  // by rank
  Tensors grads, values;      // of the parameters, before the optimizer's step
};

/// None if one process cannot run the program either.
std::optional<std::vector<Expected>> run_in_one_process(const Case& drawn) {
  try {
    auto model = make_model(drawn.model);
    freeze(*model, drawn.model);
    std::vector<Expected> all;
    for (int step = 0; step < static_cast<int>(drawn.steps.size()); ++step) {
      auto& expected = all.emplace_back();
      expected.sights.resize(static_cast<size_t>(drawn.ranks()));
      model->set_step(step);
      average_reference(*model, drawn.ranks(), [&](int rank) {
        const auto& micros = drawn.steps[static_cast<size_t>(step)];
        for (size_t i = 0; i < micros.size(); ++i) {
          run_micro_batch(model, micros[i], step, i, rank, expected.sights[static_cast<size_t>(rank)]);
        }
      });
      for (const auto& param : model->parameters()) {
        expected.values.push_back(param.detach().clone());
        expected.grads.push_back(param.grad().defined() ? param.grad().clone() : at::Tensor());
      }
      step_and_clear(model);
    }
    return all;
  } catch (const c10::Error&) {
    return {};
  }
}

void shard_model(RandomModelImpl& module, const ModelSpec& spec, const Case& drawn, const DeviceMesh& mesh) {
  for (size_t i = 0; i < spec.inner.size(); ++i) {
    shard_model(dynamic_cast<RandomModelImpl&>(*module.children()[i]), spec.inner[i], drawn, mesh);
  }
  if (spec.is_checkpointed) {
    checkpoint_module(module);
  }
  if (!spec.is_unit) {
    return;
  }
  if (spec.is_replicated && mesh.ndim() == 1) {
    replicate(module, {.mesh = mesh, .bucket_cap_mb = drawn.bucket_cap_mb});
    return;
  }
  FullyShardOptions options{.mesh = mesh};
  if (spec.reshard_after_forward == 2 && mesh.shape().back() % 2 == 0) {
    options.reshard_after_forward = 2;
  } else if (spec.reshard_after_forward >= 0) {
    options.reshard_after_forward = spec.reshard_after_forward > 0;
  }
  if (spec.cuts_columns) {
    options.shard_placement_fn = [](const at::Tensor& param) { return Shard(param.dim() - 1); };
  }
  fully_shard(module, options);
}

void expect_same(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  TESSERA_CHECK(ExpectationError, actual.defined() == expected.defined(), "{} is {}defined", what,
                actual.defined() ? "" : "un");
  if (actual.defined()) {
    const auto text = describe_difference(actual, expected, {.rtol = 1e-8, .atol = 1e-10});
    TESSERA_CHECK(ExpectationError, text.empty(), "{}: {}", what, text);
  }
}

void check_step(RandomModel& model, const Sight& sight, const Expected& expected, int rank) {
  const auto& own = expected.sights.at(static_cast<size_t>(rank));
  expect_equal(sight.size(), own.size());
  for (size_t i = 0; i < sight.size(); ++i) {
    expect_same(sight[i], own[i], fmt::format("tensor {} that the rank sees", i));
  }
  const auto params = model->named_parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& param = params[i].value();
    TESSERA_CHECK(ExpectationError, is_dtensor(param), "{} is a plain tensor", params[i].key());
    expect_same(full_tensor(param.detach()), expected.values[i], params[i].key());
    expect_same(param.grad().defined() ? full_tensor(param.grad()) : at::Tensor(), expected.grads[i],
                "gradient of " + params[i].key());
  }
}

void run_rank(const Case& drawn, const std::vector<Expected>& expected, int rank) {
  auto model = make_model(drawn.model);
  freeze(*model, drawn.model);
  shard_model(*model, drawn.model, drawn, init_device_mesh(at::kCPU, drawn.mesh));
  fsdp(model).set_reshard_after_backward(!drawn.keeps_after_backward);
  for (int step = 0; step < static_cast<int>(drawn.steps.size()); ++step) {
    const auto number = static_cast<size_t>(step);
    model->set_step(step);
    Sight sight;
    for (size_t i = 0; i < drawn.steps[number].size(); ++i) {
      const auto& micro = drawn.steps[number][i];
      fsdp(model).set_requires_gradient_sync(micro.syncs);
      run_micro_batch(model, micro, step, i, rank, sight);
    }
    reshard_all(model);
    check_step(model, sight, expected[number], rank);
    step_and_clear(model);
  }
  expect_equal(fsdp(model).memory_stats().acquired, 0u);
}

bool changes_input(const ModelSpec& spec) {
  return spec.op == ModelOp::AddInPlace || spec.op == ModelOp::MulInPlace;
}

/// A program that is none: what is right of it is an error.
enum class Refusal { InOneProcess, ChangesRecomputed, ChangesInput, ChangesSharedOutput };

struct RefusalKind {
  const char* what;
  /// The part of the draws that may end so. More mean that the library refuses what it took before.
  double most;
};

constexpr size_t kRefusalKinds = 4;
constexpr RefusalKind kRefusals[kRefusalKinds] = {
    {"one process refuses it too", 0.03},
    {"changes in place what is computed again", 0.05},
    {"changes an input in place that its caller has", 0.13},
    {"changes an output in place that shares memory", 0.02},
};

struct Outcome {
  std::string failure = {};
  std::optional<Refusal> refusal = {};
};

Outcome run(const Case& drawn, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  const auto expected = run_in_one_process(drawn);
  if (!expected) {
    return {.refusal = Refusal::InOneProcess};
  }
  try {
    run_ranks(drawn.ranks(), [&](int rank) { run_rank(drawn, *expected, rank); }, {.timeout = timeout});
  } catch (const std::exception& failure) {
    const std::string text = failure.what();
    // A checkpointed module that changes its input in place cannot be computed again.
    if (drawn.model.has_any(&ModelSpec::is_checkpointed) &&
        (text.find("modified by an inplace operation") != std::string::npos ||
         text.find("changed in place") != std::string::npos)) {
      return {.refusal = Refusal::ChangesRecomputed};
    }
    // The last two: of a change whose result the program takes from the input alone.
    if (drawn.model.has_any(changes_input) &&
        (text.find("changed an input of sizes [3, 5] in place, which") != std::string::npos ||
         text.find("arrived while it is sharded") != std::string::npos ||
         text.find("was read after its unit") != std::string::npos)) {
      return {.refusal = Refusal::ChangesInput};
    }
    if (drawn.model.has_any(changes_input) &&
        text.find("shares its memory with another output or an input") != std::string::npos) {
      return {.refusal = Refusal::ChangesSharedOutput};
    }
    return {.failure = text.substr(0, text.find("\nException raised from"))};
  }
  return {};
}

std::vector<Case> smaller(const Case& drawn) {
  std::vector<Case> all;
  const auto add = [&](auto change) {
    all.push_back(drawn);
    change(all.back());
  };
  for (size_t i = 0; i < drawn.steps.size() && drawn.steps.size() > 1; ++i) {
    add([&](Case& c) { c.steps.erase(c.steps.begin() + static_cast<int64_t>(i)); });
  }
  for (size_t i = 0; i < drawn.steps.size(); ++i) {
    for (size_t j = 0; j < drawn.steps[i].size(); ++j) {
      if (j + 1 < drawn.steps[i].size()) {
        add([&](Case& c) { c.steps[i].erase(c.steps[i].begin() + static_cast<int64_t>(j)); });
      }
      const MicroBatch plain{.uses = std::vector<int>(drawn.steps[i][j].uses.size(), drawn.steps[i][j].uses[0])};
      if (drawn.steps[i][j].to_string() != plain.to_string()) {
        add([&](Case& c) { c.steps[i][j] = plain; });
        add([&](Case& c) { c.steps[i][j].forwards = 1; });
        add([&](Case& c) { c.steps[i][j].order = Order::Backward; });
        add([&](Case& c) { c.steps[i][j].inputs_have_grad = false; });
        add([&](Case& c) { c.steps[i][j].evaluates = false; });
        add([&](Case& c) { c.steps[i][j].uses = plain.uses; });
        add([&](Case& c) { c.steps[i][j].is_reversed = false; });
      }
    }
  }
  for (auto& model : drawn.model.smaller()) {
    if (model.is_unit) {
      add([&](Case& c) { c.model = std::move(model); });
    }
  }
  if (drawn.keeps_after_backward) {
    add([](Case& c) { c.keeps_after_backward = false; });
  }
  if (drawn.mesh != std::vector<int64_t>{2}) {
    add([](Case& c) {
      c.mesh = {2};
      for (auto& step : c.steps) {
        for (auto& micro : step) {
          micro.uses.resize(2, 3);
        }
      }
    });
  }
  std::erase_if(all, [&](const Case& c) { return c.to_string() == drawn.to_string(); });
  return all;
}

/// A smaller case that fails too, and how.
std::string shrunk(Case drawn, std::string failure) {
  const auto shrinks = [&] {
    for (auto& candidate : smaller(drawn)) {
      if (auto outcome = run(candidate, std::chrono::seconds(5)); !outcome.failure.empty()) {
        drawn = std::move(candidate);
        failure = outcome.failure;
        return true;
      }
    }
    return false;
  };
  while (shrinks()) {
  }
  return drawn.to_string() + "\n" + failure;
}

}  // namespace

TEST_CASE("random models and programs give the gradients of one process", "[random_model]") {
  const uint64_t first = number_from_environment("TESSERA_SEED", 1);
  const uint64_t draws = number_from_environment("TESSERA_DRAWS", kDefaultDraws);
  std::array<uint64_t, kRefusalKinds> refused{};
  std::string failures;
  int failed = 0;
  for (uint64_t seed = first; seed < first + draws && failed < 3; ++seed) {
    const auto drawn = draw_case(seed);
    auto outcome = run(drawn);
    if (!outcome.failure.empty()) {
      ++failed;
      failures += fmt::format("seed {}, shrunk: {}\n", seed, shrunk(drawn, outcome.failure));
    } else if (outcome.refusal) {
      ++refused.at(static_cast<size_t>(*outcome.refusal));
    }
  }
  INFO(failures);
  CHECK(failed == 0);
  for (size_t kind = 0; kind < kRefusalKinds; ++kind) {
    WARN(fmt::format("{} of {} draws: {}", refused.at(kind), draws, kRefusals[kind].what));
    // The one beside the part is for runs of few draws.
    CHECK(static_cast<double>(refused.at(kind)) <= 1 + kRefusals[kind].most * static_cast<double>(draws));
  }
}

}  // namespace tessera::testing
