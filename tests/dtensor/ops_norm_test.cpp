#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/glu.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/softmax.h>

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
