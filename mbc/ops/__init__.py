"""Every kind of operation and every layer of the language, collected from the files of this folder.

* `adaptive_pool`: pooling to any size
* `along`: softmax and the largest element
* `arithmetic`: sums, differences, products and quotients, broadcast
* `base`: the definitions of an operation and of a layer
* `activation`: elementwise operations
* `activation_variants`: hardswish, relu6, elu and others
* `attention`: scaled dot-product attention
* `augment`: images of bytes, cropped, mirrored, recoloured and normalised
* `batch_normalize`: the phases of batch normalisation
* `bias`: biases of convolutions and linear layers
* `broadcast`: sums and products of images with a number for each channel
* `collective`: sums over ranks
* `comparison`: maximum, minimum, masks and comparisons, broadcast
* `control_record`: the control block as the interpreter sees it
* `composed`: activations of several operations
* `convolution`: convolutions: three passes, and transposed
* `cross_entropy`: the layer of the three softmax cross entropies
* `elementary`: roots, exponentials, logarithms, powers
* `device`: the meaning of an operation on one element, as text in C
* `dice`: sums of Dice and Tversky losses with cross entropies, and the loss of these sums
* `elementwise_loss`: losses of two tensors of one shape
* `erf`: the error function in float64
* `fused`: several operations as one
* `framework_calls`: the equivalents of operations in other frameworks, as text
* `group_norm`: group and layer normalisation
* `rms_norm`: root mean square normalisation
* `im2col`: grouped convolutions as GEMMs
* `inner_product`: a loss whose gradient is given
* `initial`: names of weight initialisers in the language
* `instance_norm`: instance normalisation in training graphs, which is batch normalisation of each sample
* `kl_divergence`: the divergence of a softmax from probabilities
* `layerwise`: layer-wise adaptive rates: LARS and LAMB
* `loss`: losses and their weighted sum
* `matmul`: products of the matrices that two tensors hold
* `matrix`: linear layers and changes of element type
* `mean_iou`: mean intersection over union
* `normalization`: batch normalisation
* `parameter`: tensors that belong to no other layer
* `piecewise`: clamps, comparisons with numbers, detached tensors
* `pointwise`: the declaration of a function of one tensor, element by element
* `pooling`: max and average pooling
* `products`: matrix products with small rounding errors
* `random`: dropout and stochastic depth from a counter-based generator
* `rearrange`: permutations, slices, padding, splitting
* `reduce`: sums over axes
* `relu_mask`: the gradient of ReLU from bit masks
* `reshaping`: layers that change shapes
* `resize`: nearest and bilinear upsampling to any size
* `response`: local response normalisation
* `rounding`: rounding to stored types and to TF32
* `segmentation_loss`: the layers of Dice, Tversky and focal losses
* `shape`: upsampling, concatenation, flattening
* `shard`: updates of one rank's parts of parameters, and the exchange of these parts between ranks
* `soft_cross_entropy`: softmax cross entropy with probabilities as targets
* `standardize`: standardised filters of convolutions
* `top_k`: top-k accuracy
* `update`: the guard of a step, and the new parameters
* `weighted_cross_entropy`: softmax cross entropy with class weights and ignored positions
* `window`: geometry of sliding windows
* `window_bias`: the bias of attention within windows
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mbc.ops import (
    activation,
    activation_variants,
    adaptive_pool,
    along,
    arithmetic,
    attention,
    augment,
    batch_normalize,
    bias,
    broadcast,
    collective,
    comparison,
    composed,
    convolution,
    cross_entropy,
    dice,
    elementary,
    elementwise_loss,
    group_norm,
    inner_product,
    instance_norm,
    kl_divergence,
    layerwise,
    loss,
    matmul,
    matrix,
    mean_iou,
    normalization,
    parameter,
    piecewise,
    pooling,
    random,
    rearrange,
    reduce,
    relu_mask,
    reshaping,
    resize,
    response,
    rms_norm,
    segmentation_loss,
    shape,
    shard,
    soft_cross_entropy,
    standardize,
    top_k,
    update,
    weighted_cross_entropy,
    window_bias,
)
from mbc.ops.base import Layer, OpKind
from mbc.ops.pointwise import Pointwise

_FAMILIES = (
    convolution, standardize, bias, matrix, matmul, attention, window_bias, batch_normalize, normalization,
    instance_norm, group_norm, rms_norm, activation, activation_variants, elementary, broadcast, arithmetic, comparison,
    piecewise, reduce, along, parameter, relu_mask, random, augment, pooling, adaptive_pool, response, rearrange, shape,
    reshaping, composed, resize, cross_entropy, loss, soft_cross_entropy, weighted_cross_entropy, elementwise_loss,
    kl_divergence, inner_product, dice, segmentation_loss, layerwise, top_k, mean_iou, collective, update, shard,
)  # fmt: skip

KINDS: Mapping[str, OpKind] = MappingProxyType({kind.name: kind for family in _FAMILIES for kind in family.OPS})
LAYERS: Mapping[str, Layer] = MappingProxyType({layer.name: layer for family in _FAMILIES for layer in family.LAYERS})
POINTWISE: Mapping[str, Pointwise] = MappingProxyType(
    {
        function.name: function
        for family in (activation, activation_variants, elementary, piecewise)
        for function in family.POINTWISE
    }
)
