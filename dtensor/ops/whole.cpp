// Ops that run only on full tensors: each rank gathers the operands and computes the same, correct but as slow as one
// device. Random ops and factories must not be listed here, because their results would differ.

#include "dtensor/propagation/op_names.h"
#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

namespace {

constexpr const char* kSelections = R"(
    nonzero nonzero_static masked_select masked_scatter masked_scatter_ take put put_ _unique2 unique_dim
    unique_consecutive repeat_interleave.Tensor searchsorted.Tensor searchsorted.Scalar bucketize.Tensor bincount
    histc histogram.bin_ct histogram.bins_tensor _histogramdd_from_bin_cts
    _histogramdd_bin_edges _histogramdd_from_bin_tensors kthvalue median nanmedian index_reduce select_scatter slice_scatter diagonal_scatter
    diagonal_backward rot90 trace dist _cdist_forward _cdist_backward _chunk_cat
    isin.Tensor_Tensor isin.Scalar_Tensor bucketize.Scalar _unique unique_dim_consecutive masked_scatter_backward
    _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward _pack_padded_sequence hash_tensor
    logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor view.dtype _unsafe_masked_index _unsafe_masked_index_put_accumulate
    _prelu_kernel_backward embedding_renorm embedding_renorm_ _embedding_bag _embedding_bag_backward
    _embedding_bag_dense_backward _segment_reduce_backward segment_reduce renorm addbmm linspace.Tensor_Tensor
    linspace.Tensor_Scalar linspace.Scalar_Tensor pixel_shuffle pixel_unshuffle channel_shuffle)";

constexpr const char* kImages = R"(
    _convolution conv_tbc slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d
    slow_conv_transpose3d _slow_conv2d_forward _slow_conv2d_backward.output_mask affine_grid_generator
    fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d fractional_max_pool3d_backward)";

constexpr const char* kMatrices = R"(
    linalg_cholesky_ex linalg_inv_ex _linalg_det _linalg_slogdet _linalg_solve_ex _linalg_svd _linalg_eigh linalg_qr
    linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_lstsq linalg_householder_product linalg_solve_triangular
    linalg_ldl_factor_ex linalg_matrix_exp linalg_matrix_sqrth linalg_cross cholesky_inverse cholesky_solve triangular_solve ormqr
    lu_unpack geqrf linalg_eig _linalg_eigvals linalg_ldl_solve linalg_polar linalg__powsum _cholesky_solve_helper
    _linalg_check_errors linalg_pinv.atol_rtol_tensor linalg_matrix_rank linalg_matrix_rank.tol_tensor
    linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float _int_mm _addmm_activation _grouped_mm
    _trilinear block_diag diag_embed _euclidean_dist _pdist_forward _pdist_backward _compute_linear_combination)";

constexpr const char* kLosses = R"(
    multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward multilabel_margin_loss_backward
    _ctc_loss _ctc_loss.Tensor _ctc_loss_backward _ctc_loss_backward.Tensor _standard_gamma_grad _dirichlet_grad
    _weight_norm_interface _weight_norm_interface_backward _masked_softmax _masked_softmax_backward
    _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ allclose)";

const RegisterOpRules whole_rules([] {
  register_replicated_ops(aten_ops(kSelections));
  register_replicated_ops(aten_ops(kImages));
  register_replicated_ops(aten_ops(kMatrices));
  register_replicated_ops(aten_ops(kLosses));
});

}  // namespace

}  // namespace tessera
