"""Convolutions: direct, pointwise (1x1), depthwise and stem convolutions, with prologues and epilogues.

* `conv_operands`: operands and sizes of a pass of a convolution, in the form that launchers read
* `halo`: tiles of convolutions whose halo is in shared memory
* `conv1x1`: pointwise convolutions in 16 bits, with batch statistics in the epilogue
* `conv1x1_backward_data`: data gradients of these, with batch normalization's reductions in the epilogue
* `conv1x1_bn_backward`: batch normalization's backward pass over a recomputed pointwise convolution
* `dual_conv1x1`: two pointwise GEMMs in one launch
* `conv1x1_mma`: these three families by mma.sync, for GPUs without wgmma
* `implicit_gemm`: convolutions with windows by mma.sync, with batch statistics in the epilogue, and filter gradients
* `implicit_gemm_strided`: data gradients of strided convolutions by mma.sync
* `mma_gemm`: tiles, blocks and estimated times of convolutions by mma.sync
* `conv1x1_narrow`: pointwise convolutions to at most eight filters
* `conv1x1_narrow_norm`: pointwise convolutions to at most four filters behind a norm and a (leaky) ReLU
* `conv_transpose_nonoverlapping`: transposed convolutions whose stride is their filter size
* `depthwise`: depthwise 3x3 convolutions
* `depthwise_rows`: depthwise 5x5, 7x7, 1xK and Kx1 convolutions, channels last
* `direct`: any convolution or linear layer that libraries refuse
* `matmul`: batched products of matrices
* `plane_sweep`: sizes and tiles of convolutions that sweep the planes of a volume
* `plane_sweep_conv`: 16-bit convolutions of 32 to 64 channels that sweep planes, in all passes
* `plane_sweep_norm`: these convolutions and filter gradients behind a norm and a (leaky) ReLU, which they recompute
* `statistics_epilogue`: convolutions with batch statistics in the epilogue
* `stem_conv`: stem convolutions, which read images with at most seven channels
* `stem_im2col`: stem convolutions on Hopper's tensor cores, with windows copied to shared memory (im2col)
* `stem_volume`: 16-bit stem convolutions of volumes that sweep planes
* `tf32_filter_gradient`: filter gradients of 3x3 convolutions in tf32
* `weight_stationary_conv`: 16-bit convolutions of 64 or 128 channels with the filter in shared memory
"""
