#include "captured_step/captured_step.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <utility>

#include "base/error.h"
#include "captured_step/device_graph.h"
#include "comm/process_group.h"

namespace tessera {

namespace {

/// Makes later work of `stream` wait for the work queued so far on `other`.
void wait_for(const c10::Stream& stream, const c10::Stream& other) {
  c10::Event event(stream.device_type());
  event.record(other);
  event.block(stream);
}

}  // namespace

struct CapturedStep::Impl {
  optim::Capturable& optimizer;
  std::function<at::Tensor()> step;
  CapturedStepOptions options;
  std::unique_ptr<DeviceGraph> graph;
  c10::Stream stream;
  at::Tensor result = {};
  int calls = 0;
  bool is_captured = false;
  bool has_failed = false;

  void run();
  void capture();
};

/// Records the function; nothing runs on the device.
void CapturedStep::Impl::capture() {
  c10::impl::VirtualGuardImpl(stream.device_type()).synchronizeDevice(stream.device_index());
  optimizer.set_capturing(true);
  try {
    graph->begin();
    result = step();
  } catch (const std::exception& failure) {
    graph->abandon();
    optimizer.set_capturing(false);
    throw NotImplementedError(fmt::format(
        "CapturedStep: the step cannot be recorded: {}. It may only give work to the device: read no values (item(), "
        "copies to the host), and let data enter by tensors that stay",
        failure.what()));
  }
  optimizer.set_capturing(false);
  graph->end();
  is_captured = true;
}

void CapturedStep::Impl::run() {
  optimizer.before_replay();
  if (calls < options.warmup) {
    ++calls;
    result = step();
    return;
  }
  if (is_captured) {
    graph->replay();
    optimizer.after_replay();
    return;
  }
  capture();
  graph->replay();  // the optimizer has already counted this step
}

CapturedStep::CapturedStep(optim::Capturable& optimizer, std::function<at::Tensor()> step,
                           const CapturedStepOptions& options) {
  TESSERA_CHECK(ValueError, options.warmup >= 2,
                "CapturedStep: warmup is {}; at least 2, so that nothing is allocated for the first time",
                options.warmup);
  TESSERA_CHECK(NotImplementedError, !is_initialized() || get_world_size() == 1,
                "CapturedStep: there are {} ranks; a step that communicates is not captured yet, call it itself",
                get_world_size());
  auto graph = make_device_graph(options.device);
  const auto stream = c10::impl::VirtualGuardImpl(options.device.type())
                          .getStreamFromGlobalPool(options.device, /*isHighPriority=*/false);
  optimizer.make_capturable();
  impl_ = std::make_unique<Impl>(Impl{.optimizer = optimizer,
                                      .step = std::move(step),
                                      .options = options,
                                      .graph = std::move(graph),
                                      .stream = stream});
}

CapturedStep::~CapturedStep() = default;

at::Tensor CapturedStep::operator()() {
  TESSERA_CHECK(StateError, !impl_->has_failed,
                "CapturedStep: an earlier call has failed; make the model, the optimizer and the CapturedStep anew");
  impl_->has_failed = true;  // until the call succeeds
  {
    const c10::StreamGuard guard(impl_->stream);
    wait_for(impl_->stream, guard.original_stream());
    try {
      impl_->run();
    } catch (...) {
      wait_for(guard.original_stream(), impl_->stream);
      throw;
    }
    wait_for(guard.original_stream(), impl_->stream);
  }
  impl_->has_failed = false;
  return impl_->result;
}

bool CapturedStep::is_captured() const {
  return impl_->is_captured;
}

}  // namespace tessera
