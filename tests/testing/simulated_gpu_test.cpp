#include "testing/simulated_gpu/simulated_gpu.h"

#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "testing/expect.h"
#include "testing/simulated_gpu/access_log.h"
#include "testing/simulated_gpu/stream_clocks.h"
#include "third_party/catch2/catch.h"

namespace tessera::simulated_gpu {

namespace {

const c10::Device kGpu(c10::kCUDA, 0);

c10::Stream new_stream(c10::Device device = kGpu) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getNewStream(device);
}

c10::Stream current_stream() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(kGpu);
}

void make_wait(const c10::Stream& waiting, const c10::Stream& done) {
  c10::Event event(c10::kCUDA);
  event.record(done);
  event.block(waiting);
}

}  // namespace

TEST_CASE("simulated GPU: work of two streams is ordered by events and by the host alone", "[simulated_gpu]") {
  StreamClocks clocks;
  const size_t a = clocks.add_stream(), b = clocks.add_stream(), c = clocks.add_stream();
  const Moment first = clocks.launch(a);
  CHECK(clocks.is_over(first, a));
  CHECK_FALSE(clocks.is_over(first, b));

  const Clock event = clocks.record(a);
  const Moment second = clocks.launch(a);
  clocks.wait(b, event);
  CHECK(clocks.is_over(first, b));
  CHECK_FALSE(clocks.is_over(second, b));

  clocks.wait(c, clocks.record(b));  // through b
  CHECK(clocks.is_over(first, c));
  CHECK_FALSE(clocks.is_over(second, c));

  clocks.host_waits(clocks.record(a));
  CHECK(clocks.is_over(second, c));
}

TEST_CASE("simulated GPU: reads may overlap, a write waits for both", "[simulated_gpu]") {
  StreamClocks clocks;
  const size_t a = clocks.add_stream(), b = clocks.add_stream();
  AccessLog log;
  log.add({.moment = clocks.launch(a), .begin = 0, .end = 8, .writes = false, .op = "first"}, clocks);
  const auto access = [&](size_t begin, bool writes) {
    return Access{.moment = clocks.launch(b), .begin = begin, .end = begin + 8, .writes = writes, .op = "second"};
  };
  CHECK_FALSE(log.find_race(access(0, false), clocks));
  CHECK_FALSE(log.find_race(access(8, true), clocks));
  const auto race = log.find_race(access(7, true), clocks);
  REQUIRE(race);
  CHECK(describe(*race) == "first reads bytes [0, 8) on stream 0");
  clocks.wait(b, clocks.record(a));
  CHECK_FALSE(log.find_race(access(7, true), clocks));
}

TEST_CASE("simulated GPU: ops have the CPU's results", "[simulated_gpu]") {
  const at::Tensor a = at::randn({5, 3}), b = at::randn({3, 4});
  const at::Tensor x = a.to(kGpu), y = b.to(kGpu);
  CHECK(x.device() == kGpu);
  const auto equal = [](const at::Tensor& gpu, const at::Tensor& cpu) {
    return gpu.is_cuda() && at::equal(gpu.cpu(), cpu);
  };
  CHECK(equal(x.mm(y), a.mm(b)));
  CHECK(equal(x.t().contiguous(), a.t()));
  CHECK(equal(x.sum(0), a.sum(0)));
  CHECK(equal(at::cat({x, x}, 1), at::cat({a, a}, 1)));
  CHECK(equal(x + 1, a + 1));
  CHECK(equal(x * at::full({}, 2.0), a * 2));  // a number of the CPU
  CHECK(equal(x.nonzero(), a.nonzero()));
  CHECK(equal(x.to(at::kDouble), a.to(at::kDouble)));
  CHECK(equal(x.index({at::arange(2).to(kGpu)}), a.slice(0, 0, 2)));

  at::Tensor row = x.select(0, 1);
  row.fill_(7);
  CHECK(x[1][2].item<float>() == 7);
  CHECK(row.is_alias_of(x));

  at::Tensor out = at::empty({0}, kGpu);
  at::add_out(out, x, x);
  CHECK(equal(out, x.cpu() * 2));
  CHECK(at::empty({2}, kGpu).isnan().all().item<bool>());  // nobody wrote it
}

TEST_CASE("simulated GPU: autograd runs there", "[simulated_gpu]") {
  const at::Tensor weight = at::randn({4, 3}), input = at::randn({5, 3});
  const auto gradient_on = [&](c10::Device device) {
    const at::Tensor own = weight.to(device, at::kFloat, /*non_blocking=*/false, /*copy=*/true).requires_grad_();
    at::linear(input.to(device), own).square().sum().backward();
    return own.grad();
  };
  const at::Tensor gradient = gradient_on(kGpu);
  CHECK(gradient.device() == kGpu);
  CHECK(at::equal(gradient.cpu(), gradient_on(c10::kCPU)));
}

TEST_CASE("simulated GPU: what the host waits for is listed", "[simulated_gpu]") {
  const at::Tensor x = at::ones({3}, kGpu);
  forget_host_waits();
  const at::Tensor sum = (x * 2).sum();
  CHECK(host_waits().empty());
  CHECK(sum.item<float>() == 6);
  CHECK(x.nonzero().size(0) == 3);
  CHECK(x.cpu().numel() == 3);
  current_stream().synchronize();
  CHECK(host_waits() ==
        std::vector<std::string>{"aten::_local_scalar_dense", "aten::nonzero", "aten::copy_", "Stream::synchronize"});
  forget_host_waits();
  CHECK(x.to(at::kDouble).to(kGpu, /*non_blocking=*/true).numel() == 3);
  CHECK(host_waits().empty());
}

TEST_CASE("simulated GPU: a race between streams is an error of the op", "[simulated_gpu]") {
  const at::Tensor x = at::ones({8}, kGpu);
  const c10::Stream main = current_stream(), side = new_stream();
  {
    const c10::StreamGuard guard(side);
    expect_throws<Error>([&] { x.add_(1); }, "aten::add reads bytes [0, 32) on stream");
    expect_throws<Error>([&] { x.add_(1); }, "without waiting until aten::fill_ writes");
  }
  make_wait(side, main);
  {
    const c10::StreamGuard guard(side);
    x.add_(1);
  }
  expect_throws<Error>([&] { x + 1; }, "without waiting until aten::add writes");
  side.synchronize();
  CHECK((x + 1).cpu()[0].item<float>() == 3);
}

TEST_CASE("simulated GPU: memory that is freed too early is found at the next op", "[simulated_gpu]") {
  const c10::Stream main = current_stream(), side = new_stream();
  const auto use_on_side = [&](bool tells, bool waits) {
    at::Tensor x = at::ones({8}, kGpu);
    make_wait(side, main);
    {
      const c10::StreamGuard guard(side);
      x.add_(1);
    }
    if (tells) {
      x.record_stream(side);
    }
    if (waits) {
      make_wait(main, side);
    }
  };
  use_on_side(true, false);
  use_on_side(false, true);
  CHECK_NOTHROW(at::ones({1}, kGpu));
  use_on_side(false, false);
  expect_throws<Error>([&] { at::ones({1}, kGpu); }, "was freed before that stream waits until aten::add writes");
  CHECK_NOTHROW(at::ones({1}, kGpu));
}

TEST_CASE("simulated GPU: freed memory goes to its own stream again", "[simulated_gpu]") {
  const auto address = [] { return at::ones({777}, kGpu).const_data_ptr(); };
  const void* const first = address();
  CHECK(address() == first);
  const c10::StreamGuard guard(new_stream());
  CHECK(address() != first);
}

TEST_CASE("simulated GPU: a copy to pinned memory is there once the host has waited", "[simulated_gpu]") {
  const at::Tensor x = at::ones({3}, kGpu), host = at::empty({3}, at::TensorOptions().pinned_memory(true));
  REQUIRE(host.is_pinned());
  CHECK_FALSE(at::empty({3}).is_pinned());
  forget_host_waits();
  host.copy_(x, /*non_blocking=*/true);
  CHECK(host_waits().empty());
  CHECK(host.isnan().all().item<bool>());
  CHECK(at::equal(host.to(kGpu).cpu(), at::ones({3})));  // the stream knows it
  current_stream().synchronize();
  CHECK(at::equal(host, at::ones({3})));
  host.fill_(2);
  CHECK(host.to(kGpu, /*non_blocking=*/true).sum().item<float>() == 6);
}

TEST_CASE("simulated GPU: tensors of two GPUs meet in copies alone", "[simulated_gpu]") {
  const at::Tensor x = at::arange(4, kGpu), y = at::arange(4, c10::Device(c10::kCUDA, 1));
  expect_throws<ValueError>([&] { x.view({2, 2}).mm(y.view({2, 2})); }, "an op on tensors of cuda:0 and cuda:1");
  forget_host_waits();
  x.copy_(y * 2);
  CHECK(host_waits().empty());
  CHECK(at::equal(x.cpu(), at::arange(4) * 2));
  CHECK(at::equal(y.to(kGpu).cpu(), at::arange(4)));
}

}  // namespace tessera::simulated_gpu
