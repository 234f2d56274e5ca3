#include "nn/hooks/module_ref.h"

#include <torch/nn/modules/linear.h>

#include <catch2/catch.hpp>
#include <memory>

#include "base/error.h"
#include "nn/linear.h"

namespace tessera {
namespace {

const torch::nn::Module* address_of(ModuleRef module) {
  return &*module;
}

TEST_CASE("a module is taken as itself, in a holder and in a shared pointer") {
  const nn::Linear hooked(2, 3);
  torch::nn::Linear stock(2, 3);
  CHECK(address_of(hooked) == hooked.ptr().get());
  CHECK(address_of(stock) == stock.ptr().get());
  CHECK(address_of(*stock) == stock.ptr().get());
  CHECK(address_of(stock.ptr()) == stock.ptr().get());
  CHECK(address_of(std::shared_ptr<torch::nn::Module>(stock.ptr())) == stock.ptr().get());
  CHECK(ModuleRef(stock)->parameters().size() == 2);
}

TEST_CASE("nothing in place of a module is an error") {
  CHECK_THROWS_AS(address_of(std::shared_ptr<torch::nn::LinearImpl>()), ValueError);
  CHECK_THROWS_AS(address_of(torch::nn::Linear(nullptr)), c10::Error);
}

}  // namespace
}  // namespace tessera
