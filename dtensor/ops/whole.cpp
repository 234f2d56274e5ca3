// Ops that only run on whole tensors: each rank gathers the operands and computes the same. Right, and as slow
// as one device. Random ops and ops that make tensors out of nothing must not be here: they would differ.

#include "dtensor/ops/op_names.h"
#include "dtensor/sharding_rule.h"

namespace tessera {

namespace {

constexpr const char* kSelections = R"(
    nonzero nonzero_static masked_select masked_scatter masked_scatter_ take put put_ _unique2 unique_dim
    unique_consecutive repeat_interleave.Tensor searchsorted.Tensor searchsorted.Scalar bucketize.Tensor bincount
    histc histogram.bin_ct kthvalue median nanmedian index_reduce select_scatter slice_scatter diagonal_scatter
    diagonal_backward rot90 trace dist _cdist_forward _cdist_backward unfold_backward unfold_copy _chunk_cat
    isin.Tensor_Tensor _unsafe_masked_index _unsafe_masked_index_put_accumulate log_sigmoid_forward
    log_sigmoid_backward _prelu_kernel_backward embedding_renorm _embedding_bag _embedding_bag_backward
    _embedding_bag_dense_backward _segment_reduce_backward segment_reduce renorm addbmm linspace.Tensor_Tensor
    linspace.Tensor_Scalar linspace.Scalar_Tensor pixel_shuffle pixel_unshuffle channel_shuffle)";

constexpr const char* kImages = R"(
    convolution convolution_backward max_pool2d_with_indices max_pool2d_with_indices_backward
    max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool2d avg_pool2d_backward avg_pool3d
    avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d
    adaptive_max_pool3d_backward fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d_backward
    max_unpool2d max_unpool3d reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    reflection_pad3d reflection_pad3d_backward replication_pad1d replication_pad1d_backward replication_pad2d
    replication_pad2d_backward replication_pad3d replication_pad3d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d
    upsample_nearest3d_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d _upsample_nearest_exact2d_backward upsample_linear1d upsample_linear1d_backward
    upsample_bilinear2d upsample_bilinear2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    upsample_bicubic2d upsample_bicubic2d_backward upsample_trilinear3d upsample_trilinear3d_backward
    grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward im2col col2im)";

constexpr const char* kMatrices = R"(
    linalg_cholesky_ex linalg_inv_ex _linalg_det _linalg_slogdet _linalg_solve_ex _linalg_svd _linalg_eigh linalg_qr
    linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_lstsq linalg_householder_product linalg_solve_triangular
    linalg_ldl_factor_ex linalg_matrix_exp linalg_cross cholesky_inverse cholesky_solve triangular_solve ormqr
    lu_unpack)";

constexpr const char* kLosses = R"(
    multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward multilabel_margin_loss_backward
    _ctc_loss _ctc_loss_backward)";

const RegisterOpRules rules([] {
  register_whole_ops(aten_ops(kSelections));
  register_whole_ops(aten_ops(kImages));
  register_whole_ops(aten_ops(kMatrices));
  register_whole_ops(aten_ops(kLosses));
});

}  // namespace

}  // namespace tessera
