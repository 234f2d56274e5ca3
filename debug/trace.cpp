#include "debug/trace.h"

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <fmt/format.h>
#include <sys/syscall.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/report.h"
#include "comm/context/flight_record.h"
#include "comm/process_group.h"
#include "debug/clock_offset.h"
#include "fully_shard/fsdp_module.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

std::atomic<bool> is_tracing{false};

std::string json_text(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
    }
    result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return result + '"';
}

/// Event of a unit, with its time.
struct UnitEvent {
  int64_t ns = 0;
  FSDPEventKind step = FSDPEventKind::Gather;
  std::string unit;
};

/// Interval between two events, shown beside the threads.
struct Span {
  std::string name;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

bool is_reduction(FSDPEventKind step) {
  return step == FSDPEventKind::ReduceScatter || step == FSDPEventKind::AllReduce;
}

/// Returns the intervals of gathers, backwards and reductions of units.
std::vector<Span> unit_spans(const std::vector<UnitEvent>& events) {
  std::vector<Span> spans;
  std::map<std::string, int64_t> open;  // start times by name
  const auto begin = [&](const char* what, const UnitEvent& event) {
    open.try_emplace(fmt::format("{} {}", what, event.unit), event.ns);
  };
  const auto end = [&](const char* what, const UnitEvent& event) {
    if (auto found = open.extract(fmt::format("{} {}", what, event.unit)); !found.empty()) {
      spans.push_back({.name = found.key(), .begin_ns = found.mapped(), .end_ns = event.ns});
    }
  };
  for (const auto& event : events) {
    if (event.step == FSDPEventKind::Gather) {
      begin("gather", event);
    } else if (event.step == FSDPEventKind::Unshard || event.step == FSDPEventKind::Drop) {
      end("gather", event);
    } else if (event.step == FSDPEventKind::Backward) {
      begin("backward", event);
    } else if (event.step == FSDPEventKind::Reduced) {
      end("reduce", event);
    } else {
      end("backward", event);
    }
    if (is_reduction(event.step)) {
      begin("reduce", event);
    }
  }
  return spans;
}

/// Writes events of Chrome's trace format.
class TraceWriter {
 public:
  TraceWriter(int rank, int64_t base_ns) : rank_(rank), base_ns_(base_ns) {}

  void name(const char* what, int64_t thread, const std::string& name) {
    add(R"("ph": "M", "name": "{}", "tid": {}, "args": {{"name": {}}})", what, thread, json_text(name));
  }
  /// Writes an interval. `args` are members of a JSON object.
  void range(const Span& span, const char* category, int64_t thread, const std::string& args = "") {
    add(R"("ph": "X", "cat": "{}", "name": {}, "tid": {}, "ts": {:.3f}, "dur": {:.3f}, "args": {{{}}})", category,
        json_text(span.name), thread, us(span.begin_ns), static_cast<double>(span.end_ns - span.begin_ns) * 1e-3, args);
  }
  void span(const Span& span, const char* category, int64_t thread, const std::string& args = "") {
    ++spans_;
    add(R"("ph": "b", "cat": "{}", "id2": {{"local": "{}"}}, "name": {}, "tid": {}, "ts": {:.3f}, "args": {{{}}})",
        category, spans_, json_text(span.name), thread, us(span.begin_ns), args);
    add(R"("ph": "e", "cat": "{}", "id2": {{"local": "{}"}}, "name": {}, "tid": {}, "ts": {:.3f})", category, spans_,
        json_text(span.name), thread, us(span.end_ns));
  }
  const std::string& text() const { return text_; }

 private:
  double us(int64_t ns) const { return static_cast<double>(ns - base_ns_) * 1e-3; }

  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    text_ += text_.empty() ? "\n{" : ",\n{";
    text_ += fmt::format(R"("pid": {}, )", rank_) + fmt::format(format, std::forward<Args>(args)...) + "}";
  }

  int rank_;
  int64_t base_ns_;
  int64_t spans_ = 0;
  std::string text_;
};

std::string call_args(const FlightEntry& call, const FlightGroup& group) {
  std::string args = fmt::format(R"("group": {}, "bytes_sent": {}, "unit": {})", json_text(group.name), call.bytes_sent,
                                 json_text(call.label.data()));
  if (call.dtype != static_cast<int8_t>(c10::ScalarType::Undefined)) {
    args += fmt::format(R"(, "dtype": "{}", "input": {}, "output": {})",
                        c10::toString(static_cast<c10::ScalarType>(call.dtype)), call.input_numel, call.output_numel);
  }
  if (call.group_number > 0) {
    args += fmt::format(R"(, "flow": {}, "ranks": {})", json_text(fmt::format("{}#{}", group.key, call.group_number)),
                        group.size);
  }
  return args;
}

const char* category_of(at::RecordScope scope) {
  return scope == at::RecordScope::BACKWARD_FUNCTION ? "autograd"
         : scope == at::RecordScope::USER_SCOPE      ? "range"
                                                     : "op";
}

}  // namespace

class Trace::Recording {
 public:
  Recording(ModuleRef model, Options options);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void stop();

 private:
  void observe(torch::nn::Module& module, const std::string& name);
  void unobserve();
  void start_profiler() const;
  std::string events(const profiler::ProfilerResult& result);
  void add_event(TraceWriter& writer, const profiler::KinetoEvent& event);
  void write(const std::string& events) const;

  Options options_;
  int rank_ = 0;
  int ranks_ = 1;
  ClockOffset clock_;
  int64_t thread_ = syscall(SYS_gettid);
  int64_t begin_ns_ = 0;
  bool is_recording_ = false;
  std::shared_ptr<FlightRecord> record_ = FlightRecord::of_rank();
  std::mutex mutex_;  // guards calls_, to which background saves add
  std::map<uint64_t, FlightEntry> calls_;
  std::vector<FlightGroup> groups_;
  std::vector<UnitEvent> unit_events_;
  std::vector<FSDPModule> units_;
  std::vector<ScopedHook> hooks_;
  std::vector<std::unique_ptr<at::RecordFunction>> forwards_;  // running, innermost last
};

Trace::Recording::Recording(ModuleRef model, Options options) : options_(std::move(options)) {
  if (is_initialized()) {
    rank_ = get_rank();
    ranks_ = get_world_size();
    TESSERA_CHECK(StateError, ranks_ == 1 || get_backend(default_group()) != "threads",
                  "Trace: ranks are threads of one process, which libtorch's profiler cannot tell apart; run them as "
                  "processes");
    clock_ = measure_clock_offset(default_group());
  }
  std::error_code failure;
  std::filesystem::create_directories(options_.folder, failure);
  TESSERA_CHECK(Error, !failure, "Trace: {}: the folder cannot be made: {}", options_.folder, failure.message());
  TESSERA_CHECK(StateError, !c10::memoryProfilingEnabled(),
                "Trace: this thread has a MemoryTimeline, and libtorch has one profiler a thread; end that first");
  TESSERA_CHECK(StateError, !is_tracing.exchange(true), "Trace: this process has another one, which stop() ends");
  start_profiler();
  is_recording_ = true;
  begin_ns_ = clock_ns();
  for (const auto& item : model->named_modules("", /*include_self=*/true)) {
    observe(*item.value(), item.key().empty() ? "model" : item.key());
  }
  record_->set_observer([this](const FlightEntry& ended) {
    const std::lock_guard lock(mutex_);
    calls_[ended.number] = ended;
  });
}

void Trace::Recording::start_profiler() const {
  torch::profiler::impl::ExperimentalConfig experimental;
  experimental.profile_all_threads = true;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO,
                                                     /*report_input_shapes=*/false, /*profile_memory=*/false,
                                                     /*with_stack=*/false, /*with_flops=*/false,
                                                     /*with_modules=*/false, experimental);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (at::hasCUDA()) {
    activities.insert(ActivityType::CUDA);
  }
  std::unordered_set<at::RecordScope> scopes;  // empty: all
  if (!options_.ops) {
    scopes.insert(at::RecordScope::USER_SCOPE);
  }
  // Kineto writes to stderr when it starts, including an error if there is no GPU.
  setenv("KINETO_LOG_LEVEL", "99", /*replace=*/0);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities, scopes);
}

void Trace::Recording::observe(torch::nn::Module& module, const std::string& name) {
  auto* const point = find_hook_point(module);
  if (!point) {
    return;
  }
  const auto leave = [this] {
    if (!forwards_.empty()) {
      forwards_.pop_back();
    }
  };
  hooks_.emplace_back(point->register_forward_pre_hook(
      [this, range = "forward " + name](HookPoint&, TensorRefs) {
        forwards_.push_back(std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE));
        if (forwards_.back()->isActive()) {
          forwards_.back()->before(range);
        }
      },
      HookOrder::Prepend));
  hooks_.emplace_back(point->register_forward_hook([leave](HookPoint&, TensorRefs) { leave(); }));
  hooks_.emplace_back(point->register_exception_hook([leave](HookPoint&) { leave(); }));
  if (auto unit = find_fsdp(module)) {
    unit->set_event_observer([this](const FSDPEvent& event) {
      unit_events_.push_back({.ns = clock_ns(), .step = event.step, .unit = event.unit});
    });
    units_.push_back(*std::move(unit));
  }
}

void Trace::Recording::unobserve() {
  record_->set_observer({});
  for (auto& unit : units_) {
    unit.set_event_observer({});
  }
  units_.clear();
  hooks_.clear();
  forwards_.clear();
}

Trace::Recording::~Recording() {
  if (!is_recording_) {
    return;
  }
  try {
    unobserve();
    profiler::disableProfiler();
    is_tracing = false;
  } catch (const std::exception& failure) {
    report_failure("Trace: {}", failure.what());
  }
}

void Trace::Recording::stop() {
  unobserve();
  const auto result = profiler::disableProfiler();
  is_recording_ = false;
  is_tracing = false;
  groups_ = record_->groups();
  for (const auto& call : record_->entries()) {
    calls_.try_emplace(call.number, call);  // calls in flight
  }
  write(events(*result));
}

void Trace::Recording::add_event(TraceWriter& writer, const profiler::KinetoEvent& event) {
  Span span{.name = event.name(),
            .begin_ns = static_cast<int64_t>(event.startNs()),
            .end_ns = static_cast<int64_t>(event.startNs() + event.durationNs())};
  const int64_t thread = event.deviceResourceId();
  if (event.deviceType() != at::kCPU) {
    constexpr int64_t kStreams = int64_t{1} << 32;  // above all thread ids
    writer.range(span, "gpu", kStreams + thread);
    return;
  }
  std::string args;
  const char* category = category_of(static_cast<at::RecordScope>(event.scope()));
  const auto place = span.name.find('#');
  if (span.name.starts_with("comm ") && place != std::string::npos) {
    const auto found = calls_.find(std::stoull(span.name.substr(place + 1)));
    if (found != calls_.end()) {
      const auto part = span.name.substr(5, place - 6);
      span.name = fmt::format("{} {}", part, name(found->second.kind));
      args = fmt::format(R"("part": "{}", {})", part, call_args(found->second, groups_.at(found->second.group)));
      category = "comm";
    }
  }
  writer.range(span, category, thread, args);
}

std::string Trace::Recording::events(const profiler::ProfilerResult& result) {
  TraceWriter writer(rank_, begin_ns_);
  writer.name("process_name", 0, fmt::format("rank {}", rank_));
  writer.name("thread_name", thread_, "rank's thread");
  for (const auto& event : result.events()) {
    add_event(writer, event);
  }
  for (const auto& [number, call] : calls_) {
    if (call.issued_ns >= begin_ns_ && call.ended_ns != 0) {
      writer.span({.name = std::string(name(call.kind)), .begin_ns = call.issued_ns, .end_ns = call.ended_ns},
                  "in flight", thread_, call_args(call, groups_.at(call.group)));
    }
  }
  for (const auto& span : unit_spans(unit_events_)) {
    writer.span(span, "unit", thread_);
  }
  return writer.text();
}

void Trace::Recording::write(const std::string& events) const {
  const auto path = fmt::format("{}/rank-{}.json", options_.folder, rank_);
  std::ofstream file(path);
  file << fmt::format(R"({{"displayTimeUnit": "ms", "baseTimeNanoseconds": {}, "tessera": {{"rank": {}, "ranks": {}, )"
                      R"("clock_offset_ns": {}, "clock_error_ns": {}}}, "traceEvents": [)",
                      begin_ns_, rank_, ranks_, clock_.ns, clock_.error_ns)
       << events << "\n]}\n"
       << std::flush;
  TESSERA_CHECK(Error, file.good(), "Trace: {}: cannot be written: {}", path, std::strerror(errno));
}

Trace::Trace(ModuleRef model, Options options) : recording_(std::make_unique<Recording>(model, std::move(options))) {}

Trace::~Trace() = default;

void Trace::stop() {
  if (const auto recording = std::exchange(recording_, nullptr)) {
    recording->stop();
  }
}

TraceSteps::TraceSteps(ModuleRef model, Options options) : model_(model), options_(std::move(options)) {
  check_step_range("TraceSteps", options_.steps);
}

TraceSteps::~TraceSteps() = default;

void TraceSteps::begin_step(int64_t step) {
  if (step == options_.steps.first && !options_.folder.empty()) {
    trace_.emplace(model_, Trace::Options{.folder = options_.folder, .ops = options_.ops});
  }
  if (trace_) {
    step_ = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    step_->before(fmt::format("step {}", step));
  }
}

void TraceSteps::end_step(int64_t step) {
  step_.reset();
  if (trace_ && step == options_.steps.last) {
    trace_->stop();
    trace_.reset();
  }
}

}  // namespace tessera
