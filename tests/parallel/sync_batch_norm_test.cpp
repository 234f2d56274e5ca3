// Batch norms over the batches of several ranks, against one process that has all of them.

#include "parallel/sync_batch_norm.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <vector>

#include "activation_checkpoint/checkpoint.h"
#include "base/error.h"
#include "comm/collectives.h"
#include "debug/comm_debug_mode.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/replicate.h"
#include "nn/conv.h"
#include "nn/linear.h"
#include "nn/normalization.h"
#include "testing/expect.h"
#include "testing/fixtures.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

using nn::BatchNormOptions;

/// Of each rank: batches differ in size, and a rank may have none.
const std::vector<int64_t> kItems = {3, 1, 0, 4};

int64_t num_items(int world_size) {
  int64_t sum = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    sum += kItems[static_cast<size_t>(rank)];
  }
  return sum;
}

/// Far from 0, where careless statistics lose digits.
at::Tensor all_items(at::IntArrayRef item, int world_size, at::ScalarType dtype, uint64_t seed = 0) {
  auto sizes = item.vec();
  sizes.insert(sizes.begin(), num_items(world_size));
  return (at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble) * 3 + 10).to(dtype);
}

at::Tensor own_items(const at::Tensor& all, int rank) {
  return all.narrow(0, num_items(rank), kItems[static_cast<size_t>(rank)]).clone();
}

DeviceMesh data_mesh(int world_size) {
  return init_device_mesh(at::kCPU, {world_size}, {"dp"});
}

/// As module.to(dtype), which cannot do without running statistics.
void fill(torch::nn::Module& module, at::ScalarType dtype) {
  fill_parameters(module, 1);
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    for (const auto& tensor : tensors) {
      if (tensor.defined() && tensor.is_floating_point()) {
        tensor.set_data(tensor.to(dtype));
      }
    }
  }
}

/// Forward and backward of two batches, then of eval mode.
template <class Layer>
void check_batch_norm(const BatchNormOptions& options, at::IntArrayRef item, at::ScalarType dtype, int rank,
                      int world_size) {
  Layer layer(options), reference(options);
  const bool is_narrow = dtype == at::kBFloat16;  // the items alone, as mixed precision has it
  fill(*layer, is_narrow ? at::kFloat : dtype);
  fill(*reference, is_narrow ? at::kFloat : dtype);
  convert_sync_batchnorm(layer, data_mesh(world_size));
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
  };
  const auto expect_near = [&](const at::Tensor& actual, const at::Tensor& expected) {
    expect_close(wide(actual), expected, is_narrow ? Tolerance{.rtol = 0.02, .atol = 0.02} : Tolerance{1e-9, 1e-9});
  };
  for (uint64_t step = 0; step < 2; ++step) {
    const auto all = all_items(item, world_size, dtype, step);
    const auto own = own_items(all, rank).requires_grad_();
    const auto whole = wide(all).clone().requires_grad_();
    const auto weights = all_items(item, world_size, dtype, 100 + step);
    const auto expected = reference(whole), y = layer(own);
    expect_equal(y.scalar_type(), dtype);
    expect_near(y, own_items(expected, rank));
    (expected * wide(weights)).sum().backward();
    (y * own_items(weights, rank)).sum().backward();
    expect_equal(own.grad().scalar_type(), dtype);
    expect_near(own.grad(), own_items(whole.grad(), rank));
  }
  for (const auto& name : {"weight", "bias"}) {
    if (options.affine()) {
      auto sum = layer->named_parameters()[name].grad().clone();
      all_reduce(sum, ReduceOp::Sum, data_mesh(world_size).group());
      expect_near(sum, reference->named_parameters()[name].grad());
    }
  }
  for (const auto& buffer : reference->named_buffers()) {
    if (buffer.value().defined()) {
      expect_near(layer->named_buffers()[buffer.key()], buffer.value());
    }
  }
  layer->eval();
  reference->eval();
  const auto all = all_items(item, world_size, dtype);
  const auto own = own_items(all, rank);
  const CommDebugMode comms;
  if (options.track_running_stats()) {
    expect_near(layer(own), own_items(reference(wide(all)), rank));
  } else if (own.size(0) > 1) {  // by the statistics of the rank's own batch
    expect_bit_equal(layer(own), reference(own));
  }
  expect_equal(comms.calls(), int64_t{0});
}

/// Convolution, batch norms of two and of no dims, linear layers.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(2, 5, 3)));
    norm2 = register_module("norm2", nn::BatchNorm2d(5));
    hidden = register_module("hidden", nn::Linear(5, 7));
    norm1 = register_module("norm1", nn::BatchNorm1d(BatchNormOptions(7).momentum(std::nullopt)));
    out = register_module("out", nn::Linear(7, 3));
    fill(*this, at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    return out(norm1(hidden(norm2(conv(x)).relu().mean(at::IntArrayRef{2, 3}))).tanh());
  }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm2{nullptr};
  nn::Linear hidden{nullptr};
  nn::BatchNorm1d norm1{nullptr};
  nn::Linear out{nullptr};
};
TESSERA_MODULE(Net);

/// Averaged over the ranks it is the mean over all items.
at::Tensor loss_of(Net& net, const at::Tensor& x, int64_t num_items, int world_size) {
  return (net(x) - 0.5).pow(2).sum() * (static_cast<double>(world_size) / static_cast<double>(num_items));
}

}  // namespace

TEST_CASE("a layer over the batches of all ranks is that of one process on all items", "[sync_batch_norm]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const auto dtype = GENERATE(at::kDouble, at::kBFloat16);
  if (world_size == 1 && dtype == at::kBFloat16) {
    return;  // libtorch's kernel, whose gradients are off by 0.4 there
  }
  run_ranks(world_size, [&](int rank) {
    for (const bool affine : {true, false}) {
      for (const bool tracks : {true, false}) {
        const auto options = BatchNormOptions(5).affine(affine).track_running_stats(tracks);
        check_batch_norm<nn::BatchNorm1d>(options, {5}, dtype, rank, world_size);
        check_batch_norm<nn::BatchNorm1d>(options, {5, 3}, dtype, rank, world_size);
        check_batch_norm<nn::BatchNorm2d>(options, {5, 3, 2}, dtype, rank, world_size);
        check_batch_norm<nn::BatchNorm3d>(options, {5, 3, 2, 2}, dtype, rank, world_size);
      }
    }
    check_batch_norm<nn::BatchNorm1d>(BatchNormOptions(5).momentum(std::nullopt).eps(0.1), {5}, dtype, rank,
                                      world_size);
  });
}

TEST_CASE("a net trains as in one process, under fully_shard, replicate and over two axes", "[sync_batch_norm]") {
  const int world_size = GENERATE(2, 4);
  const int way = GENERATE(0, 1, 2);
  run_ranks(world_size, [&](int rank) {
    Net net, reference;
    const auto mesh =
        way == 2 ? init_device_mesh(at::kCPU, {world_size / 2, 2}, {"replicate", "shard"}) : data_mesh(world_size);
    convert_sync_batchnorm(net, mesh);
    if (way == 1) {
      replicate(net);
    } else {
      fully_shard(net->conv, {.mesh = mesh});
      fully_shard(net->norm2, {.mesh = mesh});
      fully_shard(net, {.mesh = mesh});
    }
    torch::optim::SGD optimizer(net->parameters(), 0.1), reference_optimizer(reference->parameters(), 0.1);
    for (uint64_t step = 0; step < 3; ++step) {
      const auto all = all_items({2, 5, 4}, world_size, at::kDouble, step);
      optimizer.zero_grad();
      reference_optimizer.zero_grad();
      loss_of(reference, all, all.size(0), 1).backward();
      loss_of(net, own_items(all, rank), all.size(0), world_size).backward();
      check_sharded_parity(reference, net, {.tolerance = {.rtol = 1e-8, .atol = 1e-9}});
      optimizer.step();
      reference_optimizer.step();
    }
    for (const auto& buffer : reference->named_buffers()) {
      expect_close(net->named_buffers()[buffer.key()], buffer.value(), Tolerance{1e-9, 1e-9});
    }
  });
}

TEST_CASE("one rank alone evaluates without running statistics, as the plain layer", "[sync_batch_norm]") {
  run_ranks(2,
            [](int rank) {
              const auto options = BatchNormOptions(5).affine(false).track_running_stats(false);
              nn::BatchNorm1d layer(options), plain(options);
              convert_sync_batchnorm(layer, data_mesh(2));
              layer->eval();
              plain->eval();
              if (rank == 0) {
                const auto x = all_items({5}, 2, at::kFloat);
                expect_bit_equal(layer(x), plain(x));
              }
            },
            {.timeout = std::chrono::seconds(20)});
}

TEST_CASE("a batch that is a DTensor is not counted twice", "[sync_batch_norm]") {
  run_ranks(2, [](int) {
    const auto options = BatchNormOptions(5).affine(false).track_running_stats(false);
    nn::BatchNorm1d layer(options), reference(options);
    const auto mesh = data_mesh(2);
    convert_sync_batchnorm(layer, mesh);
    const auto all = all_items({5}, 2, at::kFloat);
    const auto y = layer(distribute_tensor(all, mesh, {Shard(0)}));
    expect_close(full_tensor(y), reference(all));
  });
}

TEST_CASE("what cannot be converted, or computed, is an error that says why", "[sync_batch_norm]") {
  run_ranks(2, [](int rank) {
    const auto mesh = data_mesh(2);
    torch::nn::Sequential stock(torch::nn::Linear(3, 5), torch::nn::BatchNorm1d(5));
    expect_throws<StateError>([&] { convert_sync_batchnorm(stock, mesh); },
                              "'1': modules of type torch::nn::BatchNorm1dImpl have no hook point");

    torch::nn::Sequential layers(nn::Linear(3, 5), nn::BatchNorm1d(5));
    convert_sync_batchnorm(layers, mesh);
    expect_throws<StateError>([&] { convert_sync_batchnorm(layers, mesh); }, "'1' takes its statistics over several");
    expect_throws<NotImplementedError>([&] { layers->clone(); }, "has hooks or state attached");

    const auto x = at::randn({rank == 0 ? 1 : 0, 3});
    expect_throws<ValueError>([&] { layers->forward(x); }, "the batches of all ranks together have 1");
    nn::BatchNorm1d layer(5);
    convert_sync_batchnorm(layer, mesh);
    expect_throws<ValueError>([&] { layer(at::randn({2, 4})); }, "an input of 4 channels; the layer has 5");
    nn::BatchNorm1d checkpointed(5);
    convert_sync_batchnorm(checkpointed, mesh);
    checkpoint_module(*checkpointed);
    expect_throws<StateError>([&] { checkpointed(at::randn({2, 5})); }, "checkpoint the module around it");
    const auto y = layer(at::randn({2, 5}).requires_grad_()).pow(2).sum();
    const auto twice = [&] {
      torch::autograd::grad({y}, {layer->weight}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    };
    expect_throws<NotImplementedError>(twice, "backward with create_graph");
  });
}

}  // namespace tessera::testing
