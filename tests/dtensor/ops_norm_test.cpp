#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/glu.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>

#include "comm/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

using namespace tessera;

TEST_CASE("softmax and gates", "[dtensor][ops]") {
  std::vector<OpCase> cases;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 4}, {1, 2}}) {
    cases.push_back({.name = "softmax", .inputs = {{sizes}}, .call = [](const Tensors& x) -> Tensors {
                       return {at::softmax(x[0], -1)};
                     }});
    cases.push_back({.name = "log_softmax over rows", .inputs = {{sizes}}, .call = [](const Tensors& x) -> Tensors {
                       return {at::log_softmax(x[0], 0)};
                     }});
    cases.push_back(
        {.name = "glu", .inputs = {{sizes}}, .call = [](const Tensors& x) -> Tensors { return {at::glu(x[0], 1)}; }});
  }
  CHECK_NOTHROW(check_ops(cases));
}

TEST_CASE("normalisations", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "layer_norm",
       .inputs = {{{5, 3}}, {{3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::layer_norm(x[0], {3}, x[1], x[2])}; }},
      {.name = "layer_norm of few items",
       .inputs = {{{1, 2, 3}}, {{3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::layer_norm(x[0], {3}, x[1], x[2])}; }},
      {.name = "layer_norm over two dims, without bias",
       .inputs = {{{5, 2, 3}}, {{2, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::layer_norm(x[0], {2, 3}, x[1])};
       }},
      {.name = "layer_norm without weight",
       .inputs = {{{5, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::layer_norm(x[0], {3})}; }},
      {.name = "rms_norm",
       .inputs = {{{5, 3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::rms_norm(x[0], {3}, x[1], 1e-5)}; }},
      {.name = "the rms_norm that CUDA tensors take",
       .inputs = {{{5, 3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {std::get<0>(at::_fused_rms_norm(x[0], {3}, x[1], 1e-5))}; }},
      {.name = "rms_norm of three dims",
       .inputs = {{{2, 5, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::rms_norm(x[0], {3}, {}, 1e-5)}; }},
      {.name = "group_norm",
       .inputs = {{{3, 4, 5}}, {{4}}, {{4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::group_norm(x[0], 2, x[1], x[2])}; }},
      {.name = "group_norm without weight",
       .inputs = {{{2, 4, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::group_norm(x[0], 4)}; }},
  }));
}

TEST_CASE("attention", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "attention",
       .inputs = {{{3, 2, 5, 4}}, {{3, 2, 5, 4}}, {{3, 2, 5, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::scaled_dot_product_attention(x[0], x[1], x[2])}; }},
      {.name = "causal attention",
       .inputs = {{{1, 3, 4, 2}}, {{1, 3, 4, 2}}, {{1, 3, 4, 2}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true)};
       }},
      {.name = "masked attention",
       .inputs = {{{2, 3, 4, 2}}, {{2, 3, 5, 2}}, {{2, 3, 5, 2}}, {{4, 5}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::scaled_dot_product_attention(x[0], x[1], x[2], x[3].detach())};
       }},
      {.name = "attention with a mask per item",
       .inputs = {{{2, 3, 4, 2}}, {{2, 3, 5, 2}}, {{2, 3, 5, 2}}, {{2, 1, 4, 5}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::scaled_dot_product_attention(x[0], x[1], x[2], x[3].detach(), 0.0, false, 0.3)};
       }},
  }));
}

TEST_CASE("attention over cut heads moves nothing", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto q = distribute_tensor(at::ones({1, 4, 3, 2}), mesh, {Shard(1)});
    reset_comm_stats();
    const auto y = at::scaled_dot_product_attention(q, q, q);
    expect_equal(to_string(placements(y)), "(Shard(1))");
    expect_equal(to_string(placements(y.transpose(1, 2).reshape({1, 3, 8}))), "(Shard(2))");
    expect_equal(comm_stats().calls(), 0);
  });
}
