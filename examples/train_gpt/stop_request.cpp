#include "examples/train_gpt/stop_request.h"

#include <ATen/ops/full.h>
#include <signal.h>
#include <time.h>

#include <atomic>

#include "comm/collectives.h"
#include "comm/process_group.h"

namespace tessera::examples {

namespace {

std::atomic<int> first_signal{0};
std::atomic<int64_t> first_signal_ms{0};

extern "C" void keep_signal(int number) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t now_ms = int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
  if (first_signal == 0) {
    first_signal_ms = now_ms;
    first_signal = number;
  } else if (now_ms - first_signal_ms >= 1000) {
    signal(number, SIG_DFL);
    raise(number);
  }
}

}  // namespace

StopRequest::StopRequest() {
  signal(SIGINT, keep_signal);
  signal(SIGTERM, keep_signal);
}

StopRequest::~StopRequest() {
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
}

int StopRequest::signal_on_any_rank() const {
  const at::Tensor number = at::full({}, first_signal.load(), at::kInt);
  all_reduce(number, ReduceOp::Max, default_group());
  return number.item<int>();
}

}  // namespace tessera::examples
