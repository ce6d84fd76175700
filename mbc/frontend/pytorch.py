"""PyTorch's names and their equivalents in mbc, for remedies of unknown names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType


class Place(Enum):
    """The context of a name, which determines the names that it is compared with."""

    OPERATION = "operation"  # `equivalent` is a stage of a pipe
    LOSS = "loss"  # `equivalent` is a stage into which (prediction, target) is piped
    SETTING = "setting"  # `equivalent` is a setting of an operation or an optimizer
    OPTIMIZER = "optimizer"  # `equivalent` is a value of train.optimizer
    PRECISION = "precision"  # `equivalent` is a value of train.precision
    ENTRY = "entry"  # an entry of a section; `equivalent` is an option of the command line, or an entry
    VALUE = "value"  # `equivalent` is a value that settings accept


@dataclass(frozen=True, slots=True)
class Answer:
    """The equivalent of a name, as a source writes it; if mbc has none, empty, and `note` suggests an alternative."""

    equivalent: str
    note: str = ""

    @property
    def remedy(self) -> str:
        """The answer as a remedy of an error."""
        if not self.equivalent:
            return f"mbc does not support it: {self.note}"
        return f"in mbc that is `{self.equivalent}`" + (f": {self.note}" if self.note else "")


_O, _L, _S, _P = Place.OPERATION, Place.LOSS, Place.SETTING, Place.PRECISION
_NORM = "normalize by `bn` or `layer_norm`"
_CHANNELS = "leave it out: the input of `|>` has its channels"
_ATTENTION = "mbc compiles networks of images"
_OPTIMIZERS = "write `sgd(momentum=0.9)` or `adamw`"
_MODES = "write `upsample(2)` or `upsample(size=(14, 14))`, with `mode=bilinear` where it is not nearest"
_CORNERS = "it is false, PyTorch's default"

# Place, names as PyTorch writes them (upper case, `_`, and a final 1d to 3d are ignored), answer. A name that differs
# from a layer's name only so needs no row, if all settings of the layer have defaults.
ROWS: tuple[tuple[Place, tuple[str, ...], Answer], ...] = (
    (_O, ("Conv2d", "Conv1d", "Conv3d", "convolution"), Answer("conv(64, 3, pad=1)", "output channels, kernel")),
    (_O, ("ConvTranspose2d", "deconv"), Answer("conv_transpose(64, 2, stride=2)")),
    (_O, ("Linear", "Dense", "fc", "LazyLinear"), Answer("linear(10)", "output features")),
    (_O, ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"), Answer("bn")),
    (_O, ("SyncBatchNorm",), Answer("bn(sync=true)", "sync_batch_norm of the train section is for all")),
    (_O, ("LayerNorm", "LayerNorm2d"), Answer("layer_norm", "over channels, each pixel separately")),
    (_O, ("GroupNorm",), Answer("group_norm(2)", "groups")),
    (_O, ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"), Answer("instance_norm(affine=false)")),
    (_O, ("RMSNorm",), Answer("", _NORM)),
    (_O, ("LocalResponseNorm",), Answer("lrn(5)")),
    (_O, ("MaxPool2d", "max_pool2d"), Answer("maxpool(2)")),
    (_O, ("AvgPool2d", "avg_pool2d"), Answer("avgpool(2)")),
    (_O, ("AdaptiveAvgPool2d",), Answer("global_avgpool", "to other sizes `adaptive_avgpool(7)`")),
    (_O, ("AdaptiveMaxPool2d",), Answer("adaptive_maxpool(7)", "to one pixel it is `global_maxpool`")),
    (_O, ("Dropout1d", "Dropout2d", "Dropout3d"), Answer("dropout(0.5, channels=true)", "whole channels")),
    (_O, ("AlphaDropout", "FeatureAlphaDropout"), Answer("dropout(0.5)", "zeroes elements")),
    (_O, ("StochasticDepth", "DropPath"), Answer("drop_path(0.1)", "whole samples, as with mode=row")),
    (_O, ("clip", "clamp_min", "clamp_max"), Answer("clamp(min=0, max=1)")),
    (_O, ("Threshold",), Answer("threshold(0.1, 0)")),
    (_O, ("square",), Answer("pow(2)")),
    (_O, ("swish",), Answer("silu")),
    (_O, ("Parameter",), Answer("", "write `parameter(64)` where a tensor is: it is one")),
    (_O, ("LogSoftmax",), Answer("log_softmax", "`softmax_cross_entropy` takes logits")),
    (_O, ("Upsample", "UpsamplingNearest2d"), Answer("upsample(2)", "a factor, or `size`")),
    (_O, ("interpolate", "UpsamplingBilinear2d", "bilinear"), Answer("upsample(2, mode=bilinear)", "or `size`")),
    (_O, ("Unfold", "Fold", "grid_sample"), Answer("", f"{_MODES}; `conv_transpose` learns how")),
    (_O, ("cat", "hstack"), Answer("concat", "pipe in a tuple, `(a, b) |> concat`")),
    (_O, ("view", "unsqueeze"), Answer("reshape(-1)", "the sizes of a sample, without the batch")),
    (_O, ("transpose", "swapaxes"), Answer("permute((0, 2, 3, 1))")),
    (_O, ("narrow",), Answer("slice(1, 0, 2)", "axis, start, stop")),
    (_O, ("unbind",), Answer("", "`chunk(2)` gives several tensors, to as many names")),
    (_O, ("Identity",), Answer("", "bind the tensor to a name, or leave the stage out")),
    (_O, ("Sequential", "ModuleList"), Answer("", "join stages by `|>`, and name them as a `block`")),
    (_O, ("no_grad", "stop_gradient"), Answer("detach")),
    (_O, ("ZeroPad2d", "pad"), Answer("padding(1)", "`conv` and pooling take `pad`, too")),
    (_O, ("ReflectionPad2d",), Answer("padding(1, mode=reflect)")),
    (_O, ("ReplicationPad2d",), Answer("padding(1, mode=replicate)")),
    (_O, ("Embedding", "LSTM", "GRU", "RNN", "Transformer"), Answer("", _ATTENTION)),
    (_O, ("MultiheadAttention", "scaled_dot_product_attention"),
     Answer("conv(576, 1) |> attention(3)", "queries, keys and values of 192 channels, in 3 heads")),
    (_O, ("bmm", "einsum"), Answer("", "`matmul` multiplies tensors, `linear` by parameters")),
    (_L, ("NLLLoss", "nll_loss"), Answer("nll", "of log_softmax and classes")),
    (_L, ("CrossEntropyLoss", "cross_entropy"), Answer("softmax_cross_entropy", "of logits and classes")),
    (_L, ("MSELoss", "mse_loss", "l2_loss"), Answer("mse")),
    (_O, ("topk", "accuracy", "MulticlassAccuracy"), Answer("", "`top_k` of logits and classes is a metric")),
    (_O, ("JaccardIndex", "MeanIoU", "jaccard_index"), Answer("", "`mean_iou` of logits and classes is a metric")),
    (_O, ("RandomCrop", "RandomResizedCrop", "RandomHorizontalFlip", "ColorJitter", "CenterCrop", "Normalize"),
     Answer("", "`augment` crops, mirrors, recolours and normalises an input of bytes")),
    (_L, ("DiceLoss", "dice_loss"), Answer("dice", "of logits and classes, mean over images and classes")),
    (_L, ("DiceCELoss", "DC_and_CE_loss"), Answer("dice(cross_entropy=1)", "one pass over the logits computes both")),
    (_L, ("TverskyLoss",), Answer("tversky", "of logits and classes")),
    (_L, ("FocalLoss", "sigmoid_focal_loss"), Answer("focal", "of logits and classes, or regions")),
    (_L, ("l1_loss", "mae_loss"), Answer("l1")),
    (_L, ("SmoothL1Loss",), Answer("smooth_l1(1.0)", "the setting is beta")),
    (_L, ("HuberLoss",), Answer("smooth_l1(1.0)", "with beta = delta and times delta it is the Huber loss")),
    (_L, ("BCELoss",), Answer("binary_cross_entropy(logits=false)", "of probabilities")),
    (_L, ("BCEWithLogitsLoss", "binary_cross_entropy_with_logits"),
     Answer("binary_cross_entropy", "of logits, without `sigmoid`")),
    (_L, ("KLDivLoss", "kl_div"), Answer("kl_divergence(logits=false)", "of log_softmax and probabilities")),
    (_L, ("HingeEmbeddingLoss", "CTCLoss", "TripletMarginLoss"),
     Answer("", "write `softmax_cross_entropy` or `mse`")),
    (_S, ("padding",), Answer("pad")),
    (_S, ("kernel_size",), Answer("kernel")),
    (_S, ("output_padding",), Answer("output_pad")),
    (_S, ("padding_mode",), Answer("", "`pad` is of zeros")),
    (_S, ("out_channels", "filters"), Answer("channels")),
    (_S, ("out_features", "units"), Answer("features")),
    (_S, ("in_channels", "in_features", "num_features", "num_channels"), Answer("", _CHANNELS)),
    (_S, ("inplace",), Answer("", "leave it out, mbc overwrites by itself what nobody needs any more")),
    (_S, ("scale_factor",), Answer("factor")),
    (_S, ("antialias",), Answer("", _CORNERS)),
    (_S, ("negative_slope",), Answer("slope")),
    (_S, ("ceil_mode",), Answer("ceil")),
    (_S, ("count_include_pad",), Answer("count_pad")),
    (_S, ("label_smoothing",), Answer("smoothing")),
    (_S, ("reduction", "size_average"), Answer("", "losses are means, and can be multiplied by numbers")),
    (_S, ("weight",), Answer("class_weights", "a tuple with a weight a class")),
    (_S, ("track_running_stats",), Answer("track")),
    (_S, ("return_indices", "divisor_override", "start_dim", "end_dim", "approximate"), Answer("", "leave it out")),
    (_S, ("device", "dtype"), Answer("", "leave it out, `train { precision = bf16 }` says what all computes in")),
    (_S, ("betas",), Answer("beta1", "and `beta2`, a number each")),
    (_S, ("dampening", "amsgrad", "maximize", "foreach", "fused", "capturable"), Answer("", "leave it out")),
    (Place.OPTIMIZER, ("Adam", "NAdam", "RAdam"), Answer("adamw(weight_decay=0)", "without weight decay that is Adam")),
    (Place.OPTIMIZER, ("AdamW",), Answer("adamw")),
    (Place.OPTIMIZER, ("LARS", "LARC"), Answer("lars")),
    (Place.OPTIMIZER, ("LAMB", "FusedLAMB"), Answer("lamb")),
    (Place.OPTIMIZER, ("SGD", "momentum", "nesterov"), Answer("sgd(momentum=0.9)", "`nesterov=true` may be added")),
    (Place.OPTIMIZER, ("RMSprop", "Adagrad", "Adadelta", "Adamax", "Lion", "LBFGS"),
     Answer("", _OPTIMIZERS)),
    (_P, ("float32", "float", "single", "f32"), Answer("fp32")),
    (_P, ("float16", "half", "f16"), Answer("fp16")),
    (_P, ("bfloat16", "amp", "autocast", "mixed"), Answer("bf16", "parameters are kept in fp32")),
    (_P, ("float64", "double", "f64"), Answer("fp64", "for the CPU")),
    (_P, ("int8", "fp8", "float8", "int4"), Answer("", "write `bf16` or `fp16`")),
    (Place.ENTRY, ("lr", "learning_rate"), Answer("--lr", "of mbc train, or give it to each step")),
    (Place.ENTRY, ("epochs", "num_epochs"), Answer("--epochs", "of mbc train")),
    (Place.ENTRY, ("scheduler", "lr_scheduler"), Answer("--schedule", "of mbc train")),
    (Place.ENTRY, ("seed", "manual_seed"), Answer("--seed", "of mbc train")),
    (Place.ENTRY, ("batch_size", "batch"), Answer("--set batch=64", "where the network has a parameter `batch`")),
    (Place.ENTRY, ("clip_grad_norm_", "max_norm", "max_grad_norm"), Answer("clip_norm = 1.0", "of all gradients")),
    (Place.ENTRY, ("clip_grad_value_",), Answer("clip_value = 0.5")),
    (Place.ENTRY, ("accumulation_steps", "gradient_accumulation_steps", "iters_to_accumulate"),
     Answer("accumulate = 4", "mini-batches a step")),
    (Place.ENTRY, ("AveragedModel", "ModelEmaV2", "ema_decay", "swa"), Answer("ema = 0.9999", "of all weights")),
    (Place.ENTRY, ("param_groups",), Answer('groups = group("*.bias", rate=2)', "or several in parentheses")),
    (Place.ENTRY, ("requires_grad", "freeze"), Answer('frozen = "*.bias"', "or several patterns in parentheses")),
    (Place.VALUE, ("True",), Answer("true")),
    (Place.VALUE, ("False",), Answer("false")),
    (Place.VALUE, ("None",), Answer("", "leave the setting out")),
    (Place.VALUE, ("same", "valid"), Answer("", "write `pad` as a number, such as `pad=1` for a kernel of 3")),
    (Place.VALUE, ("kaiming", "kaiming_normal", "kaiming_normal_"), Answer("he")),
    (Place.VALUE, ("glorot", "xavier_normal", "xavier_normal_"), Answer("xavier")),
    (Place.VALUE, ("zeros", "zeros_"), Answer("zero")),
)  # fmt: skip


def _joined(name: str) -> str:
    return name.lower().replace("_", "")


def _plain(name: str) -> str:
    plain = _joined(name)
    return plain[:-2] if plain.endswith(("1d", "2d", "3d")) else plain


@cache
def _table() -> Mapping[tuple[Place, str], Answer]:
    from mbc.ops import LAYERS  # here, so that no command's help waits for NumPy

    rows = [(place, name, answer) for place, names, answer in ROWS for name in names]
    exact = {(place, _joined(name)): answer for place, name, answer in rows}
    plain = {(place, _plain(name)): answer for place, name, answer in reversed(rows)}
    layers = (layer for layer in LAYERS.values() if all(p.default is not None for p in layer.parameters))
    spelt = {(_L if layer.loss else _O, _joined(layer.name)): Answer(layer.name) for layer in layers}
    return MappingProxyType(plain | spelt | exact)


def answer(name: str, *places: Place) -> Answer | None:
    """Return the equivalent of PyTorch's name in one of these contexts; None if PyTorch has no such name."""
    for place in places:
        row = _table().get((place, _joined(name))) or _table().get((place, _plain(name)))
        if row is not None:
            return row
    return None
