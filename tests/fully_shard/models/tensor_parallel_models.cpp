#include "tests/fully_shard/models/tensor_parallel_models.h"

#include "parallel/distribute_module.h"

namespace tessera::testing {

namespace {

using TensorFn = std::function<void(torch::nn::Module&, TensorRefs, const DeviceMesh&)>;

void take_copy(torch::nn::Module&, TensorRefs inputs, const DeviceMesh& tp) {
  *inputs[0] = from_local(*inputs[0], tp, {Replicate()});
}

void take_rows(torch::nn::Module&, TensorRefs inputs, const DeviceMesh& tp) {
  *inputs[0] = redistribute(from_local(*inputs[0], tp, {Replicate()}), {Shard(0)});
}

void give_whole(torch::nn::Module&, TensorRefs outputs, const DeviceMesh&) {
  *outputs[0] = full_tensor(*outputs[0]);
}

struct LinearCut {
  Placement weight, bias;
  TensorFn input_fn = nullptr, output_fn = nullptr;
};

void cut(nn::Linear& linear, const DeviceMesh& tp, const LinearCut& cut) {
  const auto partition = [&](const std::string&, torch::nn::Module& module, const DeviceMesh& mesh) {
    distribute_parameter(module, "weight", mesh, {cut.weight});
    distribute_parameter(module, "bias", mesh, {cut.bias});
  };
  distribute_module(linear, tp, {.partition_fn = partition, .input_fn = cut.input_fn, .output_fn = cut.output_fn});
}

}  // namespace

void parallelize_block(Block& block, const DeviceMesh& tp) {
  cut(block->up, tp, {.weight = Shard(0), .bias = Shard(0), .input_fn = take_copy});
  cut(block->down, tp, {.weight = Shard(1), .bias = Replicate(), .output_fn = give_whole});
}

void parallelize_tower(Tower& tower, const DeviceMesh& tp) {
  for (auto& block : tower->blocks) {
    parallelize_block(block, tp);
  }
  distribute_module(tower->norm, tp, {.input_fn = take_rows, .output_fn = give_whole});
  cut(tower->out, tp, {.weight = Shard(0), .bias = Shard(0), .input_fn = take_copy, .output_fn = give_whole});
}

BranchImpl::BranchImpl() {
  always = register_module("always", Block(5, 7));
  sometimes = register_module("sometimes", Block(5, 3));
  plain = register_module("plain", tessera::nn::Linear(5, 2));
}

at::Tensor BranchImpl::forward(at::Tensor x, bool both) {
  x = always(x);
  return plain(both ? sometimes(x) : x);
}

void parallelize_branch(Branch& branch, const DeviceMesh& tp) {
  parallelize_block(branch->always, tp);
  parallelize_block(branch->sometimes, tp);
}

Branch make_branch() {
  Branch branch;
  fill_parameters(*branch, 1);
  return branch;
}

Block make_block() {
  Block block(5, 7);
  fill_parameters(*block, 1);
  return block;
}

at::Tensor loss_of(Branch& branch, int64_t batch, bool both) {
  return weighted_loss(branch(make_batch(static_cast<uint64_t>(batch), 3, 5), both));
}

}  // namespace tessera::testing
