// Complex numbers: conj() is a view that nothing has computed yet, and the gradients of complex ops are made of it.

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/fft_fft.h>
#include <ATen/ops/fft_irfft.h>
#include <ATen/ops/fft_rfft.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/real.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// As real numbers, which the oracle compares and squares.
at::Tensor parts(const at::Tensor& numbers) {
  return at::view_as_real(numbers.resolve_conj());
}

}  // namespace

TEST_CASE("conjugates", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "conj, imag of it, adjoint",
       .inputs = {{{5, 3}}, {{5, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         const auto z = at::complex(x[0], x[1]);
         return {parts(z.conj()), at::imag(z.conj()), parts(z.mH())};
       }},
      {.name = "of a pending sum of complex numbers",
       .inputs = {{{4, 3, 2}}},
       .call = [](const Tensors& x) -> Tensors { return {parts(at::view_as_complex(x[0]).conj())}; }},
  }));
}

TEST_CASE("ops whose gradients conjugate", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "products",
       .inputs = {{{4, 3, 2}}, {{4, 3, 2}}},
       .call = [](const Tensors& x) -> Tensors {
         const auto a = at::view_as_complex(x[0]), b = at::view_as_complex(x[1]);
         return {parts(a * b), parts(a / b), parts(a.mm(b.t())), at::abs(a), at::real(a * a.conj())};
       }},
      {.name = "rotary embedding",
       .inputs = {{{5, 3, 4, 2}}, {{5, 1, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         const auto rotation = at::polar(at::ones_like(x[1]), x[1]);
         return {at::view_as_real(at::view_as_complex(x[0]) * rotation).flatten(2)};
       }},
      {.name = "transforms",
       .inputs = {{{5, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {parts(at::fft_fft(x[0])), at::fft_irfft(at::fft_rfft(x[0], {}, 0) * 2, 5, 0)};
       }},
  }));
}

TEST_CASE("a conjugate may be read and not written, and not once its tensor was", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto plain = at::randn({3, 2}, make_generator(1), at::TensorOptions().dtype(at::kComplexDouble));
    const auto z = distribute_tensor(plain, mesh, {Shard(0)});
    const auto conjugate = z.conj();
    expect_bit_equal(parts(full_tensor(conjugate)), parts(plain.conj()));
    expect_throws<NotImplementedError>([&] { conjugate.add_(1); }, "aten::add_");
    z.mul_(2);
    expect_throws<StateError>([&] { conjugate.mul(2); }, "Take the view again");
  });
}

}  // namespace tessera
