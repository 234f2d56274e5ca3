#include "parallel/experimental/expert_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>

#include "base/error.h"
#include "debug/comm_debug_mode.h"
#include "nn/linear.h"
#include "parallel/distribute_module.h"
#include "parallel/experimental/token_dispatch.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr int64_t kDim = 4;

/// tokens W_e, squared, for each token of expert e. Nothing is computed for experts without tokens.
struct ExpertsImpl : torch::nn::Module {
  explicit ExpertsImpl(int64_t experts) {
    weight = register_parameter("weight", at::randn({experts, kDim, kDim}));
    bias = register_parameter("bias", at::randn({experts, kDim}));
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& counts) {
    const auto local = [](const at::Tensor& p) { return is_dtensor(p) ? to_local(p) : p; };
    const auto w = local(weight), b = local(bias);
    TESSERA_EXPECT(counts.size(0) == w.size(0));
    std::vector<at::Tensor> results;
    int64_t first = 0;
    for (int64_t expert = 0; expert < counts.size(0); ++expert) {
      const int64_t count = counts[expert].item<int64_t>();
      if (count > 0) {
        results.push_back((tokens.narrow(0, first, count).matmul(w[expert]) + b[expert]).square());
      }
      first += count;
    }
    return results.empty() ? at::zeros_like(tokens) : at::cat(results);
  }

  at::Tensor weight, bias;
};
TESSERA_MODULE(Experts);

/// tokens W_e, which are wider than the tokens and in float32, but as the tokens where there are none.
struct WideExpertsImpl : torch::nn::Module {
  WideExpertsImpl() { weight = register_parameter("weight", make_input(7, {3, kDim, 2 * kDim})); }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& counts) {
    if (tokens.size(0) == 0) {
      return at::zeros_like(tokens);
    }
    const auto w = is_dtensor(weight) ? to_local(weight) : weight;
    const auto each = at::repeat_interleave(w, counts, 0);
    return tokens.unsqueeze(1).matmul(each).squeeze(1).to(at::kFloat);
  }

  at::Tensor weight;
};
TESSERA_MODULE(WideExperts);

/// Experts whose forward is a function.
struct AnyExpertsImpl : torch::nn::Module {
  using Run = std::function<at::Tensor(const at::Tensor& tokens, const at::Tensor& counts)>;
  AnyExpertsImpl(int64_t experts, Run run) : run(std::move(run)) {
    weight = register_parameter("weight", at::ones({experts}));
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& counts) { return run(tokens, counts); }

  Run run;
  at::Tensor weight;
};
TESSERA_MODULE(AnyExperts);

/// Each token goes to its best expert, weighted by the gate.
struct MixtureImpl : torch::nn::Module {
  explicit MixtureImpl(int64_t num_experts) {
    gate = register_module("gate", tessera::nn::Linear(torch::nn::LinearOptions(kDim, num_experts).bias(false)));
    experts = register_module("experts", Experts(num_experts));
    fill_in_double(*this, 8);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const auto scores = gate(tokens).softmax(1);
    const auto [best, expert] = scores.max(1);
    const auto order = expert.argsort(/*stable=*/true, 0, false);
    const auto counts = at::bincount(expert, {}, scores.size(1));
    const auto sorted = experts(tokens.index_select(0, order), counts);
    return sorted.index_select(0, order.argsort()) * best.unsqueeze(1);
  }

  tessera::nn::Linear gate{nullptr};
  Experts experts{nullptr};
};
TESSERA_MODULE(Mixture);

at::Tensor loss_of(const at::Tensor& out, const at::Tensor& weights) {
  return (out * weights).sum();
}

/// Trains with the tokens of all ranks together and with each rank's own, `rows[rank]` of them.
void train_mixture(int64_t num_experts, const std::vector<int64_t>& rows, bool input_grads, c10::Device device) {
  int64_t total = 0;
  for (const int64_t count : rows) {
    total += count;
  }
  run_ranks(static_cast<int>(rows.size()), [&](int rank) {
    const OwnStream stream(device);
    const auto mesh = init_device_mesh(device.type(), {std::ssize(rows)}, {"ep"});
    Mixture reference(num_experts), sharded(num_experts);
    reference->to(device);
    sharded->to(device);
    parallelize_module(sharded, mesh, {{"experts", ExpertParallel()}});
    expect_equal(to_string(placements(sharded->experts->weight)), "(Shard(0))");
    int64_t first = 0;
    for (int r = 0; r < rank; ++r) {
      first += rows[static_cast<size_t>(r)];
    }
    for (int step = 0; step < 2; ++step) {
      const auto seed = static_cast<uint64_t>(10 + step);
      const auto all = make_input(seed, {total, kDim}).to(device).set_requires_grad(input_grads);
      const auto weights = make_input(seed + 10, {total, kDim}).to(device);
      const auto own = [&](const at::Tensor& x) {
        return x.detach().narrow(0, first, rows[static_cast<size_t>(rank)]).clone();
      };
      const auto mine = own(all).set_requires_grad(input_grads);
      reference->zero_grad();
      sharded->zero_grad();
      const auto expected = reference(all);
      const auto actual = sharded(mine);
      expect_close(actual.detach(), own(expected), kDoubleTolerance);
      loss_of(expected, weights).backward();
      loss_of(actual, own(weights)).backward();
      if (input_grads) {
        expect_close(mine.grad(), own(all.grad()), kDoubleTolerance);
      }
      expect_close(full_tensor(sharded->experts->weight.grad()), reference->experts->weight.grad(), kDoubleTolerance);
      expect_close(full_tensor(sharded->experts->bias.grad()), reference->experts->bias.grad(), kDoubleTolerance);
      // The gate is each rank's own, over its own tokens.
      const auto gate = full_tensor(from_local(sharded->gate->weight.grad(), mesh, {Partial()}));
      expect_close(gate, reference->gate->weight.grad(), kDoubleTolerance);
      TESSERA_EXPECT(reference->experts->weight.grad().abs().sum().item<double>() > 0);
    }
  });
}

}  // namespace

TEST_CASE("rows are dispatched by expert", "[parallel]") {
  const std::vector<std::vector<int64_t>> counts{{1, 0, 2, 1, 0}, {1, 1, 0, 0, 2}};
  using Rows = std::vector<int64_t>;
  const auto first = plan_dispatch(counts, 0);
  CHECK(first.sent == Rows{3, 1});
  CHECK(first.received == Rows{3, 2});
  CHECK(first.counts == Rows{2, 1, 2});
  CHECK(first.order == Rows{0, 3, 4, 1, 2});
  CHECK(!first.some_get_none);
  const auto second = plan_dispatch(counts, 1);
  CHECK(second.sent == Rows{2, 2});
  CHECK(second.received == Rows{1, 2});
  CHECK(second.counts == Rows{1, 2});
  CHECK(second.order == Rows{0, 1, 2});
  const auto without = plan_dispatch({{2}, {1}}, 1);
  CHECK(without.sent == Rows{1, 0});
  CHECK(without.received == Rows{0, 0});
  CHECK(without.counts.empty());
  CHECK(without.order.empty());
  CHECK(without.some_get_none);
  CHECK(plan_dispatch({{2, 0}, {1, 0}}, 0).some_get_none);
}

TEST_CASE("experts on several ranks train as on one", "[parallel]") {
  const bool input_grads = GENERATE(true, false);
  for (const c10::Device device : test_devices()) {
    for (const int64_t experts : {1, 3, 5, 8}) {
      train_mixture(experts, {7}, input_grads, device);
      train_mixture(experts, {5, 9}, input_grads, device);
      train_mixture(experts, {4, 0, 6}, input_grads, device);
      train_mixture(experts, {1, 1, 1, 3}, input_grads, device);
    }
  }
}

TEST_CASE("second derivatives go through the experts of all ranks", "[parallel]") {
  const std::vector<int64_t> counts_of_all{3, 0, 5, 4};
  const std::vector<std::vector<int64_t>> counts{{1, 0, 5, 0}, {2, 0, 0, 4}};
  // The tokens of rank 0, then those of rank 1, in the order of all tokens by expert.
  const std::vector<std::vector<int64_t>> rows{{0, 3, 4, 5, 6, 7}, {1, 2, 8, 9, 10, 11}};
  run_ranks(2, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"ep"});
    Experts reference(4), sharded(4);
    fill_in_double(*reference, 8);
    fill_in_double(*sharded, 8);
    parallelize_module(sharded, mesh, ExpertParallel());
    const auto all = make_input(1, {12, kDim}).set_requires_grad(true);
    const auto own = at::tensor(rows[static_cast<size_t>(rank)], at::kLong);
    const auto mine = all.detach().index_select(0, own).requires_grad_();
    const auto penalize = [](Experts& experts, const at::Tensor& tokens, const std::vector<int64_t>& tokens_of) {
      const auto out = experts(tokens, at::tensor(tokens_of, at::kLong));
      const auto slope = torch::autograd::grad({out.sum()}, {tokens}, {}, /*retain_graph=*/true, /*create_graph=*/true);
      slope[0].pow(3).sum().backward();
    };
    penalize(reference, all, counts_of_all);
    penalize(sharded, mine, counts[static_cast<size_t>(rank)]);
    expect_close(mine.grad(), all.grad().index_select(0, own), kDoubleTolerance);
    expect_close(full_tensor(sharded->weight.grad()), reference->weight.grad(), kDoubleTolerance);
    expect_close(full_tensor(sharded->bias.grad()), reference->bias.grad(), kDoubleTolerance);
  });
}

TEST_CASE("a rank without tokens returns what the others do, also of another dtype and width", "[parallel]") {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"ep"});
    WideExperts reference, sharded;
    parallelize_module(sharded, mesh, ExpertParallel());
    const auto tokens_of = [](int r) { return make_input(static_cast<uint64_t>(10 + r), {1 + r, kDim}); };
    const auto counts_of = [](int r) { return at::tensor(std::vector<int64_t>{1, 0, r}, at::kLong); };  // none for 1
    const auto mine = tokens_of(rank).set_requires_grad(true);
    const auto out = sharded(mine, counts_of(rank));
    weighted_loss(out).backward();
    for (int r = 0; r < 3; ++r) {
      const auto tokens = tokens_of(r).set_requires_grad(true);
      const auto expected = reference(tokens, counts_of(r));
      weighted_loss(expected).backward();
      if (r == rank) {
        expect_close(out.detach(), expected.detach());
        expect_close(mine.grad(), tokens.grad());
      }
    }
    expect_close(full_tensor(sharded->weight.grad()), reference->weight.grad());
    // Nobody has any.
    const auto none = sharded(make_input(1, {0, kDim}).set_requires_grad(true), at::zeros({3}, at::kLong));
    expect_equal(none.size(0), 0);
    none.sum().backward();
  });
}

TEST_CASE("what expert parallelism communicates", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"ep"});
    Mixture mixture(4);
    parallelize_module(mixture, mesh, {{"experts", ExpertParallel()}});
    at::Tensor out;
    {
      CommDebugMode mode;
      out = mixture(make_input(1, {6, kDim}).set_requires_grad(true));
      expect_equal(mode.calls(Collective::AllGather), 2);
      expect_equal(mode.calls(Collective::AllToAll), 2);
      expect_equal(mode.calls(), 4);
    }
    CommDebugMode mode;
    out.sum().backward();
    expect_equal(mode.calls(Collective::AllToAll), 2);
    expect_equal(mode.calls(), 2);
  });
}

TEST_CASE("what ExpertParallel refuses", "[parallel]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"ep"});
    MLP mlp(2, MLPOptions{.dim_multiplier = 2});
    expect_equal(error_text([&] { parallelize_module(mlp, mesh, ExpertParallel()); }),
                 std::string("ExpertParallel(the module itself): a tessera::testing::MLPImpl has no parameters of its "
                             "own, so no experts"));
    Experts uneven(3);
    uneven->register_parameter("scale", at::ones({2, 1}));
    expect_equal(
        error_text([&] { parallelize_module(uneven, mesh, ExpertParallel()); }),
        std::string("ExpertParallel(the module itself): \"weight\" is Float[3, 4, 4] and \"scale\" is Float[2, "
                    "1]; dim 0 of every parameter counts the experts"));
    Experts experts(3);
    fill_in_double(*experts, 1);
    parallelize_module(experts, mesh, ExpertParallel());
    const auto counts = at::ones({3}, at::kLong);
    const auto tokens = make_input(1, {rank == 0 ? 3 : 4, kDim});
    expect_equal(
        error_text([&] { experts(tokens, counts); }),
        fmt::format("ExpertParallel(the module itself): the counts of ranks [1] are not right; pass one integer "
                    "(int32 or int64) for each of the 3 experts, which add up to the number of tokens. This rank "
                    "has {} tokens and counts Long[3]",
                    rank == 0 ? 3 : 4));
    expect_equal(
        error_text([&] {
          experts(distribute_tensor(make_input(1, {3, kDim}), mesh, {Replicate()}), counts);
        }),
        std::string("ExpertParallel(the module itself): forward was called with 2 tensors; pass two plain ones, "
                    "tokens [n, ...] sorted by expert and counts [3]"));
    // An error leaves nothing behind.
    expect_equal(experts(make_input(1, {3, kDim}), counts).size(0), 3);
  });
}

TEST_CASE("tokens and results that differ between ranks are refused on all of them", "[parallel]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"ep"});
    const auto experts_of = [&](AnyExpertsImpl::Run run) {
      AnyExperts experts(2, std::move(run));
      parallelize_module(experts, mesh, ExpertParallel());
      return experts;
    };
    auto same = experts_of([](const at::Tensor& tokens, const at::Tensor&) { return tokens; });
    const auto counts = at::ones({2}, at::kLong);
    for (const auto& tokens : {at::ones({2, rank + 3}), at::ones({2, 3}, rank == 0 ? at::kFloat : at::kDouble)}) {
      expect_equal(
          error_text([&] { same(tokens, counts); }),
          fmt::format("ExpertParallel(the module itself): the tokens of ranks [1] have another dtype or other sizes "
                      "behind the rows than those of rank 0; pass the same kind on all ranks, also on one that has "
                      "none. This rank's are {}",
                      to_string(TensorMeta::of(tokens))));
    }
    // All tokens are for expert 0, so rank 1 has none.
    const auto first = at::tensor(std::vector<int64_t>{2, 0}, at::kLong);
    auto more = experts_of([](const at::Tensor&, const at::Tensor& got) { return at::ones({got.size(0) + 4, 3}); });
    expect_equal(error_text([&] {
                   more(at::ones({2, 3}), first);
                 }),
                 fmt::format("ExpertParallel(the module itself): the forwards of ranks [0, 1] did not return one row a "
                             "token. This rank's got {} tokens and returned 1 tensors, the first Float[5, 3]",
                             rank == 0 ? 4 : 0));
    auto short_by_one = experts_of(
        [](const at::Tensor& tokens, const at::Tensor&) { return tokens.slice(0, tokens.size(0) > 0 ? 1 : 0); });
    expect_equal(error_text([&] {
                   short_by_one(at::ones({2, 3}), first);
                 }),
                 fmt::format("ExpertParallel(the module itself): the forwards of ranks [0] did not return one row a "
                             "token. This rank's got {} tokens and returned 1 tensors, the first Float[{}, 3]",
                             rank == 0 ? 4 : 0, rank == 0 ? 3 : 0));
  });
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"ep"});
    AnyExperts uneven(3, [&](const at::Tensor& tokens, const at::Tensor&) { return tokens.repeat({1, rank + 1}); });
    parallelize_module(uneven, mesh, ExpertParallel());
    // Rank 1 has none; ranks 0 and 2 return rows of 3 and 9.
    const auto text = error_text([&] {
      uneven(at::ones({2, 3}), at::tensor(std::vector<int64_t>{1, 0, 1}, at::kLong));
    });
    TESSERA_EXPECT(
        text.find("the forwards of ranks [2] returned rows of another dtype or other sizes than that of rank "
                  "0") != std::string::npos);
  });
}

TEST_CASE("experts get counts in the dtype of the caller's", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"ep"});
    for (const auto dtype : {at::kInt, at::kLong}) {
      AnyExperts experts(2, [&](const at::Tensor& tokens, const at::Tensor& counts) {
        expect_equal(counts.scalar_type(), dtype);
        expect_equal(counts[0].item<int64_t>(), 4);
        return tokens;
      });
      parallelize_module(experts, mesh, ExpertParallel());
      experts(at::ones({4, 3}), at::full({2}, 2, dtype));
    }
    auto small = AnyExperts(2, [](const at::Tensor& tokens, const at::Tensor&) { return tokens; });
    parallelize_module(small, mesh, ExpertParallel());
    expect_throws<ValueError>([&] { small(at::ones({4, 3}), at::full({2}, 2, at::kChar)); }, "int32 or int64");
  });
}

TEST_CASE("one rank that returns another number of rows is an error on all, where all have tokens", "[parallel]") {
  run_ranks(2,
            [](int rank) {
              const auto mesh = init_device_mesh(at::kCPU, {2}, {"ep"});
              AnyExperts experts(2, [&](const at::Tensor& tokens, const at::Tensor&) { return tokens.slice(0, rank); });
              parallelize_module(experts, mesh, ExpertParallel());
              expect_throws<ValueError>(
                  [&] {
                    experts(at::ones({2, 3}), at::ones({2}, at::kLong));
                  },
                  "the forwards of ranks [1] did not return one row a token");
            },
            {.timeout = std::chrono::seconds(20)});
}

}  // namespace tessera::testing
