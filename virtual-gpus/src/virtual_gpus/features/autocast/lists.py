"""In which precision each operator runs under `torch.autocast("cuda")`: PyTorch's cast lists for CUDA.

Sources: the macros AT_FORALL_* in aten/src/ATen/autocast_mode.h and what aten/src/ATen/autocast_mode.cpp registers, of
PyTorch 2.11 to 2.15 together. `autocast.names` leaves out what the installed version does not cast. An operator that
is in no list runs in the precision of its inputs.
"""

from __future__ import annotations

LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr
    matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()  # fmt: skip

FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth
""".split()  # fmt: skip

# Those with an optional dtype of the result: it becomes float32 unless the caller gave one. Inputs are not cast.
FP32_SET_OPT_DTYPE = """
    prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod
    cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
    sum.dim_IntList sum.dim_DimnameList
""".split()  # fmt: skip

# Run in the widest precision among the inputs.
PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()

BANNED = ["binary_cross_entropy"]
BANNED_TEXT = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. "
    "Use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss."
)

# Not cast here. An LSTM casts by code of its own (aten/src/ATen/cudnn/AutocastRNN.cpp, see `features.rnn`); torch.norm
# calls linalg_vector_norm.
ELSEWHERE = ["_cudnn_rnn", "norm.Scalar", "norm.ScalarOpt_dim", "norm.names_ScalarOpt_dim"]
