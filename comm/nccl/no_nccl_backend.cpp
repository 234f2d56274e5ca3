#include "comm/nccl/nccl_backend.h"

namespace tessera {

namespace {

[[noreturn]] void refuse() {
  throw NotImplementedError(
      "init_process_group: backend \"nccl\" is not part of this build; build with --config=cuda, or take one of "
      "\"shm\", "
      "\"gloo\", \"threads\", \"fake\", or \"\" to choose");
}

}  // namespace

void check_nccl_is_built() {
  refuse();
}

DeviceReport report_devices(int, int) {
  refuse();
}

void use_cuda_device(int) {
  refuse();
}

c10::intrusive_ptr<GroupBackend> make_nccl_backend(NcclBackendOptions) {
  refuse();
}

std::string nccl_flight_record() {
  refuse();
}

}  // namespace tessera
