#include "dtensor/local/materialized_view.h"

#include <c10/core/TensorImpl.h>

#include <optional>
#include <utility>

#include "base/error.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/redistribute.h"
#include "dtensor/spec/strided_view.h"

namespace tessera {

namespace {

/// Version counter and the version that it had.
struct SeenVersion {
  static SeenVersion of(const at::Tensor& tensor) {
    const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
    return {.counter = counter, .version = counter.enabled() ? counter.current_version() : 0};
  }
  bool has_changed() const {
    return counter.enabled() && counter.current_version() != version &&
           !(expects_one && counter.current_version() == version + 1);
  }

  /// `expects` initializes expects_one.
  void see_write(bool expects) {
    version = counter.current_version();
    expects_one = expects;
  }

  c10::VariableVersion counter;
  uint32_t version;
  bool expects_one = false;  // autograd will count a known write after it
};

/// Local tensor, as long as another owner keeps its memory.
class LocalMemory {
 public:
  explicit LocalMemory(const at::Tensor& local)
      : storage_(local.storage().getWeakStorageImpl()),
        keys_(local.key_set()),
        dtype_(local.dtype()),
        sizes_(local.sizes()),
        strides_(local.strides()),
        offset_(local.storage_offset()) {}

  /// Returns an undefined tensor if it has no other owner.
  at::Tensor tensor() const {
    auto storage = storage_.lock();
    if (!storage) {
      return {};
    }
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), keys_, dtype_);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_, offset_);
    return tensor;
  }

  /// Returns whether it has an owner that released its memory, as units do with full parameters.
  bool is_freed() const {
    const auto storage = storage_.lock();
    const bool is_empty = c10::multiply_integers(sizes_) == 0;
    return storage && !is_empty && storage->nbytes() == 0;
  }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
  DimVector sizes_, strides_;
  int64_t offset_;
};

/// Information about the viewed tensor for a write to a view.
struct Target {
  LocalMemory local;
  SpecPtr spec;
  int64_t offset;  // of the DTensor, to which views' offsets are relative
};

std::optional<SlicedDims> locate_view(const at::Tensor& view, const Target& target) {
  const auto meta = TensorMeta::of(view);
  return take_apart(target.spec->meta(),
                    {.sizes = meta.sizes, .strides = meta.strides, .offset = view.storage_offset() - target.offset});
}

void copy_to_target(const at::Tensor& view, const Target& target) {
  const auto& meta = *dtensor_meta(view);
  const auto& spec = *target.spec;
  const auto place = locate_view(view, target);
  TESSERA_ASSERT(place, "a write to {}, which is no view of {}", meta.spec->to_string(), spec.to_string());
  const Placements replicated(spec.placements().size(), Replicate());
  const auto whole = redistribute_local(meta.local, *meta.spec, replicated);
  if (const auto local = target.local.tensor(); local.defined()) {
    copy_to_place(whole, *place, local, spec);
  }
}

}  // namespace

struct MaterializedView::Viewed {
  SeenVersion tensor;
  std::optional<SeenVersion> local;
  std::optional<Target> target;  // none: writes cannot be copied back
};

MaterializedView MaterializedView::of(const at::Tensor& viewed, Elements elements) {
  const auto& meta = *dtensor_meta(viewed);
  MaterializedView view;
  if (meta.materialized_view) {
    const auto& nested = *meta.materialized_view.viewed_;
    if (elements == Elements::Same || !nested.target) {
      return meta.materialized_view;
    }
    view.viewed_ =
        std::make_shared<const Viewed>(Viewed{.tensor = nested.tensor, .local = nested.local, .target = std::nullopt});
    return view;
  }
  Viewed of{.tensor = SeenVersion::of(viewed), .local = SeenVersion::of(meta.local), .target = std::nullopt};
  if (elements == Elements::Same && meta.local.has_storage()) {
    of.target = Target{.local = LocalMemory(meta.local), .spec = meta.spec, .offset = viewed.storage_offset()};
  }
  view.viewed_ = std::make_shared<const Viewed>(std::move(of));
  return view;
}

bool MaterializedView::is_stale() const {
  return viewed_ && (viewed_->tensor.has_changed() || (viewed_->local && viewed_->local->has_changed()));
}

MaterializedView MaterializedView::of_itself() const {
  auto tensor = viewed_->tensor;
  ++tensor.version;  // autograd counts a change of the tensor's sizes as a write afterwards
  MaterializedView view;
  view.viewed_ = std::make_shared<const Viewed>(
      Viewed{.tensor = std::move(tensor), .local = std::nullopt, .target = std::nullopt});
  return view;
}

std::string MaterializedView::why_not_written(const at::Tensor& view) const {
  const auto& target = viewed_->target;
  if (view.numel() == 0) {
    return "";
  }
  if (!target || target->spec->dtype() != view.scalar_type() || !locate_view(view, *target)) {
    return "is not made of slices of its dims";
  }
  if (target->spec->has_partial()) {
    return "views pending sums, " + to_string(target->spec->placements());
  }
  if (!viewed_->tensor.counter.enabled() || !viewed_->local->counter.enabled()) {
    return "is an inference tensor, whose writes nobody counts";
  }
  return target->local.is_freed() ? "views a tensor whose memory was freed" : "";
}

MaterializedView MaterializedView::carry_over(const at::Tensor& view, bool is_counted) const {
  auto written = *viewed_;
  if (view.numel() > 0) {
    copy_to_target(view, *written.target);
  }
  if (written.tensor.counter.enabled() && written.local && written.local->counter.enabled()) {
    const auto before = written.tensor.counter.current_version();
    written.local->counter.bump();
    const bool is_one_counter = written.tensor.counter.current_version() != before;  // as made by from_local
    written.local->see_write(!is_counted && is_one_counter);
    written.tensor.see_write(!is_counted);
  }
  MaterializedView result;
  result.viewed_ = std::make_shared<const Viewed>(std::move(written));
  return result;
}

}  // namespace tessera
