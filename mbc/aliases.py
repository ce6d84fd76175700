"""Names in data that were renamed, old -> new: what files of earlier versions are read by, and nothing else.

Profiles are measured on a GPU for hours, so those of an earlier schema version are translated (`mbc.profile.migrate`);
results of benchmarks, likewise. Plans are compiled again in seconds: one of an earlier schema version is refused.

No new name is also an old one, so that what is translated already stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Kinds of operations; in the kind of a fused group they are joined by `+`, and followed by `*` where they are several.
KINDS = {
    "relu_signs": "relu_mask",
    "relu_backward_signs": "relu_backward_masked",
    "join_statistics": "concat_statistics",
    "batch_normalize_sums": "batch_normalize_backward_reduce",
}
# mbc's own kernels. A kernel that is called as its kind is has that one's names.
KERNELS = {
    **KINDS,
    "pointwise": "conv1x1",
    "pointwise_statistics": "conv1x1_statistics",
    "pointwise_backward_data": "conv1x1_backward_data",
    "pointwise_sums": "conv1x1_bn_reduce",
    "pointwise_relu_backward_sums": "conv1x1_relu_backward_bn_reduce",
    "pointwise_inside_relu_backward_sums": "conv1x1_unstored_relu_backward_bn_reduce",
    "pointwise_relu_backward_signs_sums": "conv1x1_relu_backward_masked_bn_reduce",
    "pointwise_inside_relu_backward_signs_sums": "conv1x1_unstored_relu_backward_masked_bn_reduce",
    "pointwise_data_relu_sums": "conv1x1_backward_data_relu_bn_reduce",
    "pointwise_add_relu_backward_sums": "conv1x1_add_relu_backward_bn_reduce",
    "pointwise_inside_add_relu_backward_sums": "conv1x1_unstored_add_relu_backward_bn_reduce",
    "pointwise_add_relu_backward_signs_sums": "conv1x1_add_relu_backward_masked_bn_reduce",
    "pointwise_inside_add_relu_backward_signs_sums": "conv1x1_unstored_add_relu_backward_masked_bn_reduce",
    "pointwise_data_add_relu_sums": "conv1x1_backward_data_add_relu_bn_reduce",
    "pointwise_data_add_relu_sums_signed": "conv1x1_backward_data_add_relu_bn_reduce_masked",
    "pointwise_pair_add_relu_sums": "dual_conv1x1_add_relu_bn_reduce",
    "pointwise_pair_add_relu_sums_signed": "dual_conv1x1_add_relu_bn_reduce_masked",
    "pointwise_add_relu_and_sums": "conv1x1_add_relu_remat_bn_reduce",
    "pointwise_add_relu_and_sums_signed": "conv1x1_add_relu_remat_bn_reduce_masked",
    "pointwise_add_relu_and_sums_of_two": "conv1x1_add_relu_remat_bn_reduce_two_grads",
    "pointwise_add_relu_and_sums_of_two_signed": "conv1x1_add_relu_remat_bn_reduce_two_grads_masked",
    "pointwise_data_add_relu_and_sums_of_two": "conv1x1_backward_data_add_relu_remat_bn_reduce_two_grads",
    "pointwise_data_add_relu_and_sums_of_two_signed": "conv1x1_backward_data_add_relu_remat_bn_reduce_two_grads_masked",
    "pointwise_pair_add_relu_and_sums_of_two": "dual_conv1x1_add_relu_remat_bn_reduce_two_grads",
    "pointwise_pair_add_relu_and_sums_of_two_signed": "dual_conv1x1_add_relu_remat_bn_reduce_two_grads_masked",
    "pointwise_data_normalize_relu_sums": "conv1x1_backward_data_bn_relu_bn_reduce",
    "pointwise_data_normalize_relu_and_sums": "conv1x1_backward_data_bn_relu_remat_bn_reduce",
    "pointwise_normalize_backward": "conv1x1_unstored_bn_backward",
    "pointwise_normalize_relu_backward": "conv1x1_unstored_bn_relu_backward",
    "pointwise_normalize_relu_sums": "conv1x1_unstored_bn_relu_bn_reduce",
    "pointwise_normalize_sums": "conv1x1_unstored_bn_reduce",
    "few_filters": "conv1x1_narrow",
    "few_filters_backward_data": "conv1x1_narrow_backward_data",
    "few_filters_backward_filter": "conv1x1_narrow_backward_filter",
    "convolution_backward_data_apart": "conv_transpose_nonoverlapping",
    "convolution_backward_data_bias_add_concat": "conv_transpose_bias_add_concat",
    "convolution_few_channels": "stem_conv",
    "convolution_few_channels_filter": "stem_conv_backward_filter",
    "convolution_few_channels_fp32": "stem_conv_fp32",
    "convolution_few_channels_fp32_of_planes": "stem_conv_fp32_nchw",
    "convolution_few_channels_filter_fp32": "stem_conv_backward_filter_fp32",
    "convolution_few_channels_filter_fp32_of_planes": "stem_conv_backward_filter_fp32_nchw",
    "convolution_taps_filter": "convolution_backward_filter_tf32",
    "convolution_of_short_patches": "weight_stationary_conv",
    "convolution_backward_data_of_short_patches": "weight_stationary_conv_backward_data",
    "convolution_of_short_patches_statistics": "weight_stationary_conv_statistics",
    "convolution_in_halves": "fp32_emulated_conv",
    "convolution_backward_data_in_halves": "fp32_emulated_conv_backward_data",
    "convolution_backward_filter_in_halves": "fp32_emulated_conv_backward_filter",
    "convolution_of_patches": "fp32_emulated_halo",
    "convolution_backward_data_of_patches": "fp32_emulated_halo_backward_data",
    "convolution_backward_filter_of_patches": "fp32_emulated_halo_backward_filter",
    "linear_in_halves": "fp32_emulated_linear",
    "linear_backward_data_in_halves": "fp32_emulated_linear_backward_data",
    "linear_backward_filter_in_halves": "fp32_emulated_linear_backward_filter",
    "batch_normalize_add_relu_signs": "batch_normalize_add_relu_mask",
    "batch_normalize_twice_add_relu": "dual_batch_normalize_add_relu",
    "batch_normalize_twice_add_relu_signs": "dual_batch_normalize_add_relu_mask",
    "batch_normalize_relu_sums": "batch_normalize_relu_bn_reduce",
    "batch_normalize_relu_sums_of_slice": "batch_normalize_relu_bn_reduce_of_slice",
    "relu_backward_sums": "relu_backward_bn_reduce",
    "add_relu_backward_sums": "add_relu_backward_bn_reduce",
    "relu_backward_signs_sums": "relu_backward_masked_bn_reduce",
    "add_relu_backward_signs_sums": "add_relu_backward_masked_bn_reduce",
    "batch_statistics_beside": "batch_statistics_concat",
    "batch_normalize_at_once": "batch_normalize_single_launch",
    "batch_normalize_relu_at_once": "batch_normalize_relu_single_launch",
    "batch_normalize_add_relu_at_once": "batch_normalize_add_relu_single_launch",
    "batch_normalize_backward_at_once": "batch_normalize_backward_single_launch",
    "batch_normalize_relu_backward_at_once": "batch_normalize_relu_backward_single_launch",
    "relu_backward_batch_normalize_at_once": "relu_backward_batch_normalize_single_launch",
    "add_relu_backward_batch_normalize_at_once": "add_relu_backward_batch_normalize_single_launch",
    "batch_normalize_relu_and_sums": "batch_normalize_relu_remat_bn_reduce",
    "batch_normalize_add_relu_and_sums": "batch_normalize_add_relu_remat_bn_reduce",
    "batch_normalize_add_relu_and_sums_signed": "batch_normalize_add_relu_remat_bn_reduce_masked",
    "batch_normalize_add_relu_and_sums_of_two": "batch_normalize_add_relu_remat_bn_reduce_two_grads",
    "batch_normalize_add_relu_and_sums_of_two_signed": "batch_normalize_add_relu_remat_bn_reduce_two_grads_masked",
    "batch_normalize_twice_add_relu_and_sums": "dual_batch_normalize_add_relu_remat_bn_reduce",
    "batch_normalize_twice_add_relu_and_sums_signed": "dual_batch_normalize_add_relu_remat_bn_reduce_masked",
    "batch_normalize_twice_add_relu_and_sums_of_two": "dual_batch_normalize_add_relu_remat_bn_reduce_two_grads",
    "batch_normalize_twice_add_relu_and_sums_of_two_signed": (
        "dual_batch_normalize_add_relu_remat_bn_reduce_two_grads_masked"
    ),
    "relu_max_pool_backward_sums": "relu_max_pool_backward_bn_reduce",
    "relu_max_pool_backward_normalize": "relu_max_pool_backward_bn_backward",
    "max_pool_backward_add_sums": "max_pool_backward_add_bn_reduce",
    "max_pool_backward_add_normalize": "max_pool_backward_add_bn_backward",
    "max_pool_backward_add_slice_sums": "max_pool_backward_add_slice_bn_reduce",
    "max_pool_backward_add_slice_normalize": "max_pool_backward_add_slice_bn_backward",
    "sgd_updates": "multi_tensor_sgd",
    "adamw_updates": "multi_tensor_adamw",
    "casts": "multi_tensor_cast",
    "update_runnings": "multi_tensor_update_running",
}
# Settings of kernels, by provider.
SETTINGS: Mapping[str, Mapping[str, str]] = {"mbc": {"edition": "version"}, "cublaslt": {"sums": "split_k"}}
# What `--without` takes.
TECHNIQUES = {"split": "micro_batches", "beside": "concurrent_stream"}
# Columns of profiles.
COLUMNS = {"for_parts": "micro_batches_only"}

_KIND = re.compile(r"[a-z0-9_]+")
_KIND_OF_SIGNATURE = re.compile(r'(?<="kind":")[^"]*')


def kind(old: str) -> str:
    """Of an operation or a group."""
    return _KIND.sub(lambda match: KINDS.get(match[0], match[0]), old)


def signature(old: str) -> str:
    """Of a request (`mbc.profile.signature`), whose members are operations, too."""
    return _KIND_OF_SIGNATURE.sub(lambda match: kind(match[0]), old)


def kernel(old: str) -> str:
    """Of any provider: the libraries' are called as their kinds, and none of those was renamed."""
    return KERNELS.get(old, old)


def setting(provider: str, old: str) -> str:
    return SETTINGS.get(provider, {}).get(old, old)
