#include "fully_shard/gradient_reduction.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "base/error.h"
#include "comm/collectives.h"

namespace tessera {

namespace {

/// Elements after the gradients that hold one flag a parameter.
int64_t flags_numel(const ParamLayout& layout) {
  const auto params = static_cast<int64_t>(layout.slots.size());
  return (params + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

/// Copies a full gradient into column range [offset, offset + chunk) of `buffer`, [ranks, numel]; rows past
/// its end become zero, also all of them if it is undefined.
void copy_in(const at::Tensor& grad, const ParamSlot& slot, const at::Tensor& buffer) {
  const auto columns = buffer.narrow(1, slot.offset, slot.chunk_numel);
  if (!grad.defined()) {
    columns.zero_();
    return;
  }
  if (slot.numel() == 0) {
    return;
  }
  const auto flat = grad.reshape({-1});
  const int64_t full_chunks = slot.numel() / slot.chunk_numel;
  const int64_t full_numel = full_chunks * slot.chunk_numel;
  columns.narrow(0, 0, full_chunks).copy_(flat.narrow(0, 0, full_numel).view({full_chunks, slot.chunk_numel}));
  if (full_chunks < buffer.size(0)) {
    columns.narrow(0, full_chunks, buffer.size(0) - full_chunks).zero_();
    const int64_t rest = slot.numel() - full_numel;
    columns.select(0, full_chunks).narrow(0, 0, rest).copy_(flat.narrow(0, full_numel, rest));
  }
}

/// The space between slots, which the collective sends too, and the flags.
void fill_rest(const std::vector<at::Tensor>& grads, const ParamLayout& layout, const at::Tensor& buffer) {
  for (size_t i = 0; i < layout.slots.size(); ++i) {
    const auto& slot = layout.slots[i];
    const int64_t end = i + 1 < layout.slots.size() ? layout.slots[i + 1].offset : layout.shard_numel;
    const int64_t unused = end - slot.offset - slot.chunk_numel;
    if (unused > 0) {
      buffer.narrow(1, slot.offset + slot.chunk_numel, unused).zero_();
    }
  }
  const auto flags = buffer.narrow(1, layout.shard_numel, flags_numel(layout));
  flags.zero_();
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].defined()) {
      flags.select(1, static_cast<int64_t>(i)).fill_(1);
    }
  }
}

}  // namespace

std::vector<at::Tensor> reduce_scatter_grads(std::vector<at::Tensor> grads, const ParamLayout& layout,
                                             const GradientReduction& options, const ProcessGroupPtr& group) {
  const at::AutoDispatchBelowADInplaceOrView below;
  TESSERA_ASSERT(grads.size() == layout.slots.size(), "{} gradients, {} slots", grads.size(), layout.slots.size());
  const auto tensor_options = at::TensorOptions().dtype(options.reduce_dtype).device(options.device);
  const int64_t numel = layout.shard_numel + flags_numel(layout);
  const auto buffer = at::empty({layout.num_ranks, numel}, tensor_options);
  fill_rest(grads, layout, buffer);
  for (size_t i = 0; i < grads.size(); ++i) {
    copy_in(grads[i], layout.slots[i], buffer);
    grads[i] = at::Tensor();  // freed as soon as it is copied
  }

  const auto reduced = at::empty({numel}, tensor_options);
  reduce_scatter(reduced, buffer, ReduceOp::Avg, group);

  const auto used = reduced.narrow(0, layout.shard_numel, static_cast<int64_t>(grads.size())).to(at::kCPU, at::kFloat);
  const auto* used_data = used.const_data_ptr<float>();
  const auto shard = reduced.narrow(0, 0, layout.shard_numel).to(options.grad_dtype);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (used_data[i] > 0) {
      const auto& slot = layout.slots[i];
      const int64_t own = slot.rows_of(options.rank, layout.num_ranks).length * slot.row_numel;
      grads[i] = shard.narrow(0, slot.offset, own);
    }
  }
  return grads;
}

}  // namespace tessera
